"""Beginning again: from which publications, when, and what the tape makes of it."""

from typing import Any

import numpy as np
import pytest
from syncer.test_history import init, round_, term, verdict

from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import (
    LifeCount,
    PublicationManifest,
    Stamp,
    TapeEnd,
    TapeRebirth,
    TapeRecord,
)
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_syncer.events import Appended, Led, Publish, Published, PurgeDown, SendBeat, Snapshot
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.leadership.rebirth import (
    LastResort,
    Reborn,
    chains,
    decoded,
    reborn,
    reborn_store,
)
from diloco_syncer.machine import Machine
from diloco_syncer.rounds.round import Phase, Round

F = 8
RNG = np.random.default_rng(4)


def values() -> np.ndarray:
    """Whole numbers: sums and differences are exact."""
    return RNG.integers(-9, 9, F).astype(np.float32)


def history(*records: TapeRecord) -> History:
    h = History(init_spec())
    for seq, record in enumerate((term(1), init(), *records), 1):
        h.apply(record, seq)
    return h


def init_spec() -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "t",
            "algorithm": {"fragments": 2, "sync_every_steps": 8},
            "budget": {"steps": 80},
        }
    )


def publication(
    version: int,
    anchor_F: np.ndarray,
    before_F: np.ndarray | None = None,
    fragment: int = 0,
    **changed: int,
) -> tuple[PublicationManifest, bytes]:
    """A delta onto `before_F`, or a keyframe."""
    place = {"epoch": 0, "term": 1, **changed}
    payload = codec.encode("fp32", anchor_F if before_F is None else anchor_F - before_F)
    subject = subjects.publication("t", place["epoch"], fragment, version, place["term"])
    result_F = anchor_F if before_F is None else before_F + (anchor_F - before_F)
    m = PublicationManifest(
        run="t",
        round=-1,
        fragment=fragment,
        version=version,
        prev_version=-1 if before_F is None else version - 1,
        codec="fp32",
        values=anchor_F.size,
        anchor_digest=digest_array(result_F),
        config_hash=config_hash(init_spec()),
        participants=(),
        last_merged={},
        stamp=Stamp(round=-1, steps=0, fraction=0.0, fraction_per_step=0.0),
        blob=describe(subject, payload),
        **place,
    )
    return m, payload


def rebirth(versions: tuple[int, ...] = (0, 0), **changed: object) -> TapeRebirth:
    fields: dict[str, object] = {
        "epoch": 1,
        "term": 2,
        "leader": "s2",
        "versions": versions,
        "anchor_digests": ("a" * 32, "b" * 32),
        "reason": "every disk is lost",
        "at": 9.0,
    }
    return TapeRebirth.model_validate(fields | changed)


# --- from which publications ---------------------------------------------------------------------


def test_the_newest_version_is_a_keyframe_and_the_deltas_after_it() -> None:
    a_F, b_F, c_F = values(), values(), values()
    published = [publication(0, a_F), publication(1, b_F, a_F), publication(2, c_F, b_F)]
    (best, *_) = chains(history(), 0, [m for m, _ in published][::-1])
    assert [m.version for m in best] == [0, 1, 2]
    payloads = {m.blob.subject: payload for m, payload in published}
    anchor_F = None
    for m in best:
        anchor_F = decoded(m, payloads[m.blob.subject], anchor_F)
    assert anchor_F is not None and digest_array(anchor_F) == best[-1].anchor_digest


def test_a_delta_whose_base_is_gone_makes_nothing() -> None:
    a_F, b_F, c_F = values(), values(), values()
    first, last = publication(0, a_F)[0], publication(2, c_F, b_F)[0]
    assert [[m.version for m in chain] for chain in chains(history(), 0, [first, last])] == [[0]]
    assert chains(history(), 1, [first, last]) == []


def test_the_head_of_the_tape_comes_before_what_it_has_lost() -> None:
    head_F, lost_F = values(), values()
    head, payload = publication(0, head_F)
    h = History(init_spec())
    h.apply(term(1), 1)
    h.apply(init(anchor_digests=(head.anchor_digest, "1" * 32)), 2)
    lost = publication(1, lost_F)[0]
    assert [c[-1].version for c in chains(h, 0, [head, lost])] == [0, 1]
    # Of what is not the head, the newest epoch's newest.
    other = History(init_spec())
    other.apply(term(1), 1)
    other.apply(init(), 2)
    later = publication(1, lost_F, epoch=1)[0]
    found = chains(other, 0, [head, lost, later])
    assert [(c[-1].epoch, c[-1].version) for c in found] == [(1, 1), (0, 1), (0, 0)]
    with pytest.raises(ValueError, match="does not make the anchor"):
        decoded(lost, payload, None)


