"""Room is made before there is none; what is full is a state with a name (I12)."""

from typing import Any

import pytest
from syncer.conftest import spec

from diloco_shared.protocol.messages import TapeEpoch
from diloco_shared.protocol.records import Restore
from diloco_syncer.events import (
    Append,
    Full,
    Led,
    Loaded,
    MergeWaits,
    Publish,
    Published,
    PurgeDown,
    PurgeUnsealed,
    Rewound,
    Snapshot,
    SnapshotDone,
    SnapshotFailed,
    Stage,
    Staged,
    StreamSeen,
    Tell,
    TimePassed,
    Wanted,
)
from diloco_syncer.machine import SNAPSHOT_RETRY_S
from diloco_syncer.streams.room import CROWDED

GIB = 1 << 30
FULL_DN = "DN is full: 2.1 GB of 2.1 GB used, a keyframe needs 300 MB: raise the limit"


def of(effects: list[Any], kind: type) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


@pytest.fixture
def d(driver_of: Any) -> Any:
    """Learners a and b, initialised; no fragment is whole within its life."""
    found = driver_of(keyframe_every=1000)
    found.start("a", "b")
    return found


def short(d: Any, by: int = 1) -> None:
    """DN has `by` bytes less room than it must have."""
    needed = d.machine.room.needed
    d.give(StreamSeen("DN", GIB - needed + by, GIB))


def staged(d: Any, rounds: int) -> list[Stage]:
    """What so many further rounds stage."""
    before = len(of(d.effects, Stage))
    for _ in range(rounds):
        for learner in ("a", "b"):
            d.step(learner, 4)
        pull = d.pulls[-1]
        for learner in ("a", "b"):
            d.answer(pull, learner)
        for learner in ("a", "b"):  # what is published is adopted
            d.adopted_at[learner][pull.fragment] = d.steps[learner]
    found = of(d.effects, Stage)[before:]
    assert len(found) == rounds
    return found


def test_what_is_published_next_is_whole_where_dn_is_short_of_room(d: Any) -> None:
    assert not any(s.keyframe for s in staged(d, 2))
    short(d, by=0)
    assert not any(s.keyframe for s in staged(d, 2))
    short(d)
    early = staged(d, 2)
    assert [s.keyframe for s in early] == [True, True]
    records = [r for r in d.tape if getattr(r, "keyframe", False)]
    assert [r.fragment for r in records] == [s.fragment for s in early]  # type: ignore[union-attr]


def test_no_turn_carries_the_whole_model_where_keyframes_are_rarer(driver_of: Any) -> None:
    """The keyframes of all fragments at once would take longer than the turn itself."""
    d = driver_of(keyframe_every=8)
    d.start("a", "b")
    found = staged(d, 20)
    by_version = [[s.keyframe for s in found[n : n + 2]] for n in range(0, 20, 2)]
    assert all(sum(turn) <= 1 for turn in by_version), by_version
    for p in range(2):
        of_p = [s.keyframe for s in found if s.fragment == p]
        first = of_p.index(True)
        assert of_p[first::8] == [True] * len(of_p[first::8]) and sum(of_p) == len(of_p[first::8])


