"""What is done to a run that trains at two sites, and what is seen of it: see sites.py.

Where the sites live, in namespaces or in containers, is another's to say (`Sites`).
"""

import time
from functools import partial
from typing import Any, Protocol

import beside

from diloco_client import Client

SITES = ("oslo", "bergen")
RUN = "sites"
SPEC: dict[str, Any] = {
    "name": RUN,
    "algorithm": {"fragments": 6, "quorum": 1},
    "inner": {"batch_sequences": 8},
    "membership": {"learners_min": 2},
    "evaluation": {"every_steps": 100_000, "sequences": 8},
    "keeping": {"checkpoint_every_steps": 200},
    "budget": {"steps": 10_000_000},
}
# Four processes start jax or compile meanwhile, on two cores that may be busy.
PATIENCE_S = 240.0
MORE_ROUNDS = 6


until = partial(beside.until, patience_s=PATIENCE_S, look_s=0.1, fails=RuntimeError)


class Sites(Protocol):
    """The processes of a hub and its sites, as an operator reaches them."""

    def cut(self, site: str, *, healed: bool = False) -> None:
        """Take a site's link away, without a word to anybody; or give it back."""

    def stop(self, site: str) -> None:
        """Ask its learner to end, and wait for it."""

    def learner(self, site: str, *, upgraded: bool = False) -> None:
        """Start its learner; `upgraded`: as the next release."""

    def revoke(self, site: str) -> None:
        """Take its credentials away at the hub."""

    def connected(self, site: str) -> bool:
        """Whether it has a connection to the hub."""

    def life_of_server(self) -> str:
        """Of the message server; another one after it was started anew."""


class Drill:
    """What is done to a run that trains at both sites, and what is seen of it."""

    def __init__(self, cluster: Sites, client: Client, cut_s: float) -> None:
        self.cluster, self.client, self.cut_s = cluster, client, cut_s

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.client.run(RUN)["status"]
        return status

    def committed(self, since: int = -1) -> list[dict[str, Any]]:
        rounds = self.client.rounds(RUN)
        return [r for r in rounds if r["outcome"] == "committed" and r["round"] > since]

    def newest(self) -> int:
        return max((r["round"] for r in self.committed()), default=-1)

    def merged(self, site: str, since: int) -> list[int]:
        """Lives of a site's learner that were merged in later rounds."""
        return [
            v["incarnation"]
            for r in self.committed(since)
            for v in r["verdicts"]
            if (v["learner"], v["outcome"]) == (site, "merged")
        ]

    def steps(self, site: str) -> int:
        return int(self.status()["learners"][site]["step"])

    def go_on(self, what: str, *sites: str) -> float:
        """Seconds until each of these sites was merged in later rounds."""
        began, newest = time.monotonic(), self.newest()
        for site in sites:
            until(f"{site} merged {what}", partial(self.merged, site, newest))
        until(f"rounds {what}", lambda: len(self.committed(newest)) >= MORE_ROUNDS)
        return round(time.monotonic() - began, 1)

    def begin(self) -> float:
        self.client.create_run(SPEC)
        return self.go_on("at first", *SITES)

    def cut(self) -> dict[str, Any]:
        """Oslo's link is gone for a while."""
        life, steps, rounds = max(self.merged("oslo", -1)), self.steps("oslo"), self.newest()
        self.cluster.cut("oslo")
        cut = time.monotonic()
        until("oslo missed", lambda: "oslo" not in self.status()["alive"])
        before = self.newest()
        time.sleep(max(0.0, self.cut_s - (time.monotonic() - cut)))
        alone = self.newest() - before
        self.cluster.cut("oslo", healed=True)
        healed, newest = time.monotonic(), self.newest()
        lives = until("oslo merged after the cut", lambda: self.merged("oslo", newest))
        if set(lives) != {life}:
            raise RuntimeError(f"oslo was merged as life {lives}, and was life {life} before")
        if not alone:
            raise RuntimeError("no round was committed while oslo was cut off")
        return {
            "seconds": self.cut_s,
            "rounds_without_it": alone,
            "steps_of_it_until_merged": self.steps("oslo") - steps,
            "rounds_until_merged": self.newest() - rounds,
            "seconds_healed_to_merged": round(time.monotonic() - healed, 1),
        }

    def upgrade(self) -> dict[str, Any]:
        """Bergen's learner is stopped, and one of the next release takes its place."""
        began, newest = time.monotonic(), self.newest()
        life = max(self.merged("bergen", -1))
        self.cluster.stop("bergen")
        stopped = time.monotonic()
        self.cluster.learner("bergen", upgraded=True)
        until("bergen's new life", lambda: max(self.merged("bergen", newest), default=0) > life)
        releases = {site: self.client.member(site)["version"] for site in SITES}
        if releases["bergen"] == releases["oslo"]:
            raise RuntimeError(f"bergen was not upgraded: {releases}")
        return {
            "releases": releases,
            "seconds_to_stop": round(stopped - began, 1),
            "seconds_stopped_to_merged": round(time.monotonic() - stopped, 1),
        }

    def revoke(self) -> dict[str, Any]:
        """Bergen is no site of this hub any more."""
        server = self.cluster.life_of_server()
        if not self.cluster.connected("bergen"):
            raise RuntimeError("bergen has no connection that could be seen to end")
        began = time.monotonic()
        self.cluster.revoke("bergen")
        told_s = round(time.monotonic() - began, 2)
        until("bergen cut off", lambda: not self.cluster.connected("bergen"))
        out_s = round(time.monotonic() - began, 2)
        until("bergen missed", lambda: "bergen" not in self.status()["alive"])
        newest = self.newest()
        seconds = self.go_on("after bergen was revoked", "oslo")
        if self.merged("bergen", newest):
            raise RuntimeError("bergen was merged after it was revoked")
        if self.cluster.life_of_server() != server:
            raise RuntimeError(f"the message server {server} did not stay up")
        return {
            "seconds_of_the_command": told_s,
            "seconds_to_be_out": out_s,
            "seconds_six_rounds_of_the_other": seconds,
        }

    def ledger(self) -> dict[str, int]:
        """What became of every token; RuntimeError if some are missing."""
        self.client.stop(RUN)
        until("the end of the run", lambda: self.status()["settled"])
        status = self.status()
        tokens: dict[str, int] = dict(status["tokens"])
        if sum(tokens.values()) != status["tokens_processed"]:
            raise RuntimeError(f"{status['tokens_processed']} tokens processed, but {tokens}")
        return tokens

    def all(self) -> dict[str, Any]:
        """From the first round to the end; raises RuntimeError naming what did not happen."""
        return {
            "seconds_to_first_rounds": self.begin(),
            "cut": self.cut(),
            "upgrade": self.upgrade(),
            "revoke": self.revoke(),
            "tokens": self.ledger(),
        }