def test_the_epoch_is_newer_than_all_that_is_published() -> None:
    manifest = publication(1, values(), epoch=4)[0]
    born = reborn(history(), {0: manifest}, 4, "why")
    assert (born.epoch, born.versions) == (5, (1, -1))


def test_master_and_anchor_are_what_was_published_and_the_momentum_is_zero() -> None:
    h, a_F, b_F = history(), values(), RNG.standard_normal(6).astype(np.float32)
    store = reborn_store(h, (7, 3), {0: a_F, 1: b_F})
    assert [store.version(p) for p in (0, 1)] == [7, 3]
    for p, values_F in ((0, a_F), (1, b_F)):
        f = store.fragments[p]
        assert np.array_equal(f.master, values_F) and np.array_equal(f.anchor, values_F)
        assert f.previous is None and all(not leaf.any() for leaf in f.outer)


# --- when ----------------------------------------------------------------------------------------


def last_resort(begin_again: str = "automatic") -> LastResort:
    body = init_spec().model_dump(mode="json")
    body["keeping"] |= {"begin_again": begin_again, "begin_again_after_s": 30.0}
    body["membership"] |= {"leader_lease_s": 2.0}
    return LastResort(RunSpec.model_validate(body))


NOBODY: dict[str, object] = {"leader": "", "fit": (), "coming": (), "asked": False}


def look(resort: LastResort, now: float, **seen: object) -> str:
    return resort.look(now, **{**NOBODY, **seen})  # type: ignore[arg-type]


def test_it_begins_by_itself_after_the_stated_time_without_anybody() -> None:
    resort = last_resort()
    assert "in 30 s" in look(resort, 100.0)
    assert "in 1 s" in look(resort, 129.5)
    assert look(resort, 130.0) == ""


@pytest.mark.parametrize("seen", [{"leader": "s1"}, {"fit": ("s1",)}, {"coming": ("s1",)}])
def test_whoever_may_have_more_is_waited_for_and_time_begins_anew(seen: dict[str, object]) -> None:
    resort = last_resort()
    look(resort, 100.0)
    assert "waits for s1" in look(resort, 140.0, **seen)
    assert "in 30 s" in look(resort, 141.0)


def test_time_in_which_nobody_can_be_seen_does_not_count() -> None:
    """And who comes back with the bus has some leases' time to say so."""
    resort = last_resort()
    assert "in 30 s" in look(resort, 100.0)
    resort.blind(110.0)
    resort.blind(150.0)
    assert "in 20 s" in look(resort, 160.0), "ten seconds of sight were before"
    resort.blind(178.0)
    assert "in 8 s" in look(resort, 179.0), "of the last ones none is left out"
    assert look(resort, 187.0) == ""


def test_asked_to_it_waits_for_some_leases_alone() -> None:
    resort = last_resort("ask")
    assert "diloco begin-again t" in look(resort, 100.0)
    assert "diloco begin-again t" in look(resort, 1000.0)
    assert look(resort, 1000.0, asked=True) == ""
    fresh = last_resort("ask")
    assert "in 8 s" in look(fresh, 100.0, asked=True)
    assert look(fresh, 108.0, asked=True, coming=("s1",)) == "", "one that never gets there"
    assert look(fresh, 109.0, asked=True, fit=("s1",))


# --- what the tape makes of it -------------------------------------------------------------------


def test_history_goes_on_with_all_that_is_on_the_tape() -> None:
    h = history(round_(0, verdicts=(verdict("a", 0),)))
    h.apply(rebirth((1, 0)), h.seq + 1)
    assert (h.epoch, h.term, h.leader) == (1, 2, "s2")
    assert (h.versions, h.anchor_digests) == ([1, 0], ["a" * 32, "b" * 32])
    assert (h.next_round, h.committed) == (1, 1)
    assert h.last_merged[0]["a"][1] == 0, "what was published with it stands"
    assert h.began_P == [1, 0]
    assert History.restore(init_spec(), h.meta()).meta() == h.meta()


