"""Makes what tests/old keeps of a version: run by hand once for each release, on a quiet machine.

    python tests/old/make.py                  the code of this checkout, into tests/old/<version>

For another commit, the same script runs with that commit's code first on the path:

    git worktree add ../then COMMIT && cd ../then
    PYTHONPATH=cli:client:services/learner:services/syncer:services/coordinator:shared:bench \\
        python THIS_CHECKOUT/tests/old/make.py --name NAME

Real processes (`diloco up`: two learners, two syncers) train a model of about a thousand
parameters. What they leave is copied while the run is paused: streams and buckets by the message
server's own API, folders as they lie on the disk. It takes some minutes. A version is never made
again once it is released: what is kept is what its users have.

Three runs: `over` ends by itself; `one` has one syncer shard and keeps every contribution; `two`
has two shards, purges what snapshots cover, and loses all its syncers' disks once.
"""

import argparse
import asyncio
import base64
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

# Behind what PYTHONPATH names: another version's own come first.
sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "bench"))

import nats
from nats.aio.client import Client as Nats
from old import stored
from storms.stack import Stack, until

from diloco_shared.protocol.messages import Progress
from diloco_shared.protocol.wire import WIRE_VERSION, decode, encode

SPEC: dict[str, Any] = {
    "seed": 1,
    "algorithm": {
        "fragments": 2,
        "quorum": 1,
        "sync_every_steps": 480,
        "codec_up": "int4",
        "codec_down": "int4",
        "keyframe_every": 4,
        "pull_timeout_s_min": 1.0,
    },
    "model": {
        "overrides": {
            "width": 4,
            "layers": 1,
            "heads": 1,
            "kv_heads": 1,
            "head_width": 4,
            "hidden": 8,
            "tied": True,
        },
        "context_tokens": 16,
    },
    "inner": {"batch_sequences": 2},
    "membership": {"learners_min": 2, "leader_lease_s": 1.0},
    "evaluation": {"every_steps": 4800, "sequences": 8},
    "keeping": {"snapshot_every_rounds": 8, "checkpoint_every_steps": 480, "checkpoints": 1},
    "budget": {"steps": 10_000_000},
}
SERVICES = ("syncer-1", "syncer-2", "learner-1", "learner-2")


