"""Memory of the syncer's own work, in bytes a parameter, and what snapshots take.

    python bench/syncer_memory.py [--parameters 100e6] [--fragments 24] [--learners 4] [--json FILE]

A store of that size goes through the phases of a run in a process of its own, with payloads as the
bus would hand them over: initial parameters; rounds of every learner, one of them stale, through a
keyframe; a snapshot, some more rounds, a snapshot of what they changed; a run-wide checkpoint. A
second process fetches the snapshot over a real message server and loads it, a third one begins from
the files alone. What is counted is anonymous memory (RssAnon, looked at every 2 ms), above what the
process held before: files and their mappings are the page cache's, and the kernel may drop them.

peak: the most in the phase; end: what stays after it, with everything that the allocator keeps.
budget: 12 bytes a parameter, what the round's contributions take, and one fragment's work: three
arrays that are staged, its publication, and as much that waits to be used again.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from scaling.merging import layout

from diloco_shared.bus.blobs import fresh
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.checkpoints.place_threads_io import PlaceThreads
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.memory.buffers_io import Buffers
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.numerics.merge import warm
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import Object, ShardPart, reference
from diloco_shared.protocol.chunks import describe
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints.parts_io import read_store, write_part
from diloco_syncer.context import RunContext
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import build_store
from diloco_syncer.merging.store import Contribution, FragmentStore
from diloco_syncer.rounds.norms import inspect
from diloco_syncer.snapshots.handover_io import SnapshotSender, fetch_snapshot
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

f32 = np.float32
LOOK_S = 0.002
# Values of a block codec's blocks, of two pieces a fragment: all fragments are of one size.
BLOCK = 256
ROUNDS, MORE_ROUNDS = 30, 6
RUN = "memory"


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--codecs", nargs="+", default=["int4", "bf16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where snapshots go: else a temporary one")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pieces = 2 * args.fragments * BLOCK
    values = max(1, round(args.parameters / pieces)) * pieces
    rows = []
    for name in args.codecs:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append(asyncio.run(case(Case(name, values, args), Path(folder))))
        show(rows[-1])
    result = {
        "figures": figures(rows),
        "rows": rows,
        "parameters": values,
        "fragments": args.fragments,
        "learners": args.learners,
        "rounds": ROUNDS,
        "more_rounds": MORE_ROUNDS,
        "seed": args.seed,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


class Case:
    """What a run of that codec is made of; travels to the processes."""

    def __init__(self, name: str, values: int, args: argparse.Namespace) -> None:
        self.name = name
        self.values = values
        self.fragments: int = args.fragments
        self.learners: int = args.learners
        self.seed: int = args.seed
        self.size = values // self.fragments

    def spec(self) -> RunSpec:
        algorithm = {
            "fragments": self.fragments,
            "sync_every_steps": self.fragments,
            "codec_up": self.name,
            "codec_down": self.name,
        }
        return RunSpec.model_validate(
            {"name": RUN, "algorithm": algorithm, "budget": {"steps": 10**6}}
        )

    def layout(self) -> Layout:
        return layout(self.values, self.fragments)

    def budget(self) -> float:
        """Bytes a parameter."""
        payload = codec.bytes_of(self.name, self.size)
        keyframe = codec.bytes_of(self.spec().algorithm.keyframe_codec, self.size)
        work = 2 * (3 * 4 * self.size + max(payload, keyframe))
        return float(12 + (self.learners * payload + work) / self.values)


# --- looking at memory ----------------------------------------------------------------------------


class Looking:
    """Anonymous memory of this process, by phase."""

    def __init__(self, values: int) -> None:
        self.values = values
        self.phases: dict[str, dict[str, float]] = {}
        self.most = self.base = anonymous()
        self.ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self.ended.wait(LOOK_S):
            self.most = max(self.most, anonymous())

    @contextmanager
    def phase(self, name: str) -> Iterator[dict[str, float]]:
        """Measure what is done in it; the caller may add figures of its own."""
        self.most, began = anonymous(), time.perf_counter()
        found: dict[str, float] = {}
        yield found
        seconds, end = time.perf_counter() - began, anonymous()
        peak = max(self.most, end)
        self.phases[name] = {
            "peak_bytes": round((peak - self.base) / self.values, 2),
            "end_bytes": round((end - self.base) / self.values, 2),
            "seconds": round(seconds, 2),
            **found,
        }


def anonymous() -> int:
    """Bytes of memory that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


# --- the processes --------------------------------------------------------------------------------


