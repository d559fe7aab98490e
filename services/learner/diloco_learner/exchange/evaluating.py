"""When a learner evaluates what is published, and how long it stays for the last evaluation."""

import math

from diloco_learner.events import Evaluate, ExchangeEffect, Tell
from diloco_shared.protocol.messages import Stamp
from diloco_shared.protocol.pace import LAST_EVALUATION_S


class Evaluating:
    """Of one learner that is named the evaluator, or is not. Mutated only through its methods."""

    def __init__(self, learner: str, every_steps: int) -> None:
        self.learner = learner
        self.every_steps = every_steps
        self.begin_again()

    def begin_again(self) -> None:
        """A new epoch: what was evaluated before it says nothing of it."""
        self.reached = -1  # newest multiple of every_steps that some evaluator answers for
        self.last: Evaluate | None = None  # the final one that is under way
        self.deadline = math.inf  # of the final one
        self.over = False

    def due(self, evaluator: str, stamp: Stamp, versions: tuple[int, ...]) -> list[ExchangeEffect]:
        """At version 0 and at every multiple of every_steps of the run, by whoever is named.

        The others note the multiple as taken, so that a successor does not repeat it.
        """
        mark = stamp.steps // self.every_steps
        if not evaluator or mark <= self.reached:
            return []
        self.reached = mark
        return [Evaluate(stamp, versions, final=False)] if evaluator == self.learner else []

    def at_the_end(
        self, stamp: Stamp, versions: tuple[int, ...], now: float
    ) -> list[ExchangeEffect]:
        """The last evaluation, once. Call it again until `over`: it is told, or was too slow."""
        if self.over:
            return []
        if self.last is None:
            self.last, self.deadline = (
                Evaluate(stamp, versions, final=True),
                now + LAST_EVALUATION_S,
            )
            return [self.last]
        if now < self.deadline:
            return []
        self.over, self.deadline = True, math.inf
        took = f"after {LAST_EVALUATION_S:.0f} s"
        text = f"the last evaluation is not over {took}: {self.learner} leaves"
        return [Tell("evaluation-failed", text, {"learner": self.learner, "final": True})]

    def broken_off(self, reason: str) -> list[ExchangeEffect]:
        """This learner leaves; if it was to make the last evaluation, somebody must hear of it."""
        if self.last is None or self.over:
            return []
        text = f"the last evaluation is broken off, as {self.learner} leaves: {reason}"
        data = {"learner": self.learner, "final": True}
        return [Tell("evaluation-failed", text[:500], data)]

    def made(self, effect: Evaluate) -> None:
        """Its result is told, or why there is none."""
        if self.last is not None and effect == self.last:
            self.over, self.deadline = True, math.inf
