"""Dice of one kind of trouble: nothing strikes in a world that is healed."""

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diloco_simulator.inside.observer import Scene


class Chance:
    """Of dice of its own, so that other troubles fall as they did before."""

    def __init__(self, scene: "Scene", rng: Random) -> None:
        self.scene = scene
        self.rng = rng

    def __call__(self, rate: float, what: str) -> bool:
        """Whether a fault strikes now; counted."""
        if rate <= 0 or not self.scene.faulty or self.rng.random() >= rate:
            return False
        self.scene.counts[what] += 1
        return True
