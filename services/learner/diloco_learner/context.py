"""What all parts of one learner's work for one run have in common."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_shared.spec.run import RunSpec

if TYPE_CHECKING:
    from diloco_shared.bus.port import Bus


@dataclass(frozen=True, slots=True)
class RunContext:
    """`me`: this learner's member id. `boot`: of its process. `incarnation`: -1 until it has one.

    `folder`: what this learner keeps lies in it. `checkpoint_root`: where the checkpoints of
    this run are. `checkpoint_places`: where those may be that it goes back to.
    """

    spec: RunSpec
    me: str
    boot: str
    control: "Bus"
    data: "Bus"
    folder: Path
    checkpoint_root: str
    incarnation: int = -1
    checkpoint_places: tuple[str, ...] = ()
