"""Checkers by themselves: what they are shown, they see."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from diloco_coordinator.runs.membership import MemberNote
from diloco_shared.bus.port import Stored
from diloco_shared.checkpoints.checkpoints_io import CheckpointError
from diloco_shared.numerics.codec import encode
from diloco_shared.numerics.merge import Delta, merge
from diloco_shared.numerics.schedule import inner_rate
from diloco_shared.protocol.messages import (
    Progress,
    Stamp,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRestore,
    TapeRound,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
    TensorSpec,
    Verdict,
)
from diloco_shared.protocol.pace import LAST_EVALUATION_S
from diloco_shared.protocol.records import Assignment, MemberRecord
from diloco_shared.protocol.wire import encode as written
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Budget
from diloco_simulator.checkers import at_the_end, numbers, promises
from diloco_simulator.checkers.budget import BudgetUsed, Used
from diloco_simulator.checkers.claims import Claims
from diloco_simulator.checkers.ledger import Tokens
from diloco_simulator.checkers.limits import LeaderLimits
from diloco_simulator.checkers.numbers import CheckedNumbers, ruled, vanishes
from diloco_simulator.checkers.promises import (
    KnownMembers,
    KnownRefusals,
    LeaderLeases,
    Lost,
    Merges,
    Report,
)
from diloco_simulator.checkers.rates import Rates
from diloco_simulator.checkers.watch import End
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.inside.observer import Observer, Scene
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.tiny import spec_of
from diloco_syncer.history.replay import RestoredState
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.rounds import rounds


def test_a_lease_is_not_trusted_for_longer_than_it_lasts() -> None:
    told: list[str] = []
    leases = LeaderLeases(Report(lambda invariant, text: told.append(text)), 3.0)
    leases.held("a", 1.0, 4.0, 1.5)
    assert told == []
    leases.held("a", 1.0, 4.5, 1.5)
    assert len(told) == 1


def test_two_may_trust_the_lease_of_a_run_that_is_being_deleted() -> None:
    """Its key goes before those who work for it have heard."""
    told: list[str] = []
    leases = LeaderLeases(Report(lambda invariant, text: told.append(text)), 3.0)
    leases.held("a", 1.0, 4.0, 1.5)
    leases.deleting = True
    leases.held("b", 2.0, 5.0, 2.5)
    assert told == []
    leases.deleting = False
    leases.held("a", 3.0, 6.0, 3.5)
    assert len(told) == 1


def test_a_snapshot_of_a_round_that_is_not_closed_is_seen() -> None:
    told: list[str] = []
    report = Report(lambda invariant, text: told.append(invariant))
    limits = LeaderLimits(report, spec_of(Options.calm(), 1), learners=2)
    limits.covers("a", 3, 4)
    assert told == []
    limits.covers("a", 4, 4)
    assert told == ["I12"]


def test_after_directions_that_cancelled_merges_are_computed_again() -> None:
    """Of a leader's own arrays, once."""
    numbers = CheckedNumbers(Report(lambda invariant, text: None), spec_of(Options.calm(), 1))
    numbers.states.append([(np.full(2, np.nan), np.zeros(2)), (np.ones(2), np.zeros(2))])
    master_F, trace_F = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    numbers.installed(1, master_F, (trace_F,))
    assert numbers.resumed == 0, "it has computed that itself"
    numbers.installed(0, master_F, (trace_F,))
    assert numbers.resumed == 1
    assert [list(a) for a in numbers.state[0]] == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("rule", ["clipped", "trimmed", "median"])
