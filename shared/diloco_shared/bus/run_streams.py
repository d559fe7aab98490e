"""What runs have on the bus: the buckets of all, and the four streams and the record of each."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import structlog

from diloco_shared.bus.port import Bus, NoStream, StreamInfo, StreamSpec, TooFewNodes
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.stored_records import readable_at, record_at
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX
from diloco_shared.spec.run import RunSpec

# A state or a snapshot that nobody took in so long, in seconds, goes by itself: whoever wants one
# fetches it while it is sent.
STATE_S = 6 * 3600.0
# Of a message on a stream that learners write, with its headers: the largest is a manifest that
# names every tensor, and headers have some 200 bytes.
LARGEST = MESSAGE_BYTES_MAX + 4096

log = structlog.get_logger()


async def ensure_run_streams(
    bus: Bus, run: str, limits: Mapping[str, int], *, replicas: int = 1
) -> None:
    """Each stream is there, with a limit of at least `limits[kind]` bytes, in `replicas` copies.

    None is lowered: whoever knew of more learners raised it, and they may still be there. Raises
    StreamFull when the server has no room for what is asked, and TooFewNodes when a stream that is
    not there yet cannot be made with so many copies: streams are made in order, so some may be
    there. One that is there, as on a hub that was restored to fewer nodes, goes on as it is.
    """
    captured = subjects.run_streams(run)
    for kind, limit in limits.items():
        name = subjects.run_stream(run, kind)
        there = await _there(bus, name)
        if there is not None and _limit(there) >= limit and there.replicas >= replicas:
            continue
        # What the tape acknowledged must be on disk; the rest can be made again.
        synced = name == subjects.tape_stream(run)
        wanted = StreamSpec(name, (captured[name],), limit, synced=synced, replicas=replicas)
        if kind in ("UP", "STATE"):
            wanted = replace(wanted, message_bytes_max=LARGEST)
        if kind == "STATE":
            wanted = replace(wanted, age_s_max=STATE_S)
        try:
            await bus.ensure_stream(wanted)
        except TooFewNodes as error:
            if there is None:
                raise
            log.warning("fewer copies than the run asks for", stream=name, why=str(error))
            if _limit(there) < limit:
                await bus.ensure_stream(replace(wanted, replicas=there.replicas))


async def ensure_buckets(
    bus: Bus, buckets: Iterable[str] = subjects.BUCKETS, *, renew: bool = False, replicas: int = 1
) -> None:
    """They are there afterwards; whoever comes first makes them. Waits for the bus.

    Who may make none, as a learner with credentials of its own, waits for those who may. `renew`:
    those that are there get what this release wants of buckets, and so many copies. Raises
    TooFewNodes.
    """
    for bucket in buckets:
        make = partial(bus.ensure_bucket, replicas=replicas) if renew else partial(_missing, bus)
        await until_done(partial(make, bucket), "buckets", pauses=PROMPT, fatal=TooFewNodes)


async def _missing(bus: Bus, bucket: str) -> None:
    if await _there(bus, bucket_stream(bucket)) is None:
        await bus.ensure_bucket(bucket)


async def spec_of(bus: Bus, run: str, run_id: str) -> RunSpec | None:
    """What a run was submitted with; None when it is deleted, or is being so, or another one has
    its name. Whoever hears of it late would leave files and keys that nobody removes.

    Raises BusError; WireError and ValidationError for a record that this version cannot read.
    """
    found = await record_at(bus, subjects.RUNS, run, RunRecord)
    if found is None or found.record.phase == "deleting":
        return None
    spec = RunSpec.model_validate(found.record.spec)
    return spec if spec.id == run_id else None


async def exists(bus: Bus, run: str, run_id: str) -> bool:
    """Whether there is such a run that is not being deleted: another one may have its name.

    Raises BusError.
    """
    record = await readable_at(bus, subjects.RUNS, run, RunRecord)
    if record is None or record.phase == "deleting":
        return False
    return bool(record.spec.get("id", "") == run_id)


async def _there(bus: Bus, name: str) -> StreamInfo | None:
    """None for a stream that is not there."""
    try:
        return await bus.stream_info(name)
    except NoStream:
        return None


def _limit(stream: StreamInfo) -> float:
    return stream.bytes_max or float("inf")
