"""A hub's streams and buckets in a folder, taken while runs go on, and put back on an empty hub.

    <folder>/backup.json       a `Backup`: what is here, digest by digest; written last
             streams/NAME      what the server sent of a stream (bus/nats/backups.py)

The streams are not taken in one instant, so their order matters. What is published comes before the
tape: a tape that knows more than is published is what every leader may meet. Contributions come
after it, since the tape's newest records name them. Buckets come last, and name only runs whose
streams are there. What is of the moment is left out: who is a member, who leads, and the state
that is under way to somebody.

After a restore everybody has seen more than the tape says. So every tape gets a record that begins
a new epoch, far above any that can have been seen, and so do its terms: learners discard what they
hold of the old ones, and a syncer lets go of what it has of records that the tape does not. The
same backup may be put back twice, and an older one after a newer: so the clock counts in them too.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import structlog
from pydantic import Field, ValidationError

from diloco_shared import VERSION, ambient
from diloco_shared.bus.nats import backups
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.hub_config import HUB, Routes
from diloco_shared.bus.port import Bus, TooFewNodes, Unavailable
from diloco_shared.bus.repeating import until_done
from diloco_shared.bus.stored_records import readable, records_in
from diloco_shared.durable import replace, settle_names
from diloco_shared.hub.nats_server import NatsServer, free_port
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import AHEAD as AHEAD
from diloco_shared.protocol.messages import (
    Count,
    Message,
    Seconds,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRecord,
)
from diloco_shared.protocol.records import Incarnation, RunRecord
from diloco_shared.protocol.wire import WireError, decode_tape, encode
from diloco_shared.spec.run import RunSpec, config_hash

log = structlog.get_logger()

MANIFEST, STREAMS = "backup.json", "streams"
# The first kinds to be taken, in this order; all others come after them.
_ORDER = ("DN", "TAPE", "UP", "EVENTS")
# Kinds of which each run has one.
_OF_RUNS = ("DN", "TAPE", "UP", "STATE")
# Of the moment: only how they are set up is kept.
_EMPTY = ("STATE", f"KV_{subjects.MEMBERS}", f"KV_{subjects.LEASES}")
# `AHEAD` is enough unless another was put back meanwhile. So each number is at least that of the
# seconds since 2026 began (itself in seconds since 1970): none of them begins every second.
CLOCK_FROM = 1_767_225_600
# Beyond what a tape was allowed to take: a record of some hundred bytes for each shard, 64 at most.
TAPE_ROOM_BYTES = 64 << 10
# Rounds tell their epoch and term, and few records are anything else.
TAIL_RECORDS = 512
# Before a run begins, its tape has the terms of those who led before.
FIRST_RECORDS = 64
# Times that streams are looked for once more, because a run was submitted meanwhile.
_LOOKS_MAX = 5
# Nodes find each other and elect one within seconds; a copy is made as fast as a disk writes.
LEADS_S, COPIED_S = 60.0, 3600.0
_BLOCK = 1 << 20


class Stream(Message):
    """One stream. `file` is empty where only its configuration is kept."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,254}$")]
    file: bool
    bytes: Count = 0
    sha256: str = ""
    config: dict[str, Any]
    state: dict[str, Any] = Field(default_factory=dict)


class Backup(Message):
    """What `backup.json` holds."""

    format: Literal[1] = 1
    version: str  # the release that took it
    at: Seconds  # wall clock, seconds since 1970: when it was begun
    took_s: Seconds
    streams: tuple[Stream, ...]

    @property
    def bytes(self) -> int:
        return sum(s.bytes for s in self.streams)


class BackupError(Exception):
    """It cannot be taken, or not be put back; the text says why, and what to do."""


class Streams(Protocol):
    """All streams of a hub, whole. Each method raises BusError; worlds bring their own."""

    async def names(self) -> list[str]:
        """Of all that there are."""

    async def config_of(self, stream: str) -> dict[str, Any] | None:
        """How a stream is set up; None once it is gone."""

    async def save(self, stream: str, file: Path) -> dict[str, Any] | None:
        """Write the stream into a new file; its `config` and `state`, None once it is gone."""

    async def load(self, stream: str, file: Path, about: dict[str, Any]) -> None:
        """Make the stream of what `save` wrote; `about` is what it returned."""

    async def make(self, config: dict[str, Any]) -> None:
        """An empty stream, set up so. Raises TooFewNodes."""

    async def copied(self, stream: str) -> bool:
        """Whether every node that keeps a copy has all of it."""