def test_how_many_deltas_are_to_be_read_is_known_of_every_version() -> None:
    for every in (1, 2, 5, 16):
        algorithm, keyframes = spec(keyframe_every=every).algorithm, set()
        for p in range(6):
            since = 0
            for version in range(1, 50):
                found = algorithm.deltas_since(p, version)
                since = 0 if found == 0 else since + 1
                assert found == since < every
                keyframes |= {version % every} if found == 0 else set()
        assert len(keyframes) == max(every // 4, 1), "in the others every fragment has versions"


def test_the_tape_says_what_was_staged_whatever_room_there_is_by_then(d: Any) -> None:
    staged(d, 2)
    short(d)
    d.auto = False
    for learner in ("a", "b"):
        d.step(learner, 4)
    for learner in ("a", "b"):
        d.answer(d.pulls[-1], learner)
    stage = of(d.effects, Stage)[-1]
    assert stage.keyframe
    d.give(StreamSeen("DN", 0, GIB))
    digest = "0" * 32
    seen = d.give(Staged(stage.epoch, stage.round, digest, digest, digest))
    assert of(seen, Append)[0].record.keyframe


def test_the_fragment_with_most_behind_its_keyframe_makes_room(d: Any) -> None:
    staged(d, 4)
    room = d.machine.room
    room.behind_P = {0: 500, 1: 900}
    short(d)
    assert not room.keyframe_due(0)
    assert room.keyframe_due(1)


def test_a_keyframe_of_whatever_cause_lets_all_before_it_go(d: Any) -> None:
    d.give(Published(epoch=0, round=-1, fragment=1, version=7, keyframe=True))
    assert of(d.effects, PurgeDown)[-1] == PurgeDown(0, 1, 7)
    before = len(of(d.effects, PurgeDown))
    d.give(Published(epoch=0, round=-1, fragment=1, version=8, keyframe=False))
    assert len(of(d.effects, PurgeDown)) == before
    # One that the server had lost, and that was sent again meanwhile, replaces nothing: it goes.
    d.give(Published(epoch=0, round=-1, fragment=1, version=5, keyframe=True))
    assert of(d.effects, PurgeDown)[-1] == PurgeDown(0, 1, 7)


@pytest.mark.parametrize("kind", ["UP", "TAPE"])
def test_a_snapshot_is_made_before_its_time_where_its_stream_is_short_of_room(
    d: Any, kind: str
) -> None:
    staged(d, 1)
    before = len(of(d.effects, Snapshot))
    d.give(StreamSeen(kind, int(CROWDED * GIB), GIB))
    assert len(of(d.effects, Snapshot)) == before
    d.give(StreamSeen(kind, int(CROWDED * GIB) + 1, GIB))
    assert len(of(d.effects, Snapshot)) == before + 1
    # It covers all there is: another would let nothing go.
    d.give(StreamSeen(kind, GIB, GIB))
    assert len(of(d.effects, Snapshot)) == before + 1


def test_no_snapshot_is_made_before_its_time_while_up_waits_for_standbys(d: Any) -> None:
    """It lets go at once of what a snapshot covers when there is no more room. Meanwhile each other
    snapshot would ask of standbys that they have executed more."""
    staged(d, 1)
    before = len(of(d.effects, Snapshot))
    d.give(StreamSeen("UP", GIB, GIB, waits=True))
    assert len(of(d.effects, Snapshot)) == before
    d.give(StreamSeen("UP", GIB, GIB))
    assert len(of(d.effects, Snapshot)) == before + 1


def test_what_up_held_before_a_snapshot_calls_for_no_other(d: Any) -> None:
    """That snapshot lets it go, and it takes a while until that is seen."""
    staged(d, 1)
    d.auto = False
    (first,) = of(d.give(StreamSeen("UP", GIB, GIB)), Snapshot)
    d.auto = True
    staged(d, 1)
    before = len(of(d.effects, Snapshot))
    d.give(SnapshotDone(first.covers, first.round, "here"))
    staged(d, 1)
    assert len(of(d.effects, Snapshot)) == before
    d.give(StreamSeen("UP", GIB, GIB))
    assert len(of(d.effects, Snapshot)) == before + 1


def test_a_disk_that_takes_no_snapshot_is_asked_again_with_the_next_round_or_after_a_pause(
    d: Any,
) -> None:
    staged(d, 1)
    d.auto = False
    crowded = StreamSeen("UP", GIB, GIB)
    assert of(d.give(crowded), Snapshot)
    d.give(SnapshotFailed("the disk is full"))
    assert not of(d.give(crowded), Snapshot)
    d.now += SNAPSHOT_RETRY_S - 0.1
    assert not of(d.give(crowded), Snapshot)
    d.now += 0.1
    assert of(d.give(crowded), Snapshot), "no round may come before there is room"
    d.give(SnapshotFailed("the disk is full"))
    d.auto = True
    before = len(of(d.effects, Snapshot))
    for learner in ("a", "b"):
        d.step(learner, 0)
    staged(d, 1)
    assert len(of(d.effects, Snapshot)) > before


def test_a_full_stream_is_the_state_from_its_beginning_to_its_end(d: Any) -> None:
    staged(d, 1)
    first = d.give(Full("DN", FULL_DN))
    assert [t.kind for t in of(first, Tell)] == ["full"]
    assert not of(d.give(Full("DN", FULL_DN)), Tell), "told once"
    assert d.machine.announcer.state(d.now) == ("full", FULL_DN)
    d.give(Full("hub", "the hub's disk is full"))
    assert "the hub's disk" in d.machine.announcer.state(d.now)[1]
    d.give(Full("hub", ""))
    over = d.give(Full("DN", ""))
    assert [t.kind for t in of(over, Tell)] == ["room-again"]
    assert d.machine.announcer.state(d.now)[0] == "running"


def test_whoever_initialises_is_still_asked_while_something_is_full(
    driver: Any,
) -> None:
    d = driver
    d.lead()
    d.give(Full("UP", "UP is full"))
    state, reason = d.machine.announcer.state(d.now)
    assert state in ("waiting", "bootstrapping")
    assert "UP is full" in reason


def test_a_syncers_full_disk_is_said_and_stops_nothing(d: Any) -> None:
    staged(d, 1)
    d.give(SnapshotFailed("s's disk is full: snapshot not written"))
    state, reason = d.machine.announcer.state(d.now)
    assert state == "running"
    assert "disk is full" in reason
    again = d.give(SnapshotFailed("s's disk is full: another snapshot not written"))
    assert "snapshot-failed" not in [t.kind for t in of(again, Tell)], "told when it began"
    h = d.machine.history
    d.give(SnapshotDone(h.seq, h.next_round - 1, "here"))
    assert "disk is full" not in d.machine.announcer.state(d.now)[1]


def test_merges_that_wait_for_a_disk_are_shown_and_told_ever_more_seldom(d: Any) -> None:
    staged(d, 1)
    told = {}
    for seconds in (2.0, 12.0, 20.0, 25.0, 40.0, 51.0):
        told[seconds] = of(d.give(MergeWaits(0, "the disk of snapshots", seconds)), Tell)
    assert [s for s, tells in told.items() if tells] == [12.0, 25.0, 51.0]
    assert (told[12.0][0].kind, told[12.0][0].data) == ("slow-disk", {"seconds": 12.0})
    state, reason = d.machine.announcer.state(d.now)
    assert state == "running"
    assert "merges wait for the disk of snapshots, 51 s in all" in reason
    assert "keeping.snapshot_every_rounds" in reason
    d.give(MergeWaits(1, "the place of checkpoints", 53.0))
    assert not of(d.give(MergeWaits(0, "", 54.0)), Tell)
    reason = d.machine.announcer.state(d.now)[1]
    assert "merges wait for the place of checkpoints" in reason
    assert "snapshot_every_rounds" not in reason
    d.give(MergeWaits(1, "", 55.0))
    assert "merges wait" not in d.machine.announcer.state(d.now)[1]


def test_what_the_message_server_lost_is_published_again_and_needed_from_up_no_more(d: Any) -> None:
    staged(d, 2)
    versions = tuple(d.machine.history.versions)
    d.auto = False
    there = (versions[0], versions[1] - 1)
    seen = d.give(Rewound(there, there))
    again = [e for e in seen if type(e).__name__ == "Publish"]
    assert [(e.fragment, e.version, e.prev_version) for e in again] == [(1, versions[1], -1)]
    assert of(seen, Snapshot)
    assert not of(seen, Append)


def test_what_is_still_on_its_way_is_not_published_again(driver: Any) -> None:
    """Neither a keyframe of no round, nor what an earlier loss already had published again."""
    d, answer = driver, driver._answer
    slow: list[Publish] = []

    def answered(effect: Any) -> list[Any]:
        if isinstance(effect, Publish) and effect.fragment == 1:
            slow.append(effect)
            return []
        found: list[Any] = answer(effect)
        return found

    d._answer = answered
    d.start("a", "b")
    assert [e.version for e in slow] == [0]
    d.auto = False
    lost = Rewound((-1, -1), (-1, -1))
    assert [e.fragment for e in of(d.give(lost), Publish)] == [0]
    assert not of(d.give(lost), Publish)
    d.give(Published.of(slow[0]))
    assert [e.fragment for e in of(d.give(lost), Publish)] == [1]
    assert not [r for r in d.tape if isinstance(r, TapeEpoch)]


def test_a_difference_may_follow_what_is_still_on_its_way(driver_of: Any) -> None:
    d = driver_of(keyframe_every=1000)
    d.start("a", "b")
    answer = d._answer
    d._answer = lambda e: [] if isinstance(e, Publish) else answer(e)
    lost = Rewound((-1, -1), (-1, -1))
    d.give(lost)
    staged(d, 1)
    effects = d.give(lost)
    assert not of(effects, Publish)
    assert not [r for r in d.tape if isinstance(r, TapeEpoch)]


def test_whoever_takes_over_purges_what_keyframes_have_replaced(running: Any) -> None:
    """The leader that published them may have died before it did."""
    machine = type(running.machine)(running.spec, running.machine.history)
    running.machine = machine
    effects = running.give(Led("s2", 1000.0 + running.now, (0, 0), keyframes=(0, -1)))
    assert of(effects, PurgeDown) == [PurgeDown(0, 0, 0)]


@pytest.mark.parametrize("unsure", [True, False])
def test_whoever_takes_over_from_a_server_begun_anew_covers_what_it_may_have_lost(
    d: Any, unsure: bool
) -> None:
    staged(d, 2)
    d.machine = type(d.machine)(d.spec, d.machine.history)
    published = tuple(d.machine.history.versions)
    effects = d.give(Led("s2", 1000.0 + d.now, published, unsure=unsure))
    assert bool(of(effects, Snapshot)) == unsure


@pytest.mark.parametrize("uncovered", [True, False])
def test_whoever_takes_over_without_a_snapshot_of_its_own_makes_one(
    d: Any, uncovered: bool
) -> None:
    """It broke off the one that it was writing. UP may be purged up to one of who led before, and
    that machine may never come back."""
    staged(d, 2)
    d.machine = type(d.machine)(d.spec, d.machine.history)
    d.machine.history.snapshot_round = d.machine.history.next_round - 1
    published = tuple(d.machine.history.versions)
    effects = d.give(Led("s2", 1000.0 + d.now, published, uncovered=uncovered))
    assert bool(of(effects, Snapshot)) == uncovered


def test_what_builds_on_a_lost_publication_is_of_a_new_epoch(d: Any) -> None:
    """Its own subject is taken: who comes later could never make that version."""
    staged(d, 2)
    versions = tuple(d.machine.history.versions)
    d.auto = False
    seen = d.give(Rewound((versions[0], -1), versions))
    (append,) = of(seen, Append)
    assert isinstance(append.record, TapeEpoch)
    assert not [e for e in seen if type(e).__name__ == "Publish"]


def test_what_was_lost_while_a_restore_was_under_way_is_owed_if_it_fails(d: Any) -> None:
    """Nobody can make that version, and no other round or look would tell."""
    staged(d, 2)
    versions = tuple(d.machine.history.versions)
    d.auto = False
    wish = Restore(serial=1, source="t.01/000001")
    d.give(Wanted(paused=False, stopping=False, quorum=2, restore=wish))
    seen = d.give(Rewound((versions[0], -1), versions))
    assert not of(seen, Append), "the restore begins an epoch of its own"
    seen = d.give(Loaded(wish, fault="gone"))
    assert [type(e.record) for e in of(seen, Append)] == [TapeEpoch]
    assert not of(d.give(TimePassed()), Append), "it is on its way"


def test_contributions_that_were_lost_are_needed_no_more_once_there_is_a_snapshot(d: Any) -> None:
    staged(d, 2)
    d.auto = False
    seen = d.give(Rewound(None))
    assert of(seen, Snapshot)
    assert not [e for e in seen if type(e).__name__ == "Publish"]


def test_a_loss_while_a_snapshot_is_written_calls_for_another(d: Any) -> None:
    """What was merged since that one was begun is gone from UP, too."""
    d.auto = False
    (first,) = of(d.give(Rewound(None)), Snapshot)
    assert not of(d.give(Rewound(None)), Snapshot)
    (append,) = of(d.give(SnapshotDone(first.covers, first.round, "here")), Append)
    d.auto = True
    assert of(d._answer(append), Snapshot)


def test_a_full_stream_of_publications_is_rid_of_what_keyframes_have_replaced(running: Any) -> None:
    """A deposed leader was still sending when its successor purged."""
    h = running.machine.history
    for p in h.owned:
        running.give(Published(h.epoch, -1, p, 0, True))
    effects = running.give(Full("DN", FULL_DN))
    assert of(effects, PurgeDown) == [PurgeDown(h.epoch, p, 0) for p in h.owned]
    assert of(effects, PurgeUnsealed) == [PurgeUnsealed(h.term)], "of leaders before this one"
    assert not of(running.give(Full("DN", "")), PurgeDown)