@pytest.mark.parametrize("embedding", [False, True])
def test_what_a_robust_merge_gives_is_computed_apart(rule: str, embedding: bool) -> None:
    tensor = TensorSpec(name="t", shape=(9,), embedding=embedding)
    deltas = list(np.random.default_rng(4).standard_normal((5, 9)).astype(np.float32))
    deltas[0] *= 50
    weights = [9.0, 1.0, 1.0, 2.0, 1.0]
    sent = [Delta(w, "fp32", encode("fp32", d)) for w, d in zip(weights, deltas, strict=True)]
    merged = merge(sent, Layout.build([tensor], 1).fragments[0], rule)
    doubles = [d.astype(np.float64) for d in deltas]
    apart = ruled(rule, embedding, doubles, weights, 0.0)
    assert apart is not None
    np.testing.assert_allclose(merged, apart, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_a_clipped_merge_whose_directions_cancel_is_computed_apart(width: int) -> None:
    """Of one value, which an even split of signs makes cancel, and of more."""
    tensor = TensorSpec(name="t", shape=(width,), embedding=False)
    one = np.arange(1.0, 1.0 + width).astype(np.float32)
    deltas = [one * np.float32(times) for times in (1.0, 2.0, -2.0, -1e5)]
    sent = [Delta(1.0, "fp32", encode("fp32", d)) for d in deltas]
    merged = merge(sent, Layout.build([tensor], 1).fragments[0], "clipped")
    apart = ruled("clipped", False, [d.astype(np.float64) for d in deltas], [1.0] * 4, 0.0)
    assert apart is not None
    np.testing.assert_allclose(merged, apart, rtol=1e-5)
    np.testing.assert_allclose(apart, one * -0.25)


def test_a_clipped_merge_that_is_too_long_is_seen_though_it_cannot_be_computed() -> None:
    """Directions that cancel all but wholly are a matter of rounding; lengths are not."""
    told: list[str] = []
    report, plain = Report(lambda invariant, text: told.append(text)), spec_of(Options.calm(), 1)
    spec = spec_of(Options.calm(merge="clipped"), 1)
    piece = Layout.build([TensorSpec(name="t", shape=(2,), embedding=False)], 1).fragments[0]
    deltas = [np.array(d) for d in ([1.0, 0.0], [-2.0, 0.001], [1e5, 0.0], [-1.0, 0.0])]
    # By the momentum of 0.5, a merge moved the trace from (2, 2) by so much.
    for length, run, seen in ((1.4, spec, 0), (2.0, spec, 1), (2.0, plain, 0), (np.nan, spec, 1)):
        told.clear()
        numbers = CheckedNumbers(report, run)
        numbers.pieces = [list(piece)]
        unknown_F = np.full(2, np.nan)
        numbers.states.append([(unknown_F, np.full(2, 2.0))])
        numbers._bound(0, unknown_F, 0.5, deltas)
        numbers.installed(0, np.ones(2, np.float32), (np.array([1 + length, 1.0]),))
        assert len(told) == seen and numbers.resumed == 1


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed", "median"])
def test_a_merge_of_what_nobody_has_seen_is_not_known(rule: str) -> None:
    """Not even where it may have been left out as the largest of all."""
    spec = spec_of(Options.calm(merge=rule), 1)
    numbers = CheckedNumbers(Report(lambda invariant, text: None), spec)
    tensor = TensorSpec(name="t", shape=(2,), embedding=False)
    numbers.pieces = [list(Layout.build([tensor], 1).fragments[0])]
    deltas = [np.ones(2), np.array([np.nan, 1.0]), np.ones(2)]
    merged_F = numbers._merged(0, deltas, [np.zeros(2)] * 3, [1.0] * 3, 0.0)
    assert merged_F is not None and np.isnan(merged_F).all()


def test_an_anchor_of_a_history_that_is_lost_is_not_taken_for_one_of_this() -> None:
    """Both had a version by that number, and this one has not published its own yet: what a
    contribution is moved by is not known."""
    spec = spec_of(Options.calm(fragments=1), 1)
    numbers = CheckedNumbers(Report(lambda invariant, text: None), spec)
    one: dict[str, Any] = {"fragment": 0, "outcome": "skipped", "verdicts": ()}
    merged = TapeRound.model_construct(**one | {"outcome": "committed"}, version=1)

    def anew(epoch: int, kept: int) -> None:
        """The tape loses what is behind `kept`."""
        numbers.lost(kept)
        numbers.record(TapeEpoch(epoch=epoch, term=epoch, reason="lost", at=0.0))

    numbers.record(merged)
    numbers.anchors[0, 0, 1], numbers.anchors[0, 0, 2] = np.array([1.0]), np.array([2.0])
    anew(5, 1)
    assert numbers._anchor(0, 1) == 1.0, "it is of both"
    numbers.record(merged.model_copy(update={"version": 2}))
    assert numbers._anchor(0, 2) is None
    numbers.anchors[5, 0, 2] = np.array([3.0])
    assert numbers._anchor(0, 2) == 3.0
    anew(9, 1)
    assert numbers._anchor(0, 1) == 1.0
    numbers.record(merged.model_copy(update={"version": 2}))
    assert numbers._anchor(0, 2) is None
    numbers.record(TapeRebirth.model_construct(epoch=11, versions=(1,), anchor_digests=("",)))
    assert numbers._anchor(0, 1) == 1.0 and numbers._anchor(0, 2) is None


def test_a_run_that_lost_records_begins_again_from_what_was_made_and_from_nothing_else() -> None:
    """Also from what the lost ones had made: it is published."""
    told: list[str] = []
    spec = spec_of(Options.calm(fragments=1), 1)
    merges = Merges(Report(lambda invariant, text: told.append(f"{invariant} {text}")), spec)
    one: dict[str, Any] = {"epoch": 0, "round": 0, "fragment": 0, "outcome": "committed"}
    made = TapeRound.model_construct(**one, version=1, anchor_digest="one", verdicts=())
    merges.lost.record(made, 0, 1)

    def begins_again(epoch: int, version: int, digest: str) -> list[str]:
        told.clear()
        anchors: dict[str, Any] = {"versions": (version,), "anchor_digests": (digest,)}
        merges.record(TapeRebirth.model_construct(epoch=epoch, term=epoch, **anchors))
        return told

    merges.record(TapeInit.model_construct(anchor_digests=("zero",)))
    assert begins_again(1, 0, "zero") == [] and begins_again(2, 1, "one") == []
    (said,) = begins_again(3, 1, "another")
    assert said.startswith("I1 the run begins again from version 1 of fragment 0")


def test_what_lost_records_had_made_may_be_published() -> None:
    anchors: dict[str, Any] = {"anchor_digests": ("a", "b")}
    back, lost = {"versions": (4, 7), "serial": 1, **anchors}, Lost()
    lost.record(TapeInit.model_construct(**anchors), 0, 0)
    assert lost.made == {(0, 0, "a"), (1, 0, "b")}
    for record in (TapeRebirth.model_construct(**back), TapeRestore.model_construct(**back)):
        lost = Lost()
        lost.record(record, 0, 0)
        assert lost.made == {(0, 4, "a"), (1, 7, "b")}


def test_a_snapshot_whose_record_is_lost_excuses_what_it_covers_and_is_still_there() -> None:
    lost = Lost()
    for covers, end, excused in ((7, 9, 7), (5, 9, 7), (20, 12, 12)):
        lost.record(TapeSnapshot.model_construct(covers=covers), 0, end)
        assert lost.covers == excused


def test_a_promise_counts_as_looked_at_where_a_record_has_something_to_judge() -> None:
    report = Report(lambda invariant, text: None)
    merges = Merges(report, spec_of(Options.calm(fragments=1), 1))
    merges.record(TapeSetting(term=0, name="quorum", value=1, reason="asked", at=0.0))
    assert report.looks == {}
    merges.record(TapeTerm(epoch=0, term=1, leader="s", at=0.0))
    assert report.looks == {"I7": 1}
    merges.record(TapeEnd.model_construct(outcome="finished", counts=()))
    assert report.looks == {"I7": 1}
    merges.record(TapeEpoch(epoch=1, term=2, reason="lost", at=0.0))
    assert report.looks == {"I1": 1, "I6": 1, "I7": 1}


def test_a_tape_is_executed_on_from_a_restore_whose_checkpoint_was_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From what a leader was seen to go back to; a replay changes nothing of that."""
    told: list[str] = []
    spec = spec_of(Options.calm(fragments=1), 1)
    checked = CheckedNumbers(Report(lambda invariant, text: told.append(text)), spec)
    layout = Layout.build([TensorSpec(name="t", shape=(2,), embedding=False)], 1)
    values_F = np.ones(2, np.float32)
    store = FragmentStore.init(layout, spec.algorithm, [values_F])
    manifest: Any = None
    state = RestoredState(manifest, "older", {"seq": 3}, store)
    met: list[tuple[str, Any]] = []

    def removed(of: object, shard: int, record: TapeRestore, *rest: object) -> RestoredState:
        if record.digest == "newer":
            return state
        raise CheckpointError("it is not there")

    def replayed(history: object, store: object, record: Any, n: int, p: object, back: Any) -> None:
        met.append((record.digest, back))

    monkeypatch.setattr(numbers, "load_recorded", removed)
    monkeypatch.setattr(numbers, "replay", replayed)
    tape = [TapeRestore.model_construct(source="c/1", digest=d) for d in ("older", "newer")]

    def execute() -> tuple[bool, list[str]]:
        met.clear()
        whole = checked.execute(spec, tape, lambda *_: None, "nowhere")
        return whole, [digest for digest, _ in met]

    assert execute() == (False, [])
    checked.goes_back(state)
    for _ in range(2):
        assert execute() == (True, ["older", "newer"])
        goes_on_from = met[0][1]
        assert goes_on_from.history == {"seq": 3}
        assert goes_on_from.store.anchor_digest(0) == store.anchor_digest(0)
        assert goes_on_from.store.fragments is not store.fragments
        goes_on_from.store.fragments.clear()
        goes_on_from.history.clear()
    assert told == []


def test_tokens_of_a_version_that_is_gone_are_merged_no_more() -> None:
    """Also where a round was skipped since: it stands at the version before it."""
    report = Report(lambda invariant, text: None)
    spec = spec_of(Options.calm(fragments=1), 1)
    tokens = Tokens(report, spec, Claims(report, lambda p: Merges(report, spec)))
    merged = Verdict.model_construct(
        learner="a", incarnation=0, outcome="merged", tokens_from=0, tokens_to=70
    )
    one: dict[str, Any] = {"fragment": 0, "version": 1}
    tokens.record(TapeRound.model_construct(**one, outcome="committed", verdicts=(merged,)))
    assert tokens.fates[-1].merged(0) == 70
    tokens.record(TapeRound.model_construct(**one, outcome="skipped", verdicts=()))
    tokens.record(TapeRebirth.model_construct(epoch=1, versions=(0,)))
    assert tokens.fates[-1].merged(0) == 0


def test_a_learner_that_waits_for_data_has_adopted_all_and_done_nothing() -> None:
    """It says so before its first turn. Whoever has done something is believed by what it did."""
    told: list[str] = []
    report = Report(lambda invariant, text: told.append(text))
    claims = Claims(report, lambda p: Merges(report, spec_of(Options.calm(), 1)))
    said: dict[str, Any] = {"learner": "a", "incarnation": 7, "steps_skipped": 0}
    waits = {**said, "step": 0, "tokens": 0, "adopted": (3,)}
    nothing = {"adopted_at": (0,), "c_steps": (0,), "c_tokens": (0,)}
    claims.told(Progress.model_construct(**waits, **nothing))
    assert not told
    claims.told(Progress.model_construct(**waits, **nothing | {"c_steps": (5,)}))
    assert "5 steps since it adopted" in told.pop()
    done = {**said, "step": 1, "tokens": 8, "adopted": (3,)}
    claims.told(Progress.model_construct(**done, **nothing))
    assert "it did 0 steps" in told[0]


def test_a_first_round_that_waits_for_room_on_the_tape_was_made_before_the_hub_has_it() -> None:
    told: list[str] = []
    report = Report(lambda invariant, text: told.append(text))
    spec = spec_of(Options.calm(fragments=1), 1)
    spec = spec.model_copy(update={"budget": Budget(seconds=100.0)})
    tokens = Tokens(report, spec, Claims(report, lambda p: Merges(report, spec)))
    used = BudgetUsed(report, spec, tokens)

    def closes(n: int, made_at: float, share: float, now: float) -> None:
        stamp = Stamp(round=n, steps=(n + 1) * used.each, fraction=share, fraction_per_step=0.0)
        record = TapeRound.model_construct(
            round=n, at=made_at, stamp=stamp, outcome="skipped", outer_fraction=0.0
        )
        used.record(record, None, now)

    used.record(TapeTerm(epoch=0, term=1, leader="s", at=5.0), None, 5.0)
    used.record(TapeSetting(term=1, name="quorum", value=1, reason="", at=9.0), None, 29.0)
    closes(0, 10.0, 0.0, 30.0)
    closes(1, 35.0, 0.25, 36.0)
    assert not told
    closes(2, 36.0, 0.5, 37.0)
    assert told == ["round 2: 0.500000 is used, it is 0.260000 to 0.270000"]


def test_a_round_may_count_to_any_quorum_since_it_was_opened() -> None:
    """Its record follows its merge; K may change twice meanwhile. Later rounds may not."""
    told: list[str] = []
    spec = spec_of(Options.calm(quorum=1, fragments=1, overlap_steps=1), 1)
    merges = Merges(Report(lambda invariant, text: told.append(text)), spec)
    assert merges.in_flight == 1
    for quorum in (3, 2):
        merges.record(TapeSetting(term=0, name="quorum", value=quorum, reason="asked", at=0.0))
    skipped: dict[str, Any] = {"epoch": 0, "term": 0, "outcome": "skipped", "verdicts": ()}
    rounds = {"fragment": 0, "version": -1, **skipped}
    merges.record(TapeRound.model_construct(round=0, quorum=1, **rounds))
    assert told == []
    merges.record(TapeRound.model_construct(round=1, quorum=2, **rounds))
    assert told == []
    merges.record(TapeRound.model_construct(round=2, quorum=1, **rounds))
    assert told == ["round 2 counts to 1, K is 2"]


def test_a_delta_of_which_rounding_alone_is_left_has_no_direction() -> None:
    """Of one that was moved to a newer head; a learner that has learned nothing sends zeros."""
    moved, rounding = np.array([3.0, -4.0]), np.array([1e-7, -2e-7])
    assert vanishes(np.zeros(2), moved) and vanishes(rounding, moved)
    assert not vanishes(np.array([0.01, 0.0]), moved)
    assert not vanishes(np.zeros(2), np.zeros(2))


def test_what_the_gate_lets_pass_and_cannot_be_merged_is_seen_though_no_leader_ends() -> None:
    told: list[str] = []
    refusals = KnownRefusals(Report(lambda invariant, text: told.append(text)))

    def closes(reason: str, *verdicts: Verdict) -> None:
        one: dict[str, Any] = {"round": 1, "reason": reason, "verdicts": verdicts}
        refusals.round(TapeRound.model_construct(**one))

    closes("2 contributions, the policy wants 3")
    assert told == []
    why = f"{rounds.UNMERGEABLE}: base -1 where the head is 0"
    closes("", Verdict(learner="a", incarnation=0, outcome="refused", reason=why))
    assert told == [f"the gate let a into round 1: {why}"]
    closes(f"{rounds.UNMERGED}: who knows")
    assert told[1:] == [f"round 1 was not merged: {rounds.UNMERGED}: who knows"]
    assert promises.UNMERGED == rounds.UNMERGED, "the checkers know it apart from the product"


def test_an_older_life_is_not_merged_after_a_newer_one_of_that_fragment() -> None:
    """Of another fragment it may be: its round waited for the one before."""
    found: list[str] = []
    spec: Any = SimpleNamespace(membership=SimpleNamespace(lease_s=5.0))

    class Told:
        def looked(self, _: str) -> None: ...

        def __call__(self, promise: str, text: str) -> None:
            found.append(text)

    told: Any = Told()
    members = KnownMembers(told, spec)

    def closes(number: int, fragment: int, life: int) -> None:
        verdict = SimpleNamespace(outcome="merged", learner="a", incarnation=life)
        record: Any = SimpleNamespace(round=number, fragment=fragment, verdicts=(verdict,))
        members.round(record, 1.0, faulty=True)

    closes(0, 0, 3)
    closes(1, 2, 2)
    assert found == []
    closes(2, 0, 2)
    assert found == ["round 2 merges a 2 after 3"]


@pytest.mark.parametrize(
    ("wishes", "lost", "blamed"),
    [
        ([2, 2], [set(), set()], False),
        ([2, 1], [set(), set()], True),
        ([2, 1], [set(), {2}], False),  # it may have been over before it could go back once more
        ([2, 1], [{2}, set()], True),
        ([3, 1], [set(), {2}], True),  # that record was another one's
        ([3, 1, 2], [set(), {3}, set()], True),
    ],
)
def test_a_shard_that_lost_the_record_of_a_restore_is_excused_from_that_one_alone(
    wishes: list[int], lost: list[set[int]], blamed: bool
) -> None:
    told: list[str] = []
    shards = [
        SimpleNamespace(
            shard=shard, wish=n, merges=SimpleNamespace(lost=SimpleNamespace(restores=gone))
        )
        for shard, (n, gone) in enumerate(zip(wishes, lost, strict=True))
    ]
    watch: Any = SimpleNamespace(
        of=shards,
        ended="finished",
        ends={"a": SimpleNamespace(outcome="finished")},
        report=Report(lambda invariant, text: None),
        broken=lambda invariant, text: told.append(text),
    )
    at_the_end._went_back_alike(watch, ())
    assert bool(told) == blamed
    told.clear()
    at_the_end._went_back_alike(watch, [(1, max(wishes))])
    assert bool(told) == blamed, "it finished, and so it did not have to end"
    told.clear()
    watch.ended = watch.ends["a"].outcome = "stopped"
    at_the_end._went_back_alike(watch, [(1, max(wishes))])
    assert bool(told) == (blamed and len(wishes) > 2), "the third shard has said nothing"


@pytest.mark.parametrize(("since_s", "merged_at", "looks"), [(1.0, -1.0, 0), (100.0, 150.0, 1)])
def test_who_had_no_time_to_be_merged_again_is_not_judged(
    since_s: float, merged_at: float, looks: int
) -> None:
    """And what is not judged is no check that was made."""
    life = SimpleNamespace(silent_since=np.inf, able_at=0.0, drained=False, step_s=1.0)
    members = SimpleNamespace(lives={("a", 0): life}, merged_at={"a": merged_at})
    report = Report(lambda invariant, text: pytest.fail(text))
    of = SimpleNamespace(members=members, committed_at=100.0 + since_s, report=report)
    watch: Any = SimpleNamespace(of=[of], healed_at=100.0, report=report)
    at_the_end._merged_again(watch)
    assert report.looks["I10"] == looks


def stamped(round_: int, fraction: float) -> Stamp:
    return Stamp(round=round_, steps=8 * round_, fraction=fraction, fraction_per_step=0.01)


@pytest.mark.parametrize("finishing", [6, -1])
def test_a_stop_that_comes_while_the_end_is_on_its_way_changes_nothing(finishing: int) -> None:
    """The budget is used, and the last round closed; else the user cut the run short."""
    told: list[str] = []
    spec, tokens = spec_of(Options.calm(), 1), cast(Any, None)
    used = BudgetUsed(Report(lambda invariant, text: told.append(text)), spec, tokens)
    used.owned = 1
    used.states = [Used(next_round=7, finishing=finishing)]
    stop = TapeSetting(term=1, name="stopping", value=1, reason="asked", at=1.0)
    used.record(stop, None, 1.0)
    end: Any = {"term": 1, "outcome": "finished", "reason": "", "versions": (7,), "at": 2.0}
    used.record(TapeEnd.model_validate({**end, "counts": ()}), None, 2.0)
    cut = ["the run ends before round 7, not before round 8"]
    assert told == ([] if finishing >= 0 else cut)


def test_who_has_heard_of_a_round_that_was_lost_may_go_by_it() -> None:
    """A hub that lost its record has the rounds before it closed once more, with more tokens; and
    whoever knows how far the run was does not go back for that."""
    told: list[str] = []
    drawn = spec_of(Options.calm(fragments=4, budget="tokens"), 1)
    inner = drawn.inner.model_copy(update={"warmup_steps": 0})
    spec = drawn.model_copy(update={"inner": inner})
    rates = Rates(Report(lambda invariant, text: told.append(invariant)), spec)
    rates.begins("a", 0, stamped(1, 0.1))
    rates.told("a", 0, stamped(3, 0.3))
    rates.told("a", 0, stamped(2, 0.7))
    rates.adopted("a", 0, stamped(2, 0.7))

    def judged(fraction: float) -> bool:
        peak = inner.learning_rate * spec.algorithm.inner_rate_factor
        told.clear()
        rates.steps("a", inner_rate(inner, peak, 0.0, fraction))
        return told == ["rates"]

    assert judged(0.1) and not judged(0.3) and not judged(0.7)
    assert rates.report.looks == {"rates": 3}


def test_in_an_epoch_that_replaces_a_lost_history_less_of_the_budget_may_be_used() -> None:
    """By as many steps: of several shards none tells it apart by these."""
    told: list[str] = []
    spec = spec_of(Options.calm(fragments=4, budget="tokens", shards=2), 1)
    inner = spec.inner.model_copy(update={"warmup_steps": 0})
    spec = spec.model_copy(update={"inner": inner})
    rates = Rates(Report(lambda invariant, text: told.append(invariant)), spec)
    rates.begins("a", 0, stamped(1, 1.0))
    rates.enters("a", 9, stamped(1, 0.2))
    rates.told("a", 9, stamped(2, 0.1))
    peak = inner.learning_rate * spec.algorithm.inner_rate_factor
    rates.steps("a", inner_rate(inner, peak, 0.0, 0.15))
    assert not told


def test_who_was_heard_of_long_ago_is_told_apart_from_who_never_was() -> None:
    members = KnownMembers(Report(lambda invariant, text: None), spec_of(Options.calm(), 1))
    members.heard(1, "a", 0, 10.0)
    members.heard(2, "a", 0, 20.0)
    members.heard(2, "b", 0, 10.0)
    assert members.heard_within("a", 5.0, 25.0) and not members.heard_within("a", 5.0, 26.0)
    assert not members.heard_within("b", 5.0, 25.0) and members.heard_within("c", 5.0, 25.0)


def test_who_left_is_judged_by_what_the_product_did_to_it() -> None:
    """Whoever stayed to the end, or was dismissed then: over the last evaluation nobody is."""
    told: list[str] = []
    report = Report(lambda invariant, text: None)
    of = SimpleNamespace(ended_at=10.0, merges=SimpleNamespace(versions=[3]))

    def looked(last_told: bool, *, forced: bool = False, **left: Any) -> int:
        watch: Any = SimpleNamespace(
            of=[of],
            stops=SimpleNamespace(by_force=forced),
            ended="finished",
            healed_at=5.0,
            report=report,
            ends={"a": End(**({"outcome": "finished", "adopted": (3,), "at": 20.0} | left))},
            broken=lambda invariant, text: told.append(text),
        )
        told.clear()
        before = report.looks["liveness"]
        at_the_end._evaluated(watch, told=last_told)
        return report.looks["liveness"] - before

    assert looked(True) == 1 and not told
    assert looked(False) == 1 and "no last evaluation was told" in told[0]
    assert looked(False, outcome="withdrawn") == 0, "it was told to stop"
    dismissed: dict[str, Any] = {"outcome": "withdrawn", "dismissed": True}
    assert looked(False, **dismissed) == 1 and "no last evaluation was told" in told[0]
    assert looked(True, **dismissed) == 1 and not told
    assert looked(True, **dismissed, evaluates=True) == 1 and "is dismissed over" in told[0]
    assert looked(False, forced=True, **dismissed, evaluates=True) == 0 and not told
    assert looked(True, **dismissed, evaluates=True, at=10.0 + LAST_EVALUATION_S) == 1 and not told


def test_whoever_was_to_leave_before_the_end_or_drains_is_not_dismissed_by_it() -> None:
    loop: Any = SimpleNamespace(now=0.0)
    spec = spec_of(Options.calm(), 1)
    seen = Observer(Scene(loop, Options.calm()), spec, MemoryBroker(), numbers=False)

    def key(bucket: str, payload: bytes) -> None:
        seen.stored(f"KV_{bucket}", Stored(f"$KV.{bucket}.a", payload, {}, 1))

    def assigned(run: str) -> bool:
        key("assignments", written(Assignment(member="a", run=run, at=0.0)))
        return seen.watch.taken_back.get("a") is False

    def noted(*, drained: bool) -> None:
        record = MemberRecord(
            id="a", role="learner", boot="b", host="h", pid=1, lock="l", started_at=0.0
        )
        key("notes", MemberNote(record=record, drained=drained).model_dump_json().encode())

    assert not assigned(spec.name) and assigned("") and not assigned(spec.name)
    assert seen.watch.taken_back == {"a": True}, "its life may hear of both much later"
    seen.watch.taken_back.clear()  # another life begins
    for of in seen.watch.of:
        of.ended = "stopped"
    assert not assigned(""), "the run is over"
    assert not assigned(spec.name)
    noted(drained=True)
    assert assigned("") and assigned(spec.name), "it was given the run again too late"
    assert seen.watch.taken_back == {"a": False}
    noted(drained=False)
    key("notes", b"")
    assert seen.draining == set()
