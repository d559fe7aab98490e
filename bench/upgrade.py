"""A run whose processes are exchanged for those of another release while it goes on.

    python bench/upgrade.py --old FOLDER [--new FOLDER] [--exchanges 64] [--json FILE]

The first FOLDER holds the last release, as `make upgrade-drill` lays it out; the second one what it
is exchanged for, which is this code unless it is given. A real message server; a
coordinator, two syncers and two learners of the last release begin a run. Then one role after the
other is exchanged for the other release, forth and back, until each of the four was exchanged in
each of the 16 states that a cluster can be in (`storms/releases.py`), or the run nears its end:
every order of an upgrade, and of the way back, consists of these 64 exchanges. Every fourth process
is killed (SIGKILL) and the others are told to end (SIGTERM). After each exchange both learners must
be merged again.

Then the run ends by its budget, and it is looked at:
ledger_exact: of every fragment, processed = merged + refused + overwritten + lost + in flight.
lost: tokens of learners that ended before they were merged; `lost_told_to_end` those of learners
that were told to end, and not killed: a learner loses none only if it was drained before. No
exchange of anything but a learner may lose any.
refused: contributions refused, by reason.
replayed: `diloco tape verify` and `diloco replay` of either release execute the whole tape, with
every digest as it was recorded.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from storms.releases import LEARNERS, Cluster, Release, Upgrading, Walk, until

from diloco_cli.up.stack import free_port
from diloco_client import Client
from diloco_shared.hub.nats_server import NatsServer

RUN = "upgraded"
ROOT = Path(__file__).resolve().parents[1]
# Before the run ends no exchange is begun any more, in seconds: one takes minutes on busy cores.
LAST_S = 240.0
# Every so many exchanges are kills.
KILLED = 4
SPEC: dict[str, Any] = {
    "name": RUN,
    "seed": 5,
    "algorithm": {"fragments": 3, "sync_every_steps": 24, "overlap_steps": 8, "quorum": 1},
    "model": {"overrides": {"width": 16, "layers": 1, "hidden": 16}},
    "inner": {"batch_sequences": 8},
    "membership": {"learners_min": 2, "heartbeat_s": 0.5, "lease_s": 3.0, "leader_lease_s": 3.0},
    "evaluation": {"every_steps": 2000, "sequences": 32},
    "keeping": {"contributions": "all", "snapshot_every_rounds": 60, "checkpoint_every_steps": 200},
}


def corpus(folder: Path) -> Path:
    """Text that is read in a moment."""
    folder.mkdir()
    for n in range(40):
        (folder / f"text-{n:02d}.txt").write_text(f"file {n} is the {n}th of forty.\n" * 400)
    return folder


def trained(cluster: Cluster, releases: list[Release], args: argparse.Namespace) -> Upgrading:
    """Begin with the last release, exchange, and wait for the end."""
    last, _ = releases
    for release in releases:
        cluster.warm(release)
    cluster.begin(last)
    until("all members", lambda: sum(m["alive"] for m in cluster.client.members()) >= 4)
    text = corpus(cluster.folder / "text")
    data = {"source": str(text), "virtual_shards": 8, "validation_fraction": 0.2}
    budget = {"seconds": args.seconds}
    cluster.client.create_run({**SPEC, "data": data, "budget": budget})
    until("the first rounds", lambda: len(cluster.client.rounds(RUN)) >= 3)
    upgrading, walk = Upgrading(cluster, RUN, releases), Walk(of=args.exchanges)
    last_at = time.monotonic() + args.seconds - LAST_S
    while time.monotonic() < last_at and (role := walk.next(state := upgrading.state())):
        how = signal.SIGKILL if len(upgrading.rows) % KILLED == KILLED - 1 else signal.SIGTERM
        before = lost(cluster.client)
        row = upgrading.exchange(state, role, how)
        row["lost"] = lost(cluster.client) - before
        walk.made.add((state, role))
        print(len(walk.made), json.dumps(row), flush=True)
    until("the end", lambda: status(cluster.client)["settled"], patience_s=args.seconds + LAST_S)
    return upgrading


def status(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = until("the status", lambda: client.run(RUN)["status"])
    return found


def lost(client: Client) -> int:
    """Tokens, as a mean over fragments. The run's own figure is rounded so that its classes add up,
    which may move a token from one to another."""
    counts: list[int] = [f["lost"] for f in status(client)["tokens_by_fragment"]]
    return round(sum(counts) / len(counts))


def audited(cluster: Cluster, release: Release) -> dict[str, Any]:
    """What a release's own commands say of the tape."""
    told = {}
    for name, command in (("verified", ("tape", "verify")), ("replayed", ("replay",))):
        where = ("--data", str(cluster.folder), "--nats-url", cluster.nats_url)
        done = cluster.diloco(release, *command, RUN, *where, "--json")
        if not done.stdout:
            raise SystemExit(f"{' '.join(command)} of {release.name}: {done.stderr}")
        told[name] = json.loads(done.stdout)
    return told