def prepare(case: Case, folder: Path) -> None:
    """What learners would send: initial parameters, and a contribution of each."""
    rng = np.random.default_rng(case.seed)
    initial_F = rng.standard_normal(case.size, f32)
    (folder / "initial").write_bytes(codec.encode("fp32", initial_F))
    delta_F = rng.standard_normal(case.size, f32) * f32(1e-3)
    for m in range(case.learners):
        payload = codec.encode(case.name, np.roll(delta_F, 977 * m))
        (folder / f"contribution-{m}").write_bytes(payload)


def read(path: Path, buffer: memoryview) -> memoryview:
    """A payload in the memory that a bus would have received it into."""
    with path.open("rb") as file:
        assert file.readinto(buffer) == len(buffer)
    return buffer


class Leading:
    """The store of a leader, and its rounds."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.buffers = Buffers()
        self.snapshots = SnapshotStore(folder / "snapshots")
        self.history = History(case.spec())
        self.history.layout = case.layout().tensors
        self.store: FragmentStore
        self.round = 0

    def init(self) -> None:
        payloads = {}
        for p in range(self.case.fragments):
            path = self.folder / "initial"
            payloads[str(p)] = read(path, fresh(path.stat().st_size))
            digest_array(codec.view(payloads[str(p)], self.case.size))
        names = tuple(payloads)
        self.store = build_store(self.history, names, payloads, self.snapshots.shelf)

    def publish_all(self) -> None:
        for p in range(self.case.fragments):
            describe("dn", self.store.current_keyframe(p))

    def rounds(self, count: int) -> None:
        for _ in range(count):
            p = self.round % self.case.fragments
            version = self.store.version(p)
            # Once a round of every fragment is over one learner is late.
            late = version > 0
            contributions = [
                self._contribution(p, m, version - (late and m == 0))
                for m in range(self.case.learners)
            ]
            keyframe = self.round == self.case.fragments + 1
            staged = self.store.stage(p, contributions, keyframe=keyframe)
            self.store.install(p, staged)
            describe("dn", staged.payload)
            self.round += 1

    def _contribution(self, p: int, m: int, base: int) -> Contribution:
        path = self.folder / f"contribution-{m}"
        payload = read(path, self.buffers.take(path.stat().st_size))
        pieces = self.store.layout.fragments[p]
        norms_P = inspect(payload, self.case.name, self.case.size, pieces).norms_P
        return Contribution(f"learner-{m}", 1.0, base, payload, self.case.name, norms_P)

    def snapshot(self, covers: int) -> int:
        before = self.snapshots.bytes_written
        meta = {"history": self.history.meta(), "store": self.store.meta()}
        self.snapshots.save(covers, meta, self.store.state_arrays())
        return self.snapshots.bytes_written - before


def lead(pipe: Connection, case: Case, folder: Path, url: str) -> None:
    """A leader's phases; then it hands its snapshot over until it is told to stop."""
    warm()
    leading = Leading(case, folder)
    FragmentStore.init(case.layout(), case.spec().algorithm, [None] * case.fragments).outer.init(
        np.zeros(1, f32)
    )
    looking = Looking(case.values)
    with looking.phase("init"):
        leading.init()
    with looking.phase("publish version 0"):
        leading.publish_all()
    with looking.phase("rounds"):
        leading.rounds(ROUNDS)
    with looking.phase("snapshot, full") as found:
        found["written_bytes"] = round(leading.snapshot(1) / case.values, 2)
    with looking.phase("more rounds"):
        leading.rounds(MORE_ROUNDS)
    with looking.phase("snapshot, incremental") as found:
        found["written_bytes"] = round(leading.snapshot(2) / case.values, 2)
    with looking.phase("run-wide checkpoint"):
        history, meta = leading.history.meta(), leading.store.meta()
        arrays = leading.store.state_arrays()
        part = write_part(case.spec(), 0, str(folder / "vault"), 1, history, meta, arrays)
        (folder / "part").write_text(part.model_dump_json())
    with looking.phase("hand over"):
        asyncio.run(_serve(pipe, case, leading, url))
    pipe.send(looking.phases)


async def _serve(pipe: Connection, case: Case, leading: Leading, url: str) -> None:
    control = await NatsBus.connect(url, name="leader-control")
    data = await NatsBus.connect(url, name="leader-data", connections=2)
    try:
        stream = StreamSpec(subjects.state_stream(RUN), (f"state.{RUN}.>",), 1 << 33)
        await data.ensure_stream(stream)
        sender = SnapshotSender(
            RunContext(
                spec=case.spec(),
                shard=0,
                me="leader",
                control=control,
                data=data,
                folder=Path(),
                snapshots=leading.snapshots,
                checkpoint_root="",
                place_threads=PlaceThreads(),
            )
        )
        sending = asyncio.create_task(sender.send())
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    finally:
        await control.close()
        await data.close()


