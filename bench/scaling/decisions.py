"""The syncer's decisions without a network: processor seconds of `Machine.handle` and of the wire.

M learners take a step a second, not all at the same instant, and answer every pull within half of
one. A fragment's turn comes every 24 steps (64, if there are more or 24 cannot be divided); one
contribution suffices (K = 1), and all are merged.
"""

import gc
import heapq
import time
from collections import defaultdict
from typing import Any

from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Beat,
    ContributionManifest,
    Cursor,
    Progress,
    Pull,
    TapeRound,
    TensorSpec,
)
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_syncer.events import (
    Append,
    Appended,
    ContributionSeen,
    Effect,
    Event,
    InitSeen,
    JoinSeen,
    Led,
    ProgressSeen,
    Publish,
    Published,
    SendBeat,
    SendPull,
    Snapshot,
    SnapshotDone,
    Stage,
    Staged,
    TimePassed,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine
from diloco_syncer.status.status import status
from scaling.learners import DIGEST, VALUES, Voice

WALL = 1e9  # of the tape's clock at the start
WARM, ROUNDS = 4, 8
SPREAD_S = 0.4  # from the first learner's report, or answer, to the last one's
SAMPLES = 40  # of messages whose coding is timed


class Term:
    """One leader and its learners."""

    def __init__(self, learners: int, fragments: int) -> None:
        self.every = 64 if 24 % fragments else 24
        self.spec = RunSpec.model_validate(
            {
                "name": "scale",
                "algorithm": {
                    "fragments": fragments,
                    "sync_every_steps": self.every,
                },
                "model": {"factory": "scale:tensors"},
                "membership": {"learners_min": learners, "learners_max": learners},
                "budget": {"steps": 10**6},
            }
        )
        self.tensors = tuple(
            TensorSpec(name=f"t{p}", shape=(VALUES,), embedding=False) for p in range(fragments)
        )
        layout = Layout.build(self.tensors, fragments).digest()
        self.voice = Voice(self.spec, layout)
        self.machine = Machine(self.spec, History(self.spec))
        self.names = [f"learner-{m:03d}" for m in range(learners)]
        self.step = 0
        self.now = 0.0
        self.adopted_at = [0] * fragments  # alike for all
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.told: dict[type, Any] = {}  # the newest message of a kind
        self.seq = 0
        self.coming: list[tuple[float, int, Event]] = []  # a heap
        self.order = 0
        self.answered: set[tuple[int, int]] = set()  # the newest pull

    def start(self) -> None:
        """Lead, join, initialise."""
        a = self.spec.algorithm
        self._at(0.0, Led("syncer", WALL, (-1,) * a.fragments))
        self._until(0.0)
        for name in self.names:
            self._at(0.0, JoinSeen(self.voice.join(name)))
        named = tuple(subjects.initial("scale", self.names[0], 0, p) for p in range(a.fragments))
        digests = (DIGEST,) * a.fragments
        sizes, voice = (VALUES,) * a.fragments, self.voice.hash
        init = InitSeen(self.names[0], 0, voice, self.tensors, named, digests, sizes, finite=True)
        self._at(0.0, init)
        self._until(0.0)

    def advance(self) -> None:
        """A second: every learner takes a step, reports it, and answers what is asked."""
        self.step += 1
        for m, name in enumerate(self.names):
            when = self.step + SPREAD_S * m / len(self.names)
            self._until(when)
            self._at(when, ProgressSeen(self.progress(name)))
        self._until(self.step + 1)

    def _at(self, when: float, event: Event) -> None:
        self.order += 1
        heapq.heappush(self.coming, (when, self.order, event))

    def _until(self, when: float) -> None:
        """All that comes by then, deadlines among it."""
        while True:
            deadline = self.machine.deadline
            due = float("inf") if deadline is None else max(deadline, self.now)
            if self.coming and self.coming[0][0] <= min(due, when):
                self.now, _, event = heapq.heappop(self.coming)
                self._give(event)
            elif due <= when:
                self.now = due
                self._give(TimePassed())
            else:
                self.now = when
                return

    def _give(self, event: Event) -> None:
        began = time.thread_time()
        effects = self.machine.handle(event, self.now)
        self.seconds[type(event).__name__] += time.thread_time() - began
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Append():
                self.seq += 1
                self.told[type(effect.record)] = effect.record
                self._at(self.now, Appended(self.seq, WALL + self.now))
            case SendPull():
                self.told[Pull] = pull = effect.pull
                if (pull.term, pull.round) in self.answered:
                    return  # a repeat
                self.answered = {(pull.term, pull.round)}
                for m, name in enumerate(pull.participants):
                    when = self.now + SPREAD_S * m / len(self.names)
                    seen = ContributionSeen(self.manifest(pull, name), finite=True, norm=1.0)
                    self._at(when, seen)
            case SendBeat():
                self.told[Beat] = effect.beat
            case Stage():
                digests = (DIGEST, DIGEST, DIGEST)
                self._at(self.now, Staged(effect.epoch, effect.round, *digests))
            case Publish():
                self.adopted_at[effect.fragment] = self.step
                self._at(self.now, Published.of(effect))
            case Snapshot():
                self._at(self.now, SnapshotDone(effect.covers, effect.round, "here"))

    def progress(self, name: str) -> Progress:
        history = self.machine.history
        at = (self.step, history.versions, self.adopted_at)
        return self.voice.progress(name, history.epoch, *at, cursor=self.cursor)

    def manifest(self, pull: Pull, name: str) -> ContributionManifest:
        p = pull.fragment
        since = (self.machine.history.versions[p], self.adopted_at[p], self.step)
        return self.voice.contribution(pull, name, *since, cursor=self.cursor)

    @property
    def cursor(self) -> Cursor:
        return Cursor(shard=0, sequences=self.step)


def cost(learners: int, fragments: int) -> dict[str, Any]:
    """Processor seconds a round and a step, and bytes of messages, of M learners and P fragments.

    `step_s`: reports of all learners. `round_s`: pull, contributions, verdicts, record. Each holds
    the decoding and encoding of its messages as well as the decisions.
    """
    gc.collect()
    gc.freeze()  # what other points left behind is not looked through again
    term = Term(learners, fragments)
    term.start()
    apart = term.every // fragments  # steps
    for _ in range(WARM * apart):
        term.advance()
    history, before = term.machine.history, dict(term.seconds)
    rounds, merged = history.committed, history.merged_total
    for _ in range(ROUNDS * apart):
        term.advance()
    closed, merged = history.committed - rounds, history.merged_total - merged
    assert closed >= ROUNDS - 1, f"{closed} rounds, {ROUNDS} were due"
    spent = {kind: s - before.get(kind, 0.0) for kind, s in term.seconds.items()}
    progress, pull = term.progress(term.names[0]), term.told[Pull]
    manifest, record = term.manifest(pull, term.names[0]), term.told[TapeRound]
    reports = learners * _coding_s(progress, back=True)
    answers = learners * _coding_s(manifest, back=True)
    began = time.thread_time()
    for _ in range(5):
        shown = status(term.machine, float(term.step), WALL, bytes_up=0, bytes_down=0)
    status_s = (time.thread_time() - began) / 5 + _coding_s(shown)
    reported_s = spent.pop("ProgressSeen") / (ROUNDS * apart)
    decided = sum(spent.values()) / closed
    return {
        "learners": learners,
        "fragments": fragments,
        "merged_per_round": merged / closed,
        "step_s": reported_s + reports,
        "round_s": decided + answers + _coding_s(record) + _coding_s(pull),
        "step_decisions_s": reported_s,
        "round_decisions_s": decided,
        "status_s": status_s,
        "progress_bytes": len(encode(progress)),
        "tape_bytes": len(encode(record)),
        "beat_bytes": len(encode(term.told[Beat])),
    }


def _coding_s(message: Any, *, back: bool = False) -> float:
    """Processor seconds to encode a message, or to decode it."""
    data = encode(message)
    began = time.thread_time()
    for _ in range(SAMPLES):
        if back:
            decode(data, type(message))
        else:
            encode(message)
    return (time.thread_time() - began) / SAMPLES
