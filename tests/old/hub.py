"""A kept version's data where processes find it: on the bus in memory, and on a disk."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator.conftest import Desk, World
from old import stored

from diloco_shared.checkpoints.tape_archive_io import TapeArchive, archives_of, read_tape
from diloco_shared.process.membership import DataFolder
from diloco_shared.protocol import messages, records, subjects
from diloco_shared.protocol.messages import Message, TapeRebirth, TapeRecord, TapeTerm
from diloco_shared.protocol.records import Assignment, MemberRecord, RunRecord
from diloco_shared.protocol.wire import WIRE_VERSION, decode, decode_tape, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.app import Settings, Syncer
from diloco_syncer.merging.store import in_memory
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

# Records with which somebody begins to lead.
Led = (TapeTerm, TapeRebirth)
RUNS = ("over", "one", "two")
# Of the runs that go on, with their shards.
SHARDS = [("one", 0), ("two", 0), ("two", 1)]
VERSIONS = sorted(path.parent for path in stored.HERE.glob(f"*/{stored.MADE}"))


def wire_of(version: Path) -> int:
    return int(json.loads((version / stored.MADE).read_text())["wire"])


# Those whose messages this code reads, and those that it must refuse.
READ = [version for version in VERSIONS if wire_of(version) == WIRE_VERSION]
REFUSED = [version for version in VERSIONS if wire_of(version) < WIRE_VERSION]


def kind_of(name: str) -> type[Message]:
    """The class of a message's name."""
    found = getattr(messages, name, None) or getattr(records, name)
    assert isinstance(found, type) and issubclass(found, Message)
    return found


def all_messages(version: Path) -> Iterator[tuple[str, bytes]]:
    """(where, bytes) of whatever is a message: in streams, buckets, archives, and on the way."""
    for run in RUNS:
        for name, stream in stored.read_streams(version / run / stored.STREAMS).items():
            for seq, _, _, payload in stream.messages:
                if stored.name_of(payload):
                    yield f"{run}: {name} {seq}", payload
        for path in sorted((version / run / stored.DISK / "checkpoints").glob("*/tape/*")):
            shard = int(path.name.removeprefix("shard-"))
            archive = TapeArchive(str(path.parents[2]), path.parents[1].name, shard)
            for message in archive.read(run, 0):
                yield f"{run}: archive {message.seq}", message.payload
    for name, (_, payload) in stored.read(version / stored.MESSAGES).items():
        yield f"heard: {name}", payload


def snapshots(disk: Path, shard: int = 0) -> list[tuple[SnapshotStore, int]]:
    """(store, record covered) of every snapshot that any syncer has of a shard."""
    below = f"shard-{shard}/" if shard else ""
    folders = sorted({path.parent for path in disk.glob(f"*/snapshots/*/{below}snapshot-*")})
    stores = [SnapshotStore(folder, shelf=in_memory) for folder in folders]
    return [(store, covers) for store in stores for covers in store.covers()]


async def within(what: Any, seconds: float = 60.0) -> Any:
    return await asyncio.wait_for(what, seconds)


class Hub:
    """A copy of what one run of a version left; or, without a version, nothing yet.

    Everything here may be changed.
    """

    def __init__(self, version: Path | None, run: str, folder: Path) -> None:
        self.run = run
        self.disk = folder / "disk"
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "test")
        self.streams: dict[str, stored.Stream] = {}
        if version is not None:
            shutil.copytree(version / run / stored.DISK, self.disk)
            self.streams = stored.read_streams(version / run / stored.STREAMS)
        for stream in self.streams.values():
            self._load(stream)

    def _load(self, stream: stored.Stream) -> None:
        """Every message under its own sequence."""
        self.broker.ensure(stream.config)
        there = self.broker._streams[stream.config["name"]]
        for seq, subject, headers, payload in stream.messages:
            there.last_seq = seq - 1
            if "Nats-Marker-Reason" in headers:  # what the server wrote itself may stay
                headers = {name: of for name, of in headers.items() if name != "Nats-TTL"}
            assert self.broker.append(subject, payload, headers, None, None) == seq
        there.last_seq = stream.last_seq

    def kept(self, stream: str) -> dict[int, tuple[str, bytes]]:
        """What a stream of the bus holds now: (subject, bytes) by sequence."""
        there = self.broker._streams[stream].messages
        return {seq: (message.subject, message.payload) for seq, message in there.items()}

    @property
    def checkpoints(self) -> str:
        return str(self.disk / "checkpoints")

    async def record(self) -> RunRecord:
        """The run as its user wanted it."""
        entry = await self.bus.kv_get(subjects.RUNS, self.run)
        assert entry is not None and entry.value is not None
        return decode(entry.value, RunRecord)

    async def spec(self) -> RunSpec:
        return RunSpec.model_validate((await self.record()).spec)

    async def want(self, **changes: Any) -> None:
        """The user changes the run."""
        wanted = (await self.record()).model_copy(update=changes)
        await self.bus.kv_put(subjects.RUNS, self.run, encode(wanted))

    async def tape(self, shard: int = 0) -> list[tuple[int, TapeRecord]]:
        """From stream and archive."""
        archive = archives_of(await self.spec(), self.checkpoints)[shard]
        found = await read_tape(self.bus, self.run, [archive])
        return [(s.seq, decode_tape(s.payload)) for s in found]

    @asynccontextmanager
    async def syncer(
        self, name: str, shard: int = 0, data: Path | None = None
    ) -> AsyncIterator[None]:
        """A syncer at work for the run; `data`: of another machine than the one that is kept."""
        run_id = (await self.spec()).id
        given = Assignment(member=name, run=self.run, run_id=run_id, shard=shard, at=0.0)
        await self.bus.kv_put(subjects.ASSIGNMENTS, name, encode(given))
        root = data or self.disk
        folder = DataFolder(root, name)
        control, bulk = MemoryBus(self.broker, f"{name}-c"), MemoryBus(self.broker, f"{name}-d")
        settings = Settings(id=name, data=root, checkpoints=self.checkpoints)
        syncer = Syncer(settings, control, bulk, folder)
        task = asyncio.create_task(syncer.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await syncer.membership.leave()
            folder.release()

    async def shows(self, name: str, state: str) -> MemberRecord:
        """Wait until a member shows this."""
        async with self.bus.kv_watch(subjects.MEMBERS, name) as entries:
            async for entry in entries:
                if not entry.value or stored.wire_of(entry.value) != WIRE_VERSION:
                    continue  # what a process of another release left
                if (member := decode(entry.value, MemberRecord)).state == state:
                    return member
        raise AssertionError

    async def comes(self, found: Callable[[TapeRecord], bool], shard: int = 0) -> TapeRecord:
        """Wait for a record."""
        stream, subject = subjects.tape_stream(self.run), subjects.tape(self.run, shard)
        async with self.bus.read(stream, subject) as there:
            async for message in there:
                if found(record := decode_tape(message.payload)):
                    return record
        raise AssertionError

    async def term(self, shard: int = 0) -> int:
        """The newest on the tape."""
        return max(r.term for _, r in await self.tape(shard) if isinstance(r, Led))

    async def led_by(self, name: str, after: int, shard: int = 0) -> TapeRecord:
        """Wait for its first record as a leader of a later term than `after`."""
        return await self.comes(
            lambda r: isinstance(r, Led) and r.leader == name and r.term > after, shard
        )

    def coordinator(self) -> AbstractAsyncContextManager[Desk]:
        """A coordinator at work, to be asked."""
        world = World()
        world.broker, world.checkpoints = self.broker, self.checkpoints
        return world.coordinator()
