"""The four streams of a run: made with the limits of its budget, and raised when it grows."""

from collections.abc import Mapping

from diloco_shared.edges.bus import Bus, Refused, StreamSpec
from diloco_shared.protocol import subjects


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
            await bus.ensure_stream(StreamSpec(name, (captured[name],), limit, synced=synced))


async def _limit(bus: Bus, name: str) -> float:
    """Of a stream that is there; -1 for one that is not."""
    try:
        return (await bus.stream_info(name)).bytes_max or float("inf")
    except Refused:
        return -1
