"""Seeded histories of joins, kills and leaves: every sequence is read once, but for what died.

What a life read behind its newest merged step is read again by whoever takes its shard, and the
ledger says how much that is, to the token.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
from learner.contexts import context
from syncer.contexts import alone

from diloco_learner.data import batches_io, leasing_io
from diloco_learner.data.batches_io import Batches
from diloco_learner.data.leasing_io import Leases
from diloco_learner.data.left_out import LeftOut
from diloco_learner.data.shards import ShardCut, ShardReader
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Cursor, LifeCount, TapeRound, Verdict
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.messages.merged_positions_io import MergedPositions

SHARDS, PER_SHARD, CONTEXT, BATCH = 24, 8, 2, 3
SPEC = RunSpec.model_validate(
    {"name": "r", "budget": {"steps": 48}, "data": {"virtual_shards": SHARDS}}
)
CUT = ShardCut(np.arange(SHARDS * PER_SHARD * CONTEXT + 1), shards=SHARDS, context=CONTEXT, seed=3)

Read = tuple[int, int, int]  # shard, pass, index


class Recorder(ShardReader):
    """Tells what is read; in the order of the corpus, which is quicker than a shuffled one."""

    reads: ClassVar[list[Read]] = []  # of the batch under way

    def __init__(self, cut: ShardCut, shard: int, sequences: int = 0, passes: int = 0) -> None:
        self.cut, self.shard, self.passes = cut, shard, passes
        self.size = cut.size(shard)
        self.consumed = min(sequences, self.size)
        self._known_from, self._places = 0, np.arange(self.size)

    def take(self, sequences: int, left_out: LeftOut | None = None) -> Any:
        before = self.consumed
        batch = super().take(sequences, left_out)
        Recorder.reads += [(self.shard, self.passes, n) for n in range(before, self.consumed)]
        return batch


@dataclass
class Life:
    """One process that reads."""

    name: str
    incarnation: int
    leases: Leases
    reads: list[Read] = field(default_factory=list)
    merged: int = 0  # of the reads
    sent: tuple[Cursor, int, int] | None = None  # cursor, reads, and where it began

    @property
    def tokens(self) -> int:
        return len(self.reads) * CONTEXT


class Run:
    """Three names, one bucket, one ledger."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.broker = MemoryBroker()
        self.ledger = Ledger.empty(1, SHARDS)
        self.places = MergedPositions(
            MemoryBus(self.broker, "syncer"), "r", lambda: self.ledger, alone
        )
        self.lives: dict[str, Life] = {}
        self.over: list[Life] = []
        self.incarnations: Counter[str] = Counter()
        self.n = 0

    async def begin(self) -> None:
        for bucket in (subjects.SHARDS, subjects.PLACES):
            await self.places.bus.ensure_bucket(bucket)
        for name in "abc":
            self.start(name)

    def start(self, name: str) -> None:
        async def tell(kind: str, text: str, data: dict[str, Any]) -> None:
            raise AssertionError(text)  # there are shards enough for everybody

        bus = MemoryBus(self.broker, f"{name}-{self.incarnations[name]}")
        incarnation, live = self.incarnations[name], lambda: tuple(self.lives)
        place = context(SPEC, bus, name, incarnation)
        leases = Leases(place, Batches(CUT, BATCH), live, tell)
        self.lives[name] = Life(name, incarnation, leases)
        self.incarnations[name] += 1
        self.saw(self.lives[name])

    def saw(self, life: Life, *, left: bool = False) -> None:
        self.ledger.saw(
            LifeCount(
                learner=life.name, incarnation=life.incarnation, tokens=life.tokens, left=left
            )
        )

    async def step(self, life: Life) -> None:
        await life.leases.look(0.0)
        while not life.leases.batches.granted and life.leases.batches.wants:
            await life.leases.look(0.0)
        Recorder.reads = []
        life.leases.batches.take()
        life.reads += Recorder.reads
        self.saw(life)

    def contribute(self, life: Life) -> None:
        cursor = life.leases.batches.cursor
        if cursor is not None and len(life.reads) > life.merged:
            life.sent = (cursor, len(life.reads), life.merged)

    async def merge(self, life: Life, *, heard: bool) -> None:
        """On the tape; perhaps its learner dies before it hears of it."""
        if life.sent is None:
            return
        (cursor, until, since), life.sent = life.sent, None
        verdict = Verdict(
            learner=life.name,
            incarnation=life.incarnation,
            outcome="merged",
            reason="in time",
            tokens_from=since * CONTEXT,
            tokens_to=until * CONTEXT,
            cursor=cursor,
        )
        self.n += 1
        self.ledger.round(TapeRound.model_construct(fragment=0, verdicts=(verdict,), counts=()))
        await self.places.write()
        life.merged = until
        if heard:
            life.leases.merged(cursor)

    async def end(self, life: Life, *, politely: bool) -> None:
        del self.lives[life.name]
        self.over.append(life)
        if politely:
            await life.leases.release()
            self.saw(life, left=True)
        self.start(life.name) if self.rng.random() < 0.7 else None

    async def play(self, events: int) -> None:
        for _ in range(events):
            name = self.rng.choice("abc")
            if name not in self.lives:
                self.start(name)
            life, what = self.lives[name], self.rng.random()
            if what < 0.5:
                await self.step(life)
            elif what < 0.7:
                self.contribute(life)
            elif what < 0.93:
                heard = self.rng.random() < 0.8
                await self.merge(life, heard=heard)
                if not heard:
                    await self.end(life, politely=False)
            else:
                await self.end(life, politely=self.rng.random() < 0.4)

    def check(self) -> None:
        good: Counter[Read] = Counter()
        again = 0
        for life in self.over:
            good.update(life.reads[: life.merged])
            again += len(life.reads) - life.merged
        for life in self.lives.values():
            good.update(life.reads)
        assert set(good.values()) <= {1}, "merged, or about to be, twice"
        # Nothing is skipped: of every pass a beginning without gaps, and no pass before the last.
        frontier: dict[tuple[int, int], list[int]] = {}
        for shard, passes, index in good:
            frontier.setdefault((shard, passes), []).append(index)
        for (shard, passes), indices in frontier.items():
            assert sorted(indices) == list(range(len(indices)))
            assert not passes or len(frontier[(shard, passes - 1)]) == PER_SHARD
        over = {(life.name, life.incarnation) for life in self.over}
        assert self.ledger.reread(lambda *life: life in over) == again * CONTEXT


@pytest.mark.parametrize("seed", range(10))
async def test_every_sequence_is_read_once_but_for_what_died_unmerged(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_io, "ShardReader", Recorder)
    # None is given up unmerged, of which the rest would be skipped; these shards are very small.
    monkeypatch.setattr(leasing_io, "FINISHED_MAX", 14)
    run = Run(seed)
    await run.begin()
    for _ in range(12):
        await run.play(40)
        run.check()
    again = sum(len(life.reads) - life.merged for life in run.over)
    assert len(run.over) > 30 and again > 20, "a history without deaths proves nothing"
