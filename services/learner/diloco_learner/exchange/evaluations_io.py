"""Evaluations carried out beside training, one at a time, and told.

    Evaluate ──► train thread ──► Work ──► here ──► a thread ──► Losses ──► event "evaluation"
                                                                             └──► Evaluated

What is to be evaluated is of the moment at which it was handed out, however late its turn comes: a
whole set of anchors, which newer ones would soon lie beside. So one that is due while another is
under way is left out. The last one of a run waits, as nothing newer comes then.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog

from diloco_learner.events import Evaluate, Evaluated
from diloco_learner.training.computing_io import Computing
from diloco_learner.training.evaluate import Losses, Unwanted
from diloco_learner.training.train import ToSend

log = structlog.get_logger()

# Whoever leaves waits so many seconds, at most, until an evaluation that nobody wants any more has
# come to the end of its batch, and let go of the device.
BATCH_S = 10.0

Tell = Callable[[str, str, dict[str, Any]], Awaitable[None]]


class Evaluations:
    """Those of one learner in one run."""

    def __init__(
        self,
        computing: Computing,
        tell: Tell,
        put: Callable[[object], None],
        *,
        evaluated: bool = False,
    ) -> None:
        """`tell` writes an event; `put` leaves something for the train thread. `evaluated`: what
        is handed out is over already and holds no anchors, where steps wait for evaluations."""
        self.computing = computing
        self.tell, self.put, self.evaluated = tell, put, evaluated
        self.waiting: list[ToSend] = []  # at most two: a newer one replaces any but a final one
        self.busy = False
        self.came = asyncio.Event()
        self.under_way: asyncio.Future[Losses] | None = None
        self.wanted = True
        self.skipped = 0

    def take(self, item: ToSend) -> None:
        """Carry out this one when its turn comes."""
        assert isinstance(item.effect, Evaluate)
        if (self.busy or self.waiting) and not (self.evaluated or item.effect.final):
            self.skipped += 1
            return
        final = [kept for kept in self.waiting if _is_final(kept) and not _is_final(item)]
        self.skipped += len(self.waiting) - len(final)
        self.waiting = [*final, item]
        self.came.set()

    async def serve(self) -> None:
        """What is waiting, one after the other, for ever. What fails is told, never raised."""
        while True:
            await self.came.wait()
            self.came.clear()
            while self.waiting:
                self.busy = True
                await self._carry_out(self.waiting.pop(0))
                self.busy = False

    async def _carry_out(self, item: ToSend) -> None:
        effect, work = item.effect, item.handle
        skipped, self.skipped = self.skipped, 0
        del item  # the anchors are let go of one by one
        assert isinstance(effect, Evaluate)
        beside = self.computing.beside(partial(work, lambda: self.wanted))
        self.under_way = asyncio.ensure_future(beside)
        try:
            # Shielded: a thread cannot be cancelled. See `end`.
            losses = await asyncio.shield(self.under_way)
        except Unwanted:
            return
        # A model of the user's own may raise anything, and a device may be full.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            # What it was raised from holds a set of parameters, until somebody forgets it.
            error.__traceback__ = self.under_way = None
            await self._failed(effect, why)
        else:
            await self._told(effect, losses, skipped)
        self.put(Evaluated(effect))

    async def _told(self, effect: Evaluate, losses: Losses, skipped: int) -> None:
        if not math.isfinite(losses.overall):
            await self._failed(effect, "the loss is not a finite number")
            return
        s, each = effect.stamp, {k: v for k, v in losses.each.items() if math.isfinite(v)}
        text = f"validation loss {losses.overall:.4f} after {s.steps} steps of the run"
        if each:
            text += f" ({', '.join(f'{name} {loss:.4f}' for name, loss in each.items())})"
        data = _where(effect) | {"val_loss": losses.overall} | ({"each": each} if each else {})
        if skipped:
            data["skipped"] = skipped
            log.info("evaluations are slower than evaluation.every_steps", left_out=skipped)
        await self.tell("evaluation", text[:500], data)

    async def _failed(self, effect: Evaluate, why: str) -> None:
        last = "the last evaluation" if effect.final else "an evaluation"
        text = f"{last}, after {effect.stamp.steps} steps of the run, failed: {why}"
        await self.tell("evaluation-failed", text[:500], _where(effect))

    def stop(self) -> None:
        """Nobody wants a result any more: this learner leaves."""
        self.wanted = False
        self.waiting.clear()

    async def end(self) -> None:
        """Until the device is let go of, or BATCH_S are over."""
        self.stop()
        if self.under_way is not None:
            await asyncio.wait({self.under_way}, timeout=BATCH_S)
            if self.under_way.done() and not self.under_way.cancelled():
                self.under_way.exception()  # seen: nobody needs it
        self.under_way = None


def _is_final(item: ToSend) -> bool:
    return isinstance(item.effect, Evaluate) and item.effect.final


def _where(effect: Evaluate) -> dict[str, Any]:
    return {
        "steps": effect.stamp.steps,
        "round": effect.stamp.round,
        "versions": list(effect.versions),
        "final": effect.final,
    }