# --------------------------------------------------------------------------------------------------
# Taking one.


async def take(streams: Streams, folder: Path) -> Backup:
    """Write all streams into a new folder.

    Once this returns, all of it is on the disk. Raises BackupError where the folder holds anything,
    BusError and OSError: then it is no backup.
    """
    _new(folder)
    at, began = ambient.wall(), ambient.monotonic()
    taken = dict[str, Stream]()
    for _ in range(_LOOKS_MAX):
        names = [n for n in await streams.names() if n not in taken]
        if not names:
            break
        # A bucket that was taken before must not know less than the streams of a new run do.
        for name in sorted({*names, *(n for n in taken if n.startswith("KV_"))}, key=_rank):
            path = folder / STREAMS / name
            path.unlink(missing_ok=True)
            found = await _taken(streams, name, path)
            if found is not None:
                taken[name] = found
    whole = tuple(taken[name] for name in sorted(taken, key=_rank))
    backup = Backup(version=VERSION, at=at, took_s=ambient.monotonic() - began, streams=whole)
    settle_names(folder / STREAMS)  # before the manifest that promises them
    replace(folder / MANIFEST, backup.model_dump_json(indent=1))
    settle_names(folder.parent)
    return backup


def _new(folder: Path) -> None:
    """Nobody else may read it: it holds all that the hub does."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BackupError(f"{folder} is no empty folder: give the name of a new one")
    (folder / STREAMS).mkdir(parents=True)
    folder.chmod(0o700)


def _rank(name: str) -> tuple[int, str]:
    kind = name.partition("-")[0]
    return (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), name)


def _of_the_moment(name: str) -> bool:
    return name in _EMPTY or name.partition("-")[0] in _EMPTY


async def _taken(streams: Streams, name: str, path: Path) -> Stream | None:
    if _of_the_moment(name):
        config = await streams.config_of(name)
        return None if config is None else Stream(name=name, file=False, config=config)
    about = await streams.save(name, path)
    if about is None:
        return None
    # Beside the loop: of a large stream it takes longer than a server waits for a sign of life.
    size, digest = await asyncio.to_thread(_measured, path)
    log.info("taken", stream=name, bytes=size, messages=about["state"]["messages"])
    return Stream(
        name=name,
        file=True,
        bytes=size,
        sha256=digest,
        config=about["config"],
        state=about["state"],
    )


def _measured(path: Path) -> tuple[int, str]:
    """(bytes, SHA-256) of a file that is on the disk afterwards."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# Putting one back.


def read(folder: Path) -> Backup:
    """What a folder holds, every digest compared. Raises BackupError naming the fault."""
    path = folder / MANIFEST
    try:
        backup = Backup.model_validate_json(path.read_bytes(), extra="ignore")
    except OSError as error:
        raise BackupError(f"{path} cannot be read ({error.strerror}): is it a backup?") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BackupError(
            f"{path} is damaged, or of a later form: {where} {first['msg']}"
        ) from None
    for stream in backup.streams:
        if not stream.file:
            continue
        file = folder / STREAMS / stream.name
        try:
            found = _measured(file)
        except OSError as error:
            raise BackupError(f"{file} cannot be read ({error.strerror})") from None
        if found != (stream.bytes, stream.sha256):
            raise BackupError(f"{file} is not what was taken: take another backup")
    return backup


async def put_back(
    folder: Path, *stores: Path, of_hub: bool, names: Sequence[str] = (), owned: bool = False
) -> tuple[Backup, list[str]]:
    """Make the store of a message server that does not run; what was read, and what was done.

    `of_hub`: of one that 'diloco hub init' has set up, whose streams are those of an account.
    Several stores are those of the nodes of one hub, whose servers are called `names`.
    `owned`: for the main thread of a process of its own, with which the servers end.
    Nobody can reach the server that does it: whoever met a hub that is half there would take the
    rest for gone. Raises BackupError, ServerError, BusError or OSError: the store is empty then
    or to be emptied.
    """
    backup = read(folder)
    for store in stores:
        _check_empty(store)
    async with _unreachable(stores, names, HUB if of_hub else "", owned) as bus:
        streams = backups.ServerStreams(bus)
        return backup, await fill(bus, streams, backup, folder, nodes=len(stores))