def test_a_round_that_was_never_published_is_lost_and_the_ledger_says_so() -> None:
    h = history(round_(0, verdicts=(verdict("a", 0),)))
    before = h.ledger.tokens_P()[0]
    h.apply(rebirth((0, 0)), h.seq + 1)
    after = h.ledger.tokens_P()[0]
    assert h.versions == [0, 0]
    assert before.merged > 0 == after.merged
    assert after.lost == before.lost + before.merged
    assert sum(after.model_dump().values()) == h.ledger.processed
    assert "a" not in h.last_merged[0], "its learner must not take that for merged"


@pytest.mark.parametrize("changed", [{"epoch": 0}, {"term": 1}])
def test_it_fences_as_a_term_and_an_epoch_do(changed: dict[str, object]) -> None:
    h = history()
    with pytest.raises(TapeFault, match="cannot begin again here"):
        h.apply(rebirth(**changed), h.seq + 1)


def test_nothing_begins_again_after_the_end() -> None:
    h = history()
    h.apply(TapeEnd(term=1, outcome="stopped", reason="", versions=(0, 0), at=3.0), 3)
    with pytest.raises(TapeFault, match="follows the end"):
        h.apply(rebirth(), 4)


# --- what a leader makes of it -------------------------------------------------------------------


def test_the_record_is_the_first_and_all_follows_from_it() -> None:
    h = history()
    machine = Machine(init_spec(), h)
    born = Reborn(1, (0, 0), ("a" * 32, "b" * 32), "every disk is lost")
    (append,) = machine.handle(Led("s2", 1000.0, (-1, 7), born), 0.0)
    record = append.record  # type: ignore[union-attr]
    assert isinstance(record, TapeRebirth) and record.term == 2
    assert not machine.leading
    effects = machine.handle(Appended(3, 1000.0), 0.0)
    assert machine.leading
    assert [(e.fragment, e.epoch, e.prev_version) for e in effects if isinstance(e, Publish)] == [
        (0, 1, -1),
        (1, 1, -1),
    ]
    assert any(isinstance(e, Snapshot) and e.covers == 3 for e in effects), "for those who follow"


@pytest.mark.parametrize("step_s", [-700.0, 700.0])
@pytest.mark.parametrize("born", [None, Reborn(1, (0, 0), ("a" * 32, "b" * 32), "lost")])
def test_a_lease_to_speak_begins_with_the_term_however_the_wall_clock_steps(
    step_s: float, born: Reborn | None
) -> None:
    """A first record may wait for minutes, and the clock may be set meanwhile."""
    machine = Machine(init_spec(), history())
    machine.history.ledger.saw(LifeCount(learner="a", incarnation=0, tokens=1))
    machine.handle(Led("s2", 1000.0, (0, 0), born), 0.0)
    effects = machine.handle(Appended(3, 1300.0 + step_s), 300.0)
    assert any(isinstance(e, SendBeat) for e in effects)
    assert "a" not in machine.roster.gone
    assert not machine.roster.silent("a", 0, 300.0)
    assert machine.roster.silent("a", 0, 301.0 + machine.roster.lease_s)


def test_an_earlier_epochs_publication_replaces_nothing_of_this_one(running: Any) -> None:
    """A leader that was slow to publish may do so after history began again."""
    running.step("a", 1, adopted=(3, 0))  # its record is lost: another epoch begins
    h = running.machine.history
    assert (h.epoch, h.versions[0]) == (1, 0)

    def purges(epoch: int) -> list[Any]:
        return [
            e for e in running.give(Published(epoch, -1, 0, 0, True)) if isinstance(e, PurgeDown)
        ]

    # This epoch's keyframe may not be there yet. But what is older than that one goes, so that
    # there is room for it: a run that went back four times in a row had filled DN.
    assert purges(0) == [PurgeDown(0, 0, 0)]
    assert purges(1) == [PurgeDown(1, 0, 0)]


def test_an_earlier_epochs_publication_frees_no_round_of_this_one(running: Any) -> None:
    running.auto = False
    rounds = running.machine.rounds
    r = Round(0, 0, 0.0, {})
    r.phase, r.publishes = Phase.PUBLISHING, (1, 0, 4)
    rounds.open = [r]
    for late in (
        Published(0, -1, 0, 4, False),
        Published(1, -1, 0, 3, False),
        Published(1, -1, 1, 4, False),
    ):
        rounds.published(late, 1.0)
        assert rounds.open == [r]
    rounds.published(Published(1, -1, 0, 4, False), 1.0)
    assert rounds.open == []
