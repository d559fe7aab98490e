"""A desk for an exchange: messages by hand, effects looked at."""

from typing import Any, TypeVar

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Begin,
    DonateSeen,
    ExchangeEffect,
    ExchangeEvent,
    PullSeen,
    SendProgress,
    Stepped,
    TimePassed,
)
from diloco_learner.exchange.exchange import Exchange
from diloco_shared.protocol.messages import Beat, Cursor, Donate, Progress, Pull, Stamp
from diloco_shared.spec.run import RunSpec

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 3, "sync_every_steps": 12},
        "budget": {"steps": 120},
        "evaluation": {"every_steps": 8},
        "keeping": {"checkpoint_every_steps": 10},
    }
)
E = TypeVar("E")


def stamp(round_: int = -1) -> Stamp:
    return Stamp(
        round=round_, steps=4 * (round_ + 1), fraction=(round_ + 1) / 30, fraction_per_step=1 / 120
    )


def beat(**change: Any) -> BeatSeen:
    b = Beat(
        run="r",
        epoch=0,
        term=1,
        state="running",
        reason="as planned",
        versions=(0, 0, 0),
        stamp=stamp(),
        live=("a", "b"),
    )
    return BeatSeen(b.model_copy(update=change))


def pull(
    round_: int, *, term: int = 1, epoch: int = 0, timeout_s: float = 5.0, fragments: int = 3
) -> PullSeen:
    return PullSeen(
        Pull(
            epoch=epoch,
            term=term,
            round=round_,
            fragment=round_ % fragments,
            participants=("a", "b"),
            timeout_s=timeout_s,
        )
    )


def anchor(
    p: int, version: int, *, epoch: int = 0, round_: int = -1, merged: tuple[int, int] = (-1, -1)
) -> AnchorReady:
    return AnchorReady(
        epoch, p, version, round_, stamp(round_), {"a": (*merged, -1), "b": (3, 99, -1)}
    )


def donate(nonce: str = "n1", newcomer: str = "b", **change: Any) -> DonateSeen:
    d = Donate(
        donor="a",
        donor_incarnation=2,
        newcomer=newcomer,
        newcomer_incarnation=1,
        nonce=nonce,
        epoch=0,
        versions=(0, 0, 0),
    )
    return DonateSeen(d.model_copy(update=change))


class Desk:
    """An exchange, its clock and its step count."""

    def __init__(self, spec: RunSpec = SPEC) -> None:
        self.now = 100.0
        begun = (0,) * spec.algorithm.fragments
        self.exchange = Exchange(spec, "a", 2, Begin(0, 0, begun, stamp()), self.now)

    def tell(self, *events: ExchangeEvent) -> list[ExchangeEffect]:
        return [e for event in events for e in self.exchange.handle(event, self.now)]

    def step(
        self, times: int = 1, tokens: int = 64, *, skipped: bool = False
    ) -> list[ExchangeEffect]:
        """`skipped`: the step before each of these was."""
        effects: list[ExchangeEffect] = []
        for _ in range(times):
            assert self.exchange.may_step
            self.now += 1.0
            cursor = Cursor(shard=7, sequences=self.exchange.counters.step + 1)
            effects += self.tell(Stepped(tokens, 2.5, 1.0, 0.0, cursor, skipped))
        return effects

    def pass_time(self, seconds: float) -> list[ExchangeEffect]:
        self.now += seconds
        return self.tell(TimePassed())


def only(effects: list[ExchangeEffect], kind: type[E]) -> list[E]:
    return [e for e in effects if isinstance(e, kind)]


def last_progress(effects: list[ExchangeEffect]) -> Progress:
    return only(effects, SendProgress)[-1].progress
