"""A world's hub loses its disk and is put back from a backup: everybody goes on, from what it has.

Each rule by which they do is taken away once, and a world sees what follows.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from diloco_learner.exchange.leaders import Leaders
from diloco_shared.checkpoints.tape_archive_io import TapeReader, archives_of
from diloco_shared.hub import backup as hub_backup
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Beat, TapeEnd, TapeSnapshot
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.troubles.backups import Backups, MemoryStreams
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.found import read
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import World, WorldResult, played
from diloco_syncer.history import audit_io as audit
from diloco_syncer.history.follow_io import Follower
from diloco_syncer.history.history import History
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.streams.purging_io import UpPurger

pytestmark = pytest.mark.whole


def begin_early(patch: pytest.MonkeyPatch) -> None:
    """A backup is taken as soon as the run goes on."""

    def plan(self: Backups) -> None:
        self.world.loop.call_later(2.0, self._begin)

    patch.setattr(Backups, "plan", plan)


def lost_at_a_purge(patch: pytest.MonkeyPatch) -> None:
    """The hub loses its disks as soon as its leader purges UP. A backup is of before."""
    begun, below = list[int](), UpPurger._below

    async def noted(self: UpPurger) -> int:
        begun.append(await below(self))
        return begun[-1]

    async def taken_and_needed(self: Backups) -> None:
        folder = await self._take()
        begun.clear()
        await until(lambda: begun, "a purge", patience_s=20.0)
        await self._restore(folder)

    patch.setattr(UpPurger, "_below", noted)
    begin_early(patch)
    patch.setattr(Backups, "_taken_and_needed", taken_and_needed)


ENDED = TapeEnd(term=0, versions=(), outcome="finished", reason="spent", at=0.0)


def put_back(seed: int, **changes: Any) -> WorldResult:
    """The hub of a calm world."""
    options = Options.calm(steps=36, syncers=2, learners=2, hub_restores=1).changed(**changes)
    return played(Case(seed, options))


def kept(name: str, more: int = 0) -> WorldResult:
    """That of a world of faults, which broke a promise once; or of one of the seeds behind it."""
    case = read(Path(__file__).parent / "found" / f"{name}.json")
    return played(replace(case, seed=case.seed + more))


def broken(name: str, words: str = "", seeds: int = 12) -> bool:
    """Whether one of these worlds breaks a promise. Not each does: whatever changes what a process
    says lets the dice fall otherwise."""
    found = (v for n in range(seeds) for v in kept(name, n).violations)
    return any(re.search(words, v) for v in found)


async def nothing(self: object) -> None: ...


@pytest.mark.parametrize("shards", [1, 2])
def test_everybody_goes_on_to_the_end_of_the_run(shards: int) -> None:
    found = put_back(3, shards=shards)
    assert found.violations == []
    assert found.counts["backups of the hub"] == 1
    assert found.counts["hubs restored"] == 1 + found.counts["hubs restored twice"]
    assert found.counts["told: end"] or found.counts["beats: finished"]


def test_what_the_tape_has_not_is_no_state_to_go_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tape that was put back has as many records as a syncer has executed."""
    assert kept("tape-put-back-as-long-as-before").violations == []
    monkeypatch.setattr(Follower, "look_back", nothing)
    monkeypatch.setattr(Tape, "look_back", nothing)
    assert broken("tape-put-back-as-long-as-before", r"of epoch 0 is committed in [1-9]")


def test_terms_go_on_above_those_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else learners would take the leaders of the new epoch for deposed ones."""
    beat = Leaders.beat

    def mixed(self: Leaders, heard: Beat) -> Beat | None:
        told = beat(self, heard)
        if told is None or self.shards == 1:
            return told
        terms = tuple(self.beats[shard].term for shard in range(self.shards))
        return told.model_copy(update={"term": sum(terms), "terms": terms})

    assert kept("terms-of-two-epochs").violations == []
    monkeypatch.setattr(Leaders, "beat", mixed)
    apply = History.apply

    def forgetful(self: History, record: Any, seq: int) -> None:
        term = self.term
        apply(self, record, seq)
        if record.kind == "epoch":
            self.term = term

    monkeypatch.setattr(History, "apply", forgetful)
    assert broken("terms-of-two-epochs")


def test_what_was_to_be_purged_from_a_hub_that_is_lost_stays_on_the_one_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tape needs it. A hub of several nodes counts as one that has lost nothing."""
    lost_at_a_purge(monkeypatch)
    often = {"steps": 72, "snapshot_every_rounds": 3, "nodes": 3}
    found = put_back(0, **often)
    assert found.violations == [] and found.counts["hubs of several nodes restored"]
    monkeypatch.setattr(Tape, "still_ours", nothing)
    violations = (v for seed in range(6) for v in put_back(seed, **often).violations)
    assert any(re.search(r"purges \d+ messages that are needed", v) for v in violations)


async def looked(world: World) -> tuple[int, list[int]]:
    """How many snapshots the tape has, and records whose contributions are gone and needed."""
    bus, tape = MemoryBus(world.broker, "an auditor"), subjects.tape_stream("sim")
    stored = await bus.kv_get(subjects.RUNS, "sim")
    assert stored is not None
    spec = RunSpec.model_validate(decode(stored.value, RunRecord).spec)
    end = (await bus.stream_info(tape)).last_seq
    records = TapeReader(bus, "sim", archives_of(spec, "nowhere")[0], end)
    found = await audit.verify(spec, bus, records, "nowhere")
    assert all(fault.purged for fault in found.faults)
    snapshots = [seq async for seq, r in records.after(0) if isinstance(r, TapeSnapshot)]
    return len(snapshots), [fault.seq for fault in found.faults]


def test_what_a_backup_of_its_contributions_lacks_is_no_fault_after_the_next_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UP is saved after the tape, and when a snapshot that this does not know has covered some."""
    purged, needed = list[int](), list[list[int]]()
    purge, save, restore = MemoryBroker.purge, MemoryStreams.save, Backups._restore

    def noted(self: MemoryBroker, name: str, *what: Any) -> int:
        gone = purge(self, name, *what)
        purged.append(gone if name == subjects.up_stream("sim") else 0)
        return gone

    async def saved(self: MemoryStreams, stream: str, file: Path) -> Any:
        if stream == subjects.up_stream("sim"):
            purged.clear()
            await until(lambda: any(purged), "a purge", patience_s=20.0)
        return await save(self, stream, file)

    async def restored(self: Backups, folder: Path) -> None:
        await restore(self, folder)
        before, gone = await looked(self.world)
        needed.append(gone)

        async def covered() -> bool:
            return (await looked(self.world))[0] > before

        await until(covered, "a snapshot", every_s=1.0)
        needed.append((await looked(self.world))[1])

    begin_early(monkeypatch)
    monkeypatch.setattr(MemoryBroker, "purge", noted)
    monkeypatch.setattr(MemoryStreams, "save", saved)
    monkeypatch.setattr(Backups, "_restore", restored)
    assert put_back(1, steps=72).violations == []
    assert needed[0] and needed[1] == []


@pytest.mark.long  # a world that never ends is given up late
def test_an_empty_tape_begins_an_epoch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other shard does, and learners wait for both to be in one."""
    tail = hub_backup._tail

    async def told(bus: Any, run: str, shard: int) -> list[Any]:
        """An empty one passes for one that has ended."""
        return await tail(bus, run, shard) or [ENDED]

    assert kept("empty-tape-put-back").violations == []
    monkeypatch.setattr(hub_backup, "_tail", told)
    assert broken("empty-tape-put-back", seeds=60)
