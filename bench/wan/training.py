"""A real run over the link: the hub's processes on one side, all or the later learners beyond."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from diloco_client import ApiError, Client, Unreachable
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import BusError
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.process.stopping import dies_with_parent
from diloco_shared.protocol.subjects import MEMBERS
from wan.link import HUB, Link

RUN = "wan"
# The API stays on the loopback of the hub's own namespace: any port is free there.
API_PORT = 8400
LOOK_S = 1.0
# Starting jax in every process, the first compilation, the last rounds, stopping.
START_S, END_S, STOP_S = 120.0, 60.0, 15.0


def spec_of(seconds: float, learners: int, model: str, **algorithm: Any) -> dict[str, Any]:
    """The demo's run, ended by the clock."""
    return {
        "name": RUN,
        "seed": 1,
        "algorithm": {"preset": "long", "fragments": 6, "quorum": 1, "overlap_steps": 8}
        | algorithm,
        "model": {"preset": model},
        "membership": {"learners_min": learners},
        "budget": {"seconds": seconds},
    }


class Training:
    """`run` it once, from the hub's side of `link`."""

    AROUND_S = START_S + END_S + STOP_S + 30

    def __init__(
        self,
        folder: Path,
        link: Link,
        learners: int,
        *,
        at_hub: int = 0,
        model: str = "nano",
        **algorithm: Any,
    ) -> None:
        self.folder = folder
        self.link = link
        self.model = model
        self.algorithm = algorithm
        self.ids = [f"learner-{n + 1}" for n in range(learners)]
        self.beyond = self.ids[at_hub:]
        # What every look saw: monotonic time, and steps of every learner.
        self.seen: list[tuple[float, dict[str, int]]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.expired: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, Any]:
        return asyncio.run(self._run(seconds))

    async def _run(self, seconds: float) -> dict[str, Any]:
        server = NatsServer(self.folder / "nats", host=HUB, dies_with_owner=True)
        await server.start()
        watching: asyncio.Task[None] | None = None
        try:
            self._start_all(server.url)
            with Client(f"http://127.0.0.1:{API_PORT}", await self._token()) as client:
                await self._until(client.ready, START_S, "the coordinator")
                client.create_run(spec_of(seconds, len(self.ids), self.model, **self.algorithm))
                await self._until(lambda: _rounds(client), START_S, "the first round")
                watching = asyncio.create_task(self._watch_members(server.url))
                await self._until(lambda: self._over(client), seconds + END_S, "the end of the run")
                return self._figures(client)
        except TimeoutError as error:
            raise SystemExit(f"{error}\n{self._last_words()}") from None
        finally:
            if watching is not None:
                watching.cancel()
            self._stop_all()
            await server.stop()

    # --- processes -----------------------------------------------------------------------------

    def _start_all(self, url: str) -> None:
        (self.folder / "logs").mkdir()
        self._start("coordinator", "diloco_coordinator", url)
        self._start("syncer-1", "diloco_syncer", url)
        for learner in self.ids:
            self._start(learner, "diloco_learner", url)

    def _start(self, name: str, module: str, url: str) -> None:
        command = [sys.executable, "-m", module]
        environment = {
            **os.environ,
            "DILOCO_ID": name,
            "DILOCO_NATS_URL": url,
            "DILOCO_DATA": str(self.folder),
            "DILOCO_PORT": str(API_PORT),
            "DILOCO_THREADS": "1",
            "DILOCO_CACHE": str(self.folder / "compiled"),
            "OMP_NUM_THREADS": "1",
        }
        if module != "diloco_coordinator":
            del environment["DILOCO_PORT"]
        with (self.folder / "logs" / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                self.link.at_site(command) if name in self.beyond else command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(),
            )
        if name in self.ids:  # the hub's processes and the link go first, as on machines apart
            os.setpriority(os.PRIO_PROCESS, self.processes[name].pid, 5)

    def _stop_all(self) -> None:
        """Learners first; nothing is left behind."""
        for process in reversed(self.processes.values()):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _last_words(self) -> str:
        logs = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-800:]}" for log in logs)

    # --- what is seen --------------------------------------------------------------------------

    async def _token(self) -> str:
        path = self.folder / "admin-token"
        await self._until(lambda: path.exists() and path.read_text().strip(), START_S, "the token")
        return path.read_text().strip()

    async def _until(self, condition: Any, seconds: float, what: str) -> None:
        """Raise TimeoutError naming `what` when it does not come, or when a process has ended."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(ApiError, Unreachable):
                if await asyncio.to_thread(condition):
                    return
            ended = [name for name, p in self.processes.items() if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come; ended: {', '.join(ended) or 'nobody'}")
            await asyncio.sleep(LOOK_S)

    async def _watch_members(self, url: str) -> None:
        """Count keys of living processes that expire."""
        bus = await NatsBus.connect(url, name="watcher")
        try:
            async with bus.kv_watch(MEMBERS) as entries:
                async for entry in entries:
                    if entry.value is None:
                        self.expired[entry.key] += 1
        except BusError:
            self.expired["(the watch itself)"] += 1
        finally:
            await bus.close()

    def _over(self, client: Client) -> bool:
        run = client.run(RUN)
        learners = run["status"]["learners"]
        self.seen.append((time.monotonic(), {n: learners[n]["step"] for n in self.ids}))
        return bool(run["state"] == "finished")

    def _figures(self, client: Client) -> dict[str, Any]:
        """Read before anything is stopped. Nobody was harmed: every loss is a false one."""
        rounds, status = client.rounds(RUN), client.run(RUN)["status"]
        kinds = Counter(event["kind"] for event in client.events(RUN))
        left_out = Counter(
            # Without its figures: "nothing complete after 0.55 s" and 0.56 s are one reason.
            re.sub(r"[0-9.]+", "…", verdict["reason"].split(":")[0][:60])
            for r in rounds
            for verdict in r["verdicts"]
            if verdict["outcome"] != "merged"
        )
        lives = {name: status["learners"][name]["incarnation"] for name in self.ids}
        evicted = kinds["learner-lost"] + sum(self.expired.values()) + sum(lives.values())
        losses = [e["data"] for e in client.events(RUN) if "val_loss" in e["data"]]
        return {
            "figures": {
                "false_evictions": evicted,
                "wan_rounds_committed": status["rounds_committed"],
                "wan_rounds_skipped": status["rounds_skipped"],
            },
            "events": dict(kinds),
            "keys_expired": dict(self.expired),
            "incarnations": lives,
            "verdicts_but_merged": dict(left_out.most_common(8)),
            "contributions_merged": status["contributions_merged"],
            "bytes_up": status["bytes_up"],
            "bytes_down": status["bytes_down"],
            "steps": {name: status["learners"][name]["step"] for name in self.ids},
            "validation_losses": [loss["val_loss"] for loss in losses],
        }


def _rounds(client: Client) -> bool:
    status = client.run(RUN)["status"]
    return bool(status and status["rounds_committed"])