async def fill(
    bus: Bus, streams: Streams, backup: Backup, folder: Path, *, nodes: int
) -> list[str]:
    """All of a backup in an empty hub that nobody else reaches; what was done, for people.

    `bus` and `streams` are of that hub, which has so many `nodes`. Raises as `put_back` does.
    """
    for stream in backup.streams:
        # Where more nodes are than were, coordinator and syncers add their copies.
        copies = min(stream.config.get("num_replicas", 1), nodes)
        config = stream.config | {"num_replicas": copies} | _room(stream) | _synced(nodes)
        # Nodes that have a leader need not all have met yet.
        until = ambient.monotonic() + LEADS_S
        put = partial(_put, streams, stream, config, folder / STREAMS / stream.name)
        await until_done(put, "nodes for a copy each", trouble=TooFewNodes, until=until)
    there = {stream.name for stream in backup.streams}
    epochs = list[str]()
    if f"KV_{subjects.RUNS}" in there:
        runs = await _runs(bus)
        there -= (foreign := await _foreign(bus, runs, there))
        for name in sorted(foreign):
            await bus.delete_stream(name)
            epochs.append(f"{name} is left out: it is of a run that was deleted meanwhile")
        epochs += await _new_epochs(bus, runs, there)
    lives = await _new_lives(bus) if f"KV_{subjects.INCARNATIONS}" in there else []
    for name in sorted(there):
        await _copied(streams, name)
    return [*epochs, *lives]


def _room(stream: Stream) -> dict[str, Any]:
    """A tape that is full takes the records that begin its run anew all the same."""
    limit = stream.config.get("max_bytes", -1)
    full = stream.name.startswith(f"{subjects.tape_stream('')}") and limit > 0
    return {"max_bytes": limit + TAPE_ROOM_BYTES} if full else {}


def _synced(nodes: int) -> dict[str, Any]:
    """On several nodes nothing is acknowledged from memory alone, as one may for payloads: nobody
    would notice that a node has lost it (`Bus.several_nodes`)."""
    return {"persist_mode": "default"} if nodes > 1 else {}


async def _put(streams: Streams, stream: Stream, config: dict[str, Any], file: Path) -> None:
    if stream.file:
        await streams.load(stream.name, file, {"config": config, "state": stream.state})
    else:
        await streams.make(config)


async def _copied(streams: Streams, stream: str) -> None:
    """Until every copy has all: of nodes that know nothing, two could outvote the one that does."""

    async def look() -> None:
        if not await streams.copied(stream):
            raise Unavailable(f"copies of {stream} are not complete yet")

    await until_done(look, "copies", until=ambient.monotonic() + COPIED_S)


def _check_empty(store: Path) -> None:
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any((store / "jetstream").rglob("streams/*/*")):
        raise BackupError(
            f"{store} holds streams: a backup is put back on an empty hub only. Stop its message "
            "server, move that folder away, and try again"
        )


def _remove_files(store: Path, but: set[Path]) -> None:
    for path in set(store.iterdir()) - but:
        if path.is_file():
            path.unlink()


def _files(store: Path) -> set[Path]:
    return set(store.iterdir())


@asynccontextmanager
async def _unreachable(
    stores: Sequence[Path], names: Sequence[str], account: str, owned: bool
) -> AsyncIterator[NatsBus]:
    """Servers on loopback, with a password that nobody else has; their own files go with them.

    `owned`: they end with this process, however that ends.
    """
    user, password = "restore", ambient.token(16)
    servers = [
        NatsServer(
            store,
            name=name,
            user=user,
            password=password,
            account=account,
            routes=routes,
            dies_with_owner=owned,
        )
        for store, name, routes in zip(
            stores, names or ("diloco",), _routes(len(stores)), strict=True
        )
    ]
    before = {store: _files(store) for store in stores}
    try:
        for server in servers:
            await server.start()
        urls = ",".join(server.address for server in servers)
        bus = await NatsBus.connect(urls, name="restore", user=user, password=password)
        try:
            leads = ambient.monotonic() + LEADS_S
            await until_done(bus.storage, "a leader of the nodes", until=leads)
            yield bus
        finally:
            await bus.close()
    finally:
        for server in servers:
            await server.stop()
        for store, there in before.items():
            _remove_files(store, there)


def _routes(count: int) -> list[Routes | None]:
    """Between so many nodes on loopback; one alone has none."""
    if count == 1:
        return [None]
    here, password = "127.0.0.1", ambient.token(16)
    places = [(here, free_port(here)) for _ in range(count)]
    return [
        Routes(f"{here}:{port}", [p for p in places if p != (here, port)], password)
        for _, port in places
    ]


async def _runs(bus: Bus) -> dict[str, RunRecord]:
    try:
        found = await records_in(bus, subjects.RUNS, RunRecord, strict=True)
    except WireError as error:
        raise BackupError(f"the record of a run cannot be read: {error}") from None
    return {run: entry.record for run, entry in found.items()}


