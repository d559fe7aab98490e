"""A hand-driven syncer machine: effects performed at once, time given by the test."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from syncer.two_shards import begun

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    Join,
    Progress,
    Pull,
    TapeRecord,
    TapeRound,
    TensorSpec,
)
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash, shared_keys
from diloco_syncer.events import (
    Append,
    Appended,
    ContributionSeen,
    Effect,
    Event,
    FindMark,
    FindNumber,
    InitSeen,
    JoinSeen,
    Led,
    MarkFound,
    NumberFound,
    ProgressSeen,
    Publish,
    Published,
    SendPull,
    Snapshot,
    SnapshotDone,
    Stage,
    Staged,
    TimePassed,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine

LAYOUT = (
    TensorSpec(name="a", shape=(8,), embedding=False),
    TensorSpec(name="b", shape=(6,), embedding=True),
)


def spec(**algorithm: Any) -> RunSpec:
    settings = {"fragments": 2, "sync_every_steps": 8, "quorum": 2, **algorithm}
    return RunSpec.model_validate(
        {
            "name": "t",
            "algorithm": settings,
            "model": {"factory": "tests:two_tensors"},
            "membership": {"learners_min": 2, "lease_s": 5.0},
            "budget": {"steps": 80},
        }
    )


@dataclass
class Driver:
    """Feeds a Machine and performs its effects; `auto` answers Append, Stage and Publish."""

    spec: RunSpec
    now: float = 0.0
    machine: Machine = field(init=False)
    tape: list[TapeRecord] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    auto: bool = True
    steps: dict[str, int] = field(default_factory=dict)
    adopted_at: dict[str, list[int]] = field(default_factory=dict)
    # Newest mark of the first shard's tape; None: whichever a learner tells of.
    first_mark: int | None = None
    there: int = 0  # newest number at the place of checkpoints

    def __post_init__(self) -> None:
        self.machine = Machine(self.spec, History(self.spec))

    def lead(self) -> None:
        self.give(Led("s", 1000.0 + self.now, (-1,) * self.spec.algorithm.fragments))

    def give(self, event: Event) -> list[Effect]:
        """One event and all that follows from it at the same instant."""
        new = self.machine.handle(event, self.now)
        if isinstance(event, TimePassed) and self.machine.deadline is not None:
            assert self.machine.deadline > self.now, "the leader's loop would not pause"
        self.effects += new
        seen = list(new)
        if self.auto:
            for effect in new:
                seen += self._answer(effect)
        return seen

    def _answer(self, effect: Effect) -> list[Effect]:
        match effect:
            case Append():
                self.tape.append(effect.record)
                return self.give(Appended(len(self.tape), 1000.0 + self.now))
            case Stage():
                digest = f"{effect.round:032x}"
                return self.give(Staged(effect.epoch, effect.round, digest, digest, digest))
            case Publish():
                return self.give(Published.of(effect))
            case Snapshot():
                return self.give(SnapshotDone(effect.covers, effect.round, "here"))
            case FindMark():
                told = self.machine.user_requests.checkpoints.claims.newest
                newest = told if self.first_mark is None else self.first_mark
                return self.give(MarkFound(newest, newest))
            case FindNumber():
                return self.give(NumberFound(self.there))
            case _:
                return []

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, stopping at every deadline."""
        until, seen = self.now + seconds, []
        while self.machine.deadline is not None and self.machine.deadline <= until:
            self.now = max(self.machine.deadline, self.now)
            seen += self.give(TimePassed())
        self.now = until
        return seen

    @property
    def config(self) -> dict[str, str]:
        layout = Layout.build(LAYOUT, self.spec.algorithm.fragments)
        return shared_keys(self.spec) | {"layout": layout.digest()}

    def join(self, learner: str, incarnation: int = 0, **changed: str) -> list[Effect]:
        self.steps.setdefault(learner, 0)
        self.adopted_at.setdefault(learner, [0, 0])
        return self.give(
            JoinSeen(
                Join(
                    learner=learner,
                    incarnation=incarnation,
                    nonce=f"{learner}-{incarnation}",
                    config=self.config | changed,
                )
            )
        )

    def progress(self, learner: str, step: int, *, incarnation: int = 0, **over: Any) -> Progress:
        versions = tuple(self.machine.history.versions)
        at = self.adopted_at.get(learner, [0, 0])
        per_step = self.spec.tokens_per_step
        fields: dict[str, Any] = {
            "learner": learner,
            "incarnation": incarnation,
            "epoch": self.machine.history.epoch,
            "state": "stepping",
            "step": step,
            "tokens": step * per_step,
            "c_steps": tuple(step - a for a in at),
            "c_tokens": tuple((step - a) * per_step for a in at),
            "adopted": versions,
            "adopted_at": tuple(at),
            "loss": 1.0,
            "step_s": 1.0,
            "wait_s": 0.0,
        }
        return Progress(**{**fields, **over})

    def step(self, learner: str, steps: int = 1, **over: Any) -> list[Effect]:
        self.steps[learner] = self.steps.get(learner, 0) + steps
        return self.give(ProgressSeen(self.progress(learner, self.steps[learner], **over)))

    def initial(self, learner: str) -> InitSeen:
        """Its parameters, complete and sound."""
        n, hash_ = self.spec.algorithm.fragments, config_hash(self.spec)
        names = tuple(f"up.t.a.init.0.{p}" for p in range(n))
        digests, sizes = tuple(f"{p:x}" * 32 for p in range(n)), Layout.build(LAYOUT, n).sizes
        return InitSeen(learner, 0, hash_, LAYOUT, names, digests, sizes, finite=True)

    def start(self, *learners: str) -> None:
        """Lead, join, initialise."""
        self.lead()
        for learner in learners:
            self.join(learner)
        self.give(self.initial(learners[0]))
        for learner in learners:
            self.step(learner, 0)

    def answer(self, pull: Pull, learner: str, *, norm: float = 1.0, **over: Any) -> list[Effect]:
        """A contribution of everything since adoption."""
        finite = over.pop("finite", True)
        return self.give(
            ContributionSeen(self.manifest(pull, learner, **over), finite=finite, norm=norm)
        )

    def manifest(self, pull: Pull, learner: str, **over: Any) -> ContributionManifest:
        size = self.machine.history.sizes_P[pull.fragment]
        at, step = self.adopted_at[learner][pull.fragment], self.steps[learner]
        subject = subjects.contribution(
            "t", learner, pull.epoch, pull.fragment, pull.round, pull.term
        )
        fields: dict[str, Any] = {
            "run": "t",
            "learner": learner,
            "incarnation": 0,
            "epoch": pull.epoch,
            "term": pull.term,
            "round": pull.round,
            "fragment": pull.fragment,
            "base": self.machine.history.versions[pull.fragment],
            "step_from": at,
            "step_to": step,
            "tokens_from": at * self.spec.tokens_per_step,
            "tokens_to": step * self.spec.tokens_per_step,
            "cursor": None,
            "codec": "bf16",
            "values": size,
            "config_hash": config_hash(self.spec),
            "blob": Blob(
                subject=subject, bytes=2 * size, chunk_bytes=1024, chunks=1, digest="0" * 32
            ),
        }
        return ContributionManifest(**{**fields, **over})

    @property
    def pulls(self) -> list[Pull]:
        return [e.pull for e in self.effects if isinstance(e, SendPull)]

    @property
    def rounds(self) -> list[TapeRound]:
        return [r for r in self.tape if isinstance(r, TapeRound)]


@pytest.fixture
def driver_of() -> Callable[..., Driver]:
    """Makes a driver of a run with these algorithm settings."""
    return lambda **algorithm: Driver(spec(**algorithm))


@pytest.fixture
def driver() -> Driver:
    return Driver(spec())


@pytest.fixture
def running(driver: Driver) -> Driver:
    """Learners a and b, initialised, nothing due yet."""
    driver.start("a", "b")
    return driver


@pytest.fixture
def pair(driver_of: Any) -> list[Any]:
    """Both shards of one run."""
    return [begun(driver_of, shard) for shard in (0, 1)]
