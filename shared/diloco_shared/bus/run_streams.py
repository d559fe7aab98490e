"""What runs have on the bus: the buckets of all, and the four streams and the record of each."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from diloco_shared.bus.port import Bus, Refused, StreamSpec
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.stored_records import record_at
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.spec.run import RunSpec

# A state or a snapshot that nobody took in so long, in seconds, goes by itself: whoever wants one
# fetches it while it is sent.
STATE_S = 6 * 3600.0


async def ensure_run_streams(bus: Bus, run: str, limits: Mapping[str, int]) -> None:
    """Each stream is there, with a limit of at least `limits[kind]` bytes; none is lowered.

    Whoever knew of more learners raised it, and they may still be there. Raises StreamFull when
    the server has no room for what is asked: streams are made in order, so some may be there.
    """
    captured = subjects.run_streams(run)
    for kind, limit in limits.items():
        name = subjects.run_stream(run, kind)
        if await _limit(bus, name) < limit:
            # What the tape acknowledged must be on disk; the rest can be made again.
            synced = name == subjects.tape_stream(run)
            spec = StreamSpec(name, (captured[name],), limit, synced=synced)
            if kind == "STATE":
                spec = replace(spec, age_s_max=STATE_S)
            await bus.ensure_stream(spec)


async def ensure_buckets(
    bus: Bus, buckets: Iterable[str] = subjects.BUCKETS, *, renew: bool = False
) -> None:
    """They are there afterwards; whoever comes first makes them. Waits for the bus.

    Who may make none, as a learner with credentials of its own, waits for those who may. `renew`:
    those that are there get what this release wants of buckets.
    """
    for bucket in buckets:
        make = bus.ensure_bucket if renew else partial(_make_missing, bus)
        await until_done(partial(make, bucket), "buckets", pauses=PROMPT)


async def _make_missing(bus: Bus, bucket: str) -> None:
    if await _limit(bus, bucket_stream(bucket)) < 0:
        await bus.ensure_bucket(bucket)


async def spec_of(bus: Bus, run: str, run_id: str) -> RunSpec | None:
    """What a run was submitted with; None when it is deleted, or another one has its name.

    Raises BusError; WireError and ValidationError for a record that this version cannot read.
    """
    found = await record_at(bus, subjects.RUNS, run, RunRecord)
    spec = RunSpec.model_validate(found.record.spec) if found else None
    return spec if spec is not None and spec.id == run_id else None


async def _limit(bus: Bus, name: str) -> float:
    """Of a stream that is there; -1 for one that is not."""
    try:
        return (await bus.stream_info(name)).bytes_max or float("inf")
    except Refused:
        return -1