def figures(cluster: Cluster, upgrading: Upgrading, releases: list[Release]) -> dict[str, Any]:
    """What the run and its tape say at the end."""
    client = cluster.client
    last, rounds = status(client), client.rounds(RUN)
    verdicts = Counter(v["outcome"] for r in rounds for v in r["verdicts"])
    reasons = Counter(
        v["reason"] for r in rounds for v in r["verdicts"] if v["outcome"] == "refused"
    )
    audits = {release.name: audited(cluster, release) for release in releases}
    told = [r for r in upgrading.rows if r["signal"] == "SIGTERM"]
    waits = sorted(r["all_merged_again_s"] for r in upgrading.rows)
    return {
        "state": client.run(RUN)["state"],
        "exchanges": len(upgrading.rows),
        "exchanges_of_64": len({(*r["from"].values(), r["exchanged"]) for r in upgrading.rows}),
        "killed": sum(r["signal"] == "SIGKILL" for r in upgrading.rows),
        "ledger_exact": all(
            sum(f.values()) == last["tokens_processed"] for f in last["tokens_by_fragment"]
        ),
        "tokens": last["tokens"],
        "lost_told_to_end": sum(r["lost"] for r in told),
        "refused": dict(reasons),
        "verdicts": dict(verdicts),
        "rounds_committed": sum(r["outcome"] == "committed" for r in rounds),
        "rounds_skipped": sum(r["outcome"] == "skipped" for r in rounds),
        "terms": last["term"] + 1,
        "lives": {name: last["learners"][name]["incarnation"] + 1 for name in LEARNERS},
        "replayed": all(
            not a["verified"]["faults"] and a["replayed"]["fault"] is None for a in audits.values()
        ),
        "audits": audits,
        "all_merged_again_s_median": waits[len(waits) // 2],
        "all_merged_again_s_max": waits[-1],
    }


async def drill(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    releases = [Release("0.2.0", args.old.resolve()), Release("next", args.new.resolve())]
    server = NatsServer(folder / "nats", dies_with_owner=True)
    await server.start()
    compiled = folder / "compiled"
    cluster = Cluster(folder, server.url, free_port(0), compiled)
    try:
        upgrading = await asyncio.to_thread(trained, cluster, releases, args)
        found = await asyncio.to_thread(figures, cluster, upgrading, releases)
    finally:
        await asyncio.to_thread(cluster.close)
        await server.stop()
    return {"figures": found, "exchanges": upgrading.rows}


def main() -> None:
    """Print the figures; write them as JSON; status 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--old", type=Path, required=True, help="the last release")
    parser.add_argument("--new", type=Path, default=ROOT, help="the next one")
    parser.add_argument("--exchanges", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of the run's budget")
    parser.add_argument("--keep", type=Path, help="empty folder for the cluster's files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.keep:
        args.keep.mkdir(parents=True)
        result = asyncio.run(drill(args, args.keep))
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(drill(args, Path(folder)))
    result |= surroundings(__file__)
    for name, value in result["figures"].items():
        print(f"{name:28} {value}")
    keep(args.json, result, indent=1)
    found = result["figures"]
    kept = ("ledger_exact", "replayed")
    others = [r for r in result["exchanges"] if r["exchanged"] != "learners"]
    good = found["state"] == "finished" and not any(r["lost"] for r in others)
    sys.exit(0 if good and all(found[name] for name in kept) else 1)


if __name__ == "__main__":
    main()
