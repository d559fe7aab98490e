"""What mark the first of several shards shows, while another one's learners tell of one."""

from collections.abc import Callable

from diloco_shared.bus.port import Bus
from diloco_shared.bus.repeating import again_and_again
from diloco_shared.bus.status_key import shown
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import Event, MarkShown

# Between two looks, in seconds: no round is recorded until the mark is there.
LOOK_S = 0.3


async def watch_marks(
    control: Bus, spec: RunSpec, asked: Callable[[], bool], put: Callable[[Event], None]
) -> None:
    """For ever; the bus is asked only while somebody waits for the answer."""

    async def look() -> None:
        if asked() and (status := await shown(control, spec.name, spec.id)) is not None:
            put(MarkShown(status.checkpoint))

    await again_and_again(look, "the first shard's mark", LOOK_S)