def spec(name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """The common settings with some replaced."""
    body: dict[str, Any] = json.loads(json.dumps(SPEC)) | {"name": name}
    for section, settings in changes.items():
        body[section] = settings if section == "budget" else body[section] | settings
    return body


class Ear(threading.Thread):
    """Hears everything that is sent, and keeps the newest message of each kind."""

    def __init__(self, url: str, token: str, heard: dict[str, tuple[str, bytes]]) -> None:
        super().__init__(daemon=True)
        self.url, self.token, self.heard = url, token, heard
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        asyncio.run(self._hear())

    async def _hear(self) -> None:
        async def keep(message: Any) -> None:
            if name := stored.name_of(message.data):
                self.heard[name] = (message.subject, message.data)

        connection = await nats.connect(self.url, token=self.token)
        await connection.subscribe(">", cb=keep)
        await asyncio.to_thread(self.over.wait)
        await connection.close()

    def close(self) -> None:
        """Before the message server ends."""
        self.over.set()
        self.join()


class Making:
    """One cluster at work, and what is taken from it. `heard` goes on over a restart."""

    def __init__(self, stack: Stack, heard: dict[str, tuple[str, bytes]]) -> None:
        self.stack, self.client = stack, stack.client
        self.token = (stack.folder / "nats-token").read_text().strip()
        self.url = f"nats://{stack.endpoint()['nats']}"
        self.ear = Ear(self.url, self.token, heard)
        self.rebirths = hasattr(self.client, "begin_again")  # of this version's runs
        until("all members", lambda: all(self.alive(m) for m in SERVICES))

    def alive(self, member: str) -> bool:
        return bool(self.client.member(member)["alive"])

    def close(self) -> None:
        self.ear.close()

    # --- what happens in the runs --------------------------------------------------------------

    def rounds(self, run: str, outcome: str = "committed") -> int:
        return sum(r["outcome"] == outcome for r in self.client.rounds(run))

    def goes_on(self, run: str, more: int) -> None:
        """So many rounds are committed."""
        before = self.rounds(run)
        until(f"{more} rounds of {run}", lambda: self.rounds(run) >= before + more)

    def state(self, run: str, *wanted: str) -> None:
        until(f"{run} {wanted}", lambda: self.client.run(run)["state"] in wanted)

    def records(self, run: str, kind: str) -> int:
        """How many records of a kind are on the run's tapes."""
        messages = self.streams({f"TAPE-{run}"})[f"TAPE-{run}"].messages
        return sum(stored.name_of(payload) == kind for *_, payload in messages)

    def checkpoint(self, run: str) -> int:
        """A run-wide checkpoint; its number, once it is complete."""
        asked = {c["number"] for c in self.client.checkpoints(run)}
        self.client.checkpoint(run)
        new: Callable[[], list[int]] = lambda: [  # noqa: E731
            c["number"] for c in self.client.checkpoints(run) if c["number"] not in asked
        ]
        return int(until(f"a checkpoint of {run}", new)[0])

    def over(self) -> None:
        """A run that ends by itself: its last record is the end."""
        self.client.create_run(spec("over", budget={"steps": 2400}))
        self.state("over", "finished")
        until("all have left it", lambda: self.client.run("over")["status"]["settled"])

    def one(self) -> None:
        """Takeover, skipped round, new quorum, checkpoint, restore, an epoch for lost records."""
        keeping = {"contributions": "all"}
        self.client.create_run(spec("one", keeping=keeping))
        self.goes_on("one", 6)
        self.client.set_quorum("one", 2)
        self.client.chaos("hang", "learner-2", duration_s=4.0)
        until("a skipped round", lambda: self.rounds("one", "skipped"))
        self.client.set_quorum("one", 1)
        self.client.chaos("kill", self.leader("one"))
        self.goes_on("one", 4)
        number = self.checkpoint("one")
        self.goes_on("one", 4)
        self.client.restore("one", number)
        until("the restore", lambda: self.records("one", "TapeRestore"))
        self.client.chaos("kill", "learner-1")
        until("moments that the other gives it", lambda: "StateManifest" in self.ear.heard)
        self.goes_on("one", 4)
        self.lost_records("one")
        self.goes_on("one", 4)
        self.checkpoint("one")
        self.goes_on("one", 2)

    def leader(self, run: str) -> str:
        syncers = self.client.run(run)["syncers"]
        return next(str(s["id"]) for s in syncers if s["state"] == "leading")

    def lost_records(self, run: str) -> None:
        """A learner that is an epoch ahead: what a leader hears whose tape has lost its end."""
        subject, data = self.ear.heard["Progress"]
        said = decode(data, Progress)
        ahead = said.model_copy(update={"epoch": said.epoch + 1})

        async def say() -> None:
            connection = await nats.connect(self.url, token=self.token)
            await connection.publish(subject, encode(ahead))
            await connection.close()

        asyncio.run(say())
        until("the epoch", lambda: self.records(run, "TapeEpoch"))

    def first_of_two(self) -> None:
        """Until snapshots cover what is purged; no checkpoint: nothing but DN shall be left."""
        keeping = {"begin_again_after_s": 4.0} if self.rebirths else {}
        self.client.create_run(spec("two", algorithm={"shards": 2}, keeping=keeping))
        self.goes_on("two", 12)
        shards = lambda: self.streams({"UP-two"})["UP-two"].messages[0][0] > 1  # noqa: E731
        until("contributions that were purged", shards)

    def rest_of_two(self) -> None:
        self.goes_on("two", 6)
        self.checkpoint("two")
        self.goes_on("two", 4)

    # --- what is taken -------------------------------------------------------------------------

    def take(self, run: str, folder: Path) -> None:
        """Streams, buckets and files of a run in which nothing happens any more."""
        if self.client.run(run)["state"] != "finished":
            self.client.pause(run)
            self.state(run, "paused")
        before: dict[str, stored.Stream] = {}
        while True:
            time.sleep(3.0)
            taken = self.streams({f"{kind}-{run}" for kind in ("UP", "DN", "TAPE", "STATE")})
            self.files(run, folder / stored.DISK)
            if taken == before:
                break
            before = taken
        taken |= self.streams({n for n in self.names() if n.startswith("KV_") or n == "EVENTS"})
        stored.write_streams(folder / stored.STREAMS, taken)

    def files(self, run: str, there: Path) -> None:
        """Snapshots, checkpoints and archive: whatever lies in a folder of the run's."""
        shutil.rmtree(there, ignore_errors=True)
        for path in sorted(self.stack.folder.rglob(f"{run}.*")):
            if path.is_dir() and "nats" not in path.parts:
                shutil.copytree(path, there / path.relative_to(self.stack.folder))

    def names(self) -> list[str]:
        return list(asyncio.run(self._asked([("STREAM.NAMES", {})]))[0]["streams"])

    def streams(self, names: Iterable[str]) -> dict[str, stored.Stream]:
        return {name: self.stream(name) for name in sorted(names)}

    def stream(self, name: str) -> stored.Stream:
        """All of a stream; of a bucket the newest of each key, which is renewed meanwhile."""
        (info,) = asyncio.run(self._asked([(f"STREAM.INFO.{name}", {"subjects_filter": ">"})]))
        state = info["state"]
        wanted: list[dict[str, Any]] = [
            {"seq": seq} for seq in range(max(state["first_seq"], 1), state["last_seq"] + 1)
        ]
        if name.startswith("KV_"):
            wanted = [{"last_by_subj": subject} for subject in state.get("subjects") or ()]
        answers = asyncio.run(self._asked([(f"STREAM.MSG.GET.{name}", w) for w in wanted]))
        there = [answer["message"] for answer in answers if "message" in answer]
        messages = tuple(
            (m["seq"], m["subject"], _headers(m), base64.b64decode(m.get("data", "")))
            for m in sorted(there, key=lambda m: m["seq"])
        )
        last = max([state["last_seq"], *(seq for seq, *_ in messages)])
        return stored.Stream(info["config"], last, messages)

    async def _asked(self, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The message server's own answers."""
        connection: Nats = await nats.connect(self.url, token=self.token)
        answers = []
        for call, body in calls:
            reply = await connection.request(f"$JS.API.{call}", json.dumps(body).encode(), 10)
            answers.append(json.loads(reply.data))
        await connection.close()
        return answers


def _headers(message: dict[str, Any]) -> dict[str, str]:
    lines = base64.b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]
    pairs = (line.split(": ", 1) for line in lines if line)
    return {name: value for name, value in pairs}


def archived(folder: Path, run: str) -> None:
    """The oldest records of shard 0 move to the archive, as a leader does it with thousands."""
    from diloco_shared.bus.port import Stored
    from diloco_shared.checkpoints.tape_archive_io import TapeArchive

    path = folder / run / stored.STREAMS
    streams = stored.read_streams(path)
    tape, disk = streams[f"TAPE-{run}"], folder / run / stored.DISK
    (checkpoints,) = (disk / "checkpoints").iterdir()
    covers = [int(p.name.split("-")[1]) for p in disk.glob("syncer-*/snapshots/*/snapshot-*")]
    gone = [m for m in tape.messages if m[1] == f"tape.{run}.0" and m[0] <= min(covers)]
    records = [Stored(subject, payload, headers, seq) for seq, subject, headers, payload in gone]
    TapeArchive(str(checkpoints.parent), checkpoints.name, 0).write(records)
    rest = tuple(m for m in tape.messages if m not in gone)
    streams[f"TAPE-{run}"] = stored.Stream(tape.config, tape.last_seq, rest)
    stored.write_streams(path, streams)


def without_disks(data: Path) -> None:
    """No syncer has anything any more; a cluster that begins here has the message server's."""
    for syncer in data.glob("syncer-*"):
        shutil.rmtree(syncer)


def make(data: Path, out: Path) -> None:
    heard: dict[str, tuple[str, bytes]] = {}
    with Stack(data, learners=2, syncers=2) as stack, closing(Making(stack, heard)) as making:
        making.over()
        making.take("over", out / "over")
        making.one()
        making.take("one", out / "one")
        making.client.stop("one")
        making.state("one", "stopped")
        making.first_of_two()
        rebirths = making.rebirths
    if rebirths:
        without_disks(data)
    with Stack(data, learners=2, syncers=2) as stack, closing(Making(stack, heard)) as making:
        if rebirths:
            until("the rebirth", lambda: making.records("two", "TapeRebirth"))
        making.rest_of_two()
        making.take("two", out / "two")
    if rebirths:
        archived(out, "two")
    stored.write(out / stored.MESSAGES, dict(sorted(heard.items())))


def main() -> None:
    name = f"{importlib.metadata.version('decoupled-diloco')}-wire{WIRE_VERSION}"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--name", default=name, help="of the folder (default: %(default)s)")
    out = stored.HERE / parser.parse_args().name
    if out.exists():
        sys.exit(f"{out} is there: what is kept of a release is never made again")
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    with tempfile.TemporaryDirectory(prefix="diloco-old-") as data:
        try:
            make(Path(data), out)
        except BaseException:
            print("\n".join(p.read_text()[-2000:] for p in Path(data).glob("logs/*.log")))
            shutil.rmtree(out, ignore_errors=True)
            raise
    made = {"commit": commit, "wire": WIRE_VERSION, "made": time.strftime("%Y-%m-%d")}
    (out / stored.MADE).write_text(json.dumps(made, indent=1) + "\n")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size} bytes, kinds {sorted(stored.read(out / stored.MESSAGES))}")


if __name__ == "__main__":
    main()