async def _foreign(bus: Bus, runs: Mapping[str, RunRecord], there: Collection[str]) -> set[str]:
    """Streams whose run has no record, or that of a later run of its name.

    A run may be deleted, and submitted again, while the backup is taken: its tape comes early, its
    record late. Whoever began with that tape could not go on, or would with another's.
    """
    known = {name for run in runs for name in subjects.run_streams(run)}
    found = {name for name in there if name.partition("-")[0] in _OF_RUNS} - known
    for run, record in runs.items():
        streams = set(subjects.run_streams(run)) & set(there)
        if subjects.tape_stream(run) in streams and await _of_another(bus, record):
            found |= streams
    return found


async def _of_another(bus: Bus, record: RunRecord) -> bool:
    """Whether the tape of this name tells of a beginning that is not this run's."""
    stream = subjects.tape_stream(record.name)
    for stored in await bus.fetch(
        stream, f"tape.{record.name}.>", start_seq=1, limit=FIRST_RECORDS
    ):
        with suppress(WireError, ValidationError):
            first = decode_tape(stored.payload)
            if isinstance(first, TapeInit):
                return first.config_hash != config_hash(RunSpec.model_validate(record.spec))
    return False


async def _new_epochs(bus: Bus, runs: Mapping[str, RunRecord], there: Collection[str]) -> list[str]:
    """The record that every tape gets; which run goes on in which epoch."""
    told = []
    for run, record in runs.items():
        if subjects.tape_stream(run) not in there:
            continue
        shards = record.spec.get("algorithm", {}).get("shards", 1)
        tails = [await _tail(bus, run, shard) for shard in range(shards)]
        # Shards follow each other into the newest epoch: all begin in the same one.
        epoch = max((getattr(r, "epoch", 0) for tail in tails for r in tail), default=0)
        epoch = _beyond(epoch)
        for shard, tail in enumerate(tails):
            # One without records, too: learners may have seen what it had after the backup.
            if tail and isinstance(tail[-1], TapeEnd):
                continue
            begins = TapeEpoch(
                epoch=epoch,
                term=_beyond(max((getattr(r, "term", 0) for r in tail), default=0)),
                reason="the hub was restored from a backup",
                at=ambient.wall(),
            )
            seq = await bus.append(subjects.tape(run, shard), encode(begins))
            told.append(f"run {run}, shard {shard}: record {seq} begins epoch {epoch}")
    return told


async def _tail(bus: Bus, run: str, shard: int) -> list[TapeRecord]:
    """The newest records of a shard, enough of them that some tell epoch and term."""
    stream, subject = subjects.tape_stream(run), subjects.tape(run, shard)
    last = await bus.last(stream, subject)
    if last is None:
        return []
    stored = await bus.fetch(stream, subject, start_seq=max(1, last.seq - TAIL_RECORDS))
    try:
        return [decode_tape(s.payload) for s in stored]
    except WireError as error:
        raise BackupError(f"the tape of run {run}: {error}") from None


async def _new_lives(bus: Bus) -> list[str]:
    """Whoever starts as a learner gets a life that nobody had since the backup was taken; so does
    who came after it, and is in no record."""
    entries = await bus.kv_all(subjects.INCARNATIONS)
    for key, entry in entries.items():
        record = readable(entry.value, Incarnation)
        if record is not None:
            raised = record.model_copy(update={"incarnation": _beyond(record.incarnation)})
            await bus.kv_update(subjects.INCARNATIONS, key, encode(raised), entry.revision)
    if subjects.FIRST_LIFE not in entries:
        first = Incarnation(learner="first", incarnation=_beyond(0), boot="", at=ambient.wall())
        await bus.kv_put(subjects.INCARNATIONS, subjects.FIRST_LIFE, encode(first))
    learners = len(entries.keys() - {subjects.FIRST_LIFE})
    return [f"{learners} learners: none gets a life again that it has had"] if learners else []


def _beyond(newest: int) -> int:
    """A number that comes after all that anybody may have seen since `newest` was."""
    return max(newest + AHEAD, int(ambient.wall()) - CLOCK_FROM)


def report(backup: Backup) -> dict[str, Any]:
    """For people and programs."""
    view: dict[str, Any] = json.loads(backup.model_dump_json(include={"version", "at", "took_s"}))
    return view | {"bytes": backup.bytes, "streams": [s.name for s in backup.streams]}