def stand_by(pipe: Connection, case: Case, folder: Path, url: str) -> None:
    """A standby without anything: fetches and loads."""
    warm()
    snapshots = SnapshotStore(folder / "standby")
    looking = Looking(case.values)
    with looking.phase("fetch"):
        asyncio.run(_fetch(snapshots, url))
    with looking.phase("load"):
        _load(case, snapshots)
    pipe.send(looking.phases)


async def _fetch(snapshots: SnapshotStore, url: str) -> None:
    control = await NatsBus.connect(url, name="standby-control")
    data = await NatsBus.connect(url, name="standby-data", connections=2)
    try:
        await fetch_snapshot(RUN, 0, "standby", control, data, snapshots, after=0)
    finally:
        await control.close()
        await data.close()


def restart(pipe: Connection, case: Case, folder: Path, url: str) -> None:
    """A leader's next process."""
    warm()
    snapshots = SnapshotStore(folder / "snapshots")
    looking = Looking(case.values)
    with looking.phase("restart"):
        _load(case, snapshots)
    with looking.phase("restart from a checkpoint"):
        there, ref = RunCheckpoints(str(folder / "vault")), reference(case.spec().folder, 1)
        part = Object.model_validate_json((folder / "part").read_text())
        found = there.part(ref, part, ShardPart)
        read_store(there, ref, found, case.spec(), snapshots.shelf)
    pipe.send(looking.phases)


def _load(case: Case, snapshots: SnapshotStore) -> None:
    def store(meta: dict[str, Any], arrays: dict[str, Any]) -> FragmentStore:
        return FragmentStore.restore(meta["store"], arrays, case.spec().algorithm, snapshots.shelf)

    found, faults = snapshots.newest(store)
    assert found is not None and not faults, faults


# --- the whole ------------------------------------------------------------------------------------


async def case(case: Case, folder: Path) -> dict[str, Any]:
    """All phases of one codec."""
    prepare(case, folder)
    server = NatsServer(folder / "nats")
    await server.start()
    try:
        leader, ours = begin(lead, case, folder, server.url)
        assert await asyncio.to_thread(ours.recv) == "ready"
        standby, theirs = begin(stand_by, case, folder, server.url)
        phases_of_standby = await asyncio.to_thread(theirs.recv)
        ours.send("stop")
        phases = await asyncio.to_thread(ours.recv)
        again, pipe = begin(restart, case, folder, server.url)
        phases |= phases_of_standby | await asyncio.to_thread(pipe.recv)
        for process in (leader, standby, again):
            process.join()
    finally:
        await server.stop()
    phases["hand over"].pop("seconds")  # mostly waiting for the other process to begin
    return {"codec": case.name, "budget_bytes": round(case.budget(), 2), "phases": phases}


def begin(work: Any, case: Case, folder: Path, url: str) -> tuple[Any, Connection]:
    """A process of its own, and the pipe to it."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=quietly, args=(work, theirs, case, folder, url), daemon=True
    )
    process.start()
    theirs.close()
    return process, ours


def quietly(work: Any, *args: Any) -> None:
    """What a process logs of ordinary things is not shown."""
    quiet = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=quiet)
    work(*args)


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By codec: the most and the rest of all phases, and what snapshots took."""
    found: dict[str, float] = {}
    for row in rows:
        name, phases = row["codec"], row["phases"]
        found[f"syncer_bytes_peak_{name}"] = max(p["peak_bytes"] for p in phases.values())
        found[f"syncer_bytes_budget_{name}"] = row["budget_bytes"]
        for kind in ("full", "incremental"):
            found[f"snapshot_{kind}_s_{name}"] = phases[f"snapshot, {kind}"]["seconds"]
            found[f"snapshot_{kind}_bytes_{name}"] = phases[f"snapshot, {kind}"]["written_bytes"]
    return found


def show(row: dict[str, Any]) -> None:
    """For people."""
    print(f"{row['codec']}: budget {row['budget_bytes']:.2f} bytes a parameter")
    print(f"  {'phase':24} {'peak':>7} {'end':>7} {'seconds':>8} {'written':>8}")
    for name, phase in row["phases"].items():
        seconds, written = phase.get("seconds", ""), phase.get("written_bytes", "")
        print(
            f"  {name:24} {phase['peak_bytes']:7.2f} {phase['end_bytes']:7.2f} "
            f"{seconds!s:>8} {written!s:>8}"
        )


if __name__ == "__main__":
    main()
