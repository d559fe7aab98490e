"""What parts of a learner are given in tests."""

from pathlib import Path

from diloco_learner.context import RunContext
from diloco_shared.bus.port import Bus
from diloco_shared.spec.run import RunSpec

NOWHERE = Path("/nonexistent")


def context(spec: RunSpec, bus: Bus, me: str = "a", incarnation: int = 1) -> RunContext:
    """Of a learner that keeps nothing on a disk; both planes are one bus."""
    return RunContext(spec, me, "boot", bus, bus, NOWHERE, "", incarnation)
