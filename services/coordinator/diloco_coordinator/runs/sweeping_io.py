"""Removes readers of streams that no process of the project makes, and says so in an event."""

from collections.abc import Iterable

from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.port import Stray, Sweep
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects

# Between two looks, in seconds. One that delivers to all sites costs their links in the meantime;
# a look asks the hub once for every stream.
LOOK_S = 5.0
# Of those that were removed, the ones that an event names.
NAMED_MAX = 3


async def keep_swept(registry: Registry) -> None:
    """For ever, on a hub whose processes have credentials of their own: where all share one secret,
    whoever has it may do anything, and may be a person with a tool."""
    if not registry.bus.named:
        return
    async with registry.bus.sweeping() as sweep:
        await again_and_again(lambda: look(registry, sweep), "readers of streams", LOOK_S)


async def look(registry: Registry, sweep: Sweep) -> None:
    """One look, and what follows from it. Raises BusError."""
    by_stream: dict[str, list[Stray]] = {}
    for stray in await sweep(_streams(registry.runs)):
        by_stream.setdefault(stray.stream, []).append(stray)
    for stream, strays in by_stream.items():
        await _tell(registry, stream, strays)


def _streams(runs: Iterable[str]) -> list[str]:
    """Of the runs, and of the hub itself."""
    found = [bucket_stream(b) for b in (*subjects.BUCKETS, *subjects.PRIVATE_BUCKETS)]
    return [*(s for run in runs for s in subjects.run_streams(run)), subjects.EVENTS_STREAM, *found]


async def _tell(registry: Registry, stream: str, strays: list[Stray]) -> None:
    run = next((r for r in registry.runs if stream in subjects.run_streams(r)), "")
    named = "; ".join(f"{s.name[:40]}: {s.why}" for s in strays[:NAMED_MAX])
    text = (
        f"{len(strays)} readers of {stream} are removed that no process of this project makes "
        f"({named}). Some site made them, and may be revoked by now"
    )
    data = {"stream": stream, "readers": len(strays)}
    await registry.tell(run, "stray-readers", text, data)
