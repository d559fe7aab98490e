"""The durable state: a function of the records, through JSON and back, in one order only."""

import json
from typing import Any

import pytest

from diloco_shared.protocol.chunks import describe
from diloco_shared.protocol.messages import (
    LifeCount,
    PublicationManifest,
    Stamp,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRound,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
    TensorSpec,
    Verdict,
)
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.history.replay import Rewound, newest_keyframes, newest_published, rewound


def spec(**budget: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "t",
            "algorithm": {"fragments": 2, "sync_every_steps": 8},
            "budget": budget or {"steps": 80},
        }
    )


def init(**changed: Any) -> TapeInit:
    fields: dict[str, Any] = {
        "run": "t",
        "config_hash": config_hash(spec()),
        "layout": (
            TensorSpec(name="a", shape=(8,), embedding=False),
            TensorSpec(name="b", shape=(6,), embedding=True),
        ),
        "anchor_digests": ("0" * 32, "1" * 32),
        "subjects": ("x", "y"),
        "learner": "a",
        "incarnation": 0,
        "at": 2.0,
    }
    return TapeInit(**{**fields, **changed})


def term(number: int, epoch: int = 0) -> TapeTerm:
    return TapeTerm(epoch=epoch, term=number, leader=f"s{number}", at=1.0)


def verdict(learner: str, n: int, **changed: Any) -> Verdict:
    fields: dict[str, Any] = {
        "learner": learner,
        "incarnation": 0,
        "outcome": "merged",
        "reason": "",
        "step_from": 4 * n,
        "step_to": 4 * n + 4,
        "tokens_from": 100 * n,
        "tokens_to": 100 * n + 100,
        "weight": 1.0,
        "norm": 3.0,
    }
    return Verdict(**{**fields, **changed})


def round_(n: int, **changed: Any) -> TapeRound:
    steps = 4 * (n + 1)
    fields: dict[str, Any] = {
        "epoch": 0,
        "term": 1,
        "round": n,
        "fragment": n % 2,
        "outcome": "committed",
        "reason": "",
        "quorum_reason": "",
        "quorum": 1,
        "version": n // 2 + 1,
        "verdicts": (verdict("a", n), verdict("b", n)),
        "keyframe": False,
        "anchor_digest": f"{n:032x}",
        "master_digest": "",
        "payload_digest": "",
        "stamp": Stamp(round=n, steps=steps, fraction=steps / 80, fraction_per_step=1 / 80),
        "quorum_s": 0.0,
        "grace_s": 0.0,
        "sync_s": 0.0,
        "at": 10.0 + n,
    }
    return TapeRound(**{**fields, **changed})


def of(*records: TapeRecord, run: RunSpec | None = None) -> History:
    history = History(run or spec())
    for seq, record in enumerate(records, 1):
        history.apply(record, seq)
    return history


def setting(name: str, value: int) -> TapeSetting:
    return TapeSetting(term=1, name=name, value=value, reason="asked", at=1.0)  # type: ignore[arg-type]


EVENTFUL: tuple[TapeRecord, ...] = (
    term(1),
    init(),
    round_(0),
    setting("quorum", 2),
    round_(
        1,
        verdicts=(
            verdict("a", 1),
            verdict("b", 1, outcome="refused", reason="stale: too old", norm=0.5),
            verdict("c", 1, outcome="missed", step_to=4, norm=0.0),
        ),
    ),
    TapeSnapshot(term=1, covers=5, round=1, path="here", at=1.0),
    round_(2, outcome="skipped", version=1, verdicts=(), anchor_digest=""),
    TapeEpoch(epoch=1, term=1, reason="restored from a backup", at=1.0),
    term(2, epoch=1),
    setting("paused", 1),
)


def test_what_the_records_say_is_what_is_known() -> None:
    h = of(*EVENTFUL)
    assert (h.seq, h.epoch, h.term, h.leader) == (len(EVENTFUL), 1, 2, "s2")
    assert (h.versions, h.next_round) == ([1, 1], 3)
    assert (h.committed, h.skipped, h.skips_in_a_row, h.merged_total) == (2, 1, 1, 3)
    assert h.anchor_digests == [f"{0:032x}", f"{1:032x}"]
    assert dict(h.refused) == {"stale": 1}
    assert h.participating == ("a", "b")
    assert h.ledger.merged_P == [200, 100]
    assert (h.quorum, h.paused, h.snapshot_covers) == (2, True, 5)
    # A new epoch voids what is not merged; what is, learners of the old one are still to hear.
    assert h.last_merged == [{"a": (0, 0, -1), "b": (0, 0, -1)}, {"a": (0, 1, -1)}]
    # Norms are per root step and per step, refused ones included.
    assert list(h.norms.per_root_step.seen[1]) == [1.5, 0.25]
    assert list(h.norms.per_step.seen[1]) == [0.75, 0.125]


def test_norms_count_as_a_whole_too_where_learners_keep_a_share_of_their_own() -> None:
    kept = spec().algorithm.model_copy(update={"alpha": 0.5})
    mixing = spec().model_copy(update={"algorithm": kept})
    h, begun = History(mixing), {"config_hash": config_hash(mixing)}
    for seq, record in enumerate(EVENTFUL, 1):
        told = record.model_copy(update=begun) if isinstance(record, TapeInit) else record
        h.apply(told, seq)
    assert h.norms.whole is not None and list(h.norms.whole.seen[1]) == [3.0, 0.5]
    assert h.meta() == History.restore(mixing, h.meta()).meta()
    assert of(*EVENTFUL).norms.whole is None


NEW = ("began", "epochs_before", "norms_per_step")


def test_a_state_of_an_older_version_lacks_what_was_not_kept_then() -> None:
    h = of(*EVENTFUL)
    meta = {key: value for key, value in h.meta().items() if key not in NEW}
    older = History.restore(spec(), meta)
    assert older.began_P == [0, 0] and older.norms.per_step.seen == {}
    assert (h.epochs_before, older.epochs_before) == ([0], [])
    assert older.meta() == meta, "it is written as it was"


def test_who_was_merged_longer_ago_than_a_cycle_does_not_take_part() -> None:
    """Rounds that merged nobody count as well: H is 8."""
    nobody = {"outcome": "skipped", "version": 1, "verdicts": (), "anchor_digest": ""}
    first = (term(1), init(), round_(0, verdicts=(verdict("a", 0),)))
    second = round_(1, verdicts=(verdict("b", 1),))
    skipped = [round_(n, **nobody) for n in range(2, 9)]
    assert of(*first, second, *skipped[:-1]).participating == ("a", "b")
    assert of(*first, second, *skipped).participating == ("b",)


def test_the_two_newest_rounds_that_merged_a_learner_are_known() -> None:
    """For whoever missed the publication of the earlier one; another incarnation gave neither."""
    records = (term(1), init(), *(round_(n) for n in range(5)))
    assert of(*records).last_merged[0]["a"] == (0, 4, 2)
    again = round_(6, verdicts=(verdict("a", 6, incarnation=1),))
    found = of(*records, round_(5), again)
    assert found.last_merged[0] == {"a": (1, 6, -1), "b": (0, 4, 2)}


def test_a_publication_above_the_head_counts_whatever_it_holds() -> None:
    """Its record is lost; another version of that number would be a second one."""
    h = of(*EVENTFUL)

    def published(
        fragment: int, version: int, digest: str, epoch: int = 1, before: int = -1
    ) -> PublicationManifest:
        return PublicationManifest(
            run="t",
            epoch=epoch,
            term=1,
            round=version,
            fragment=fragment,
            version=version,
            prev_version=before,
            codec="fp32",
            values=1,
            anchor_digest=digest,
            config_hash=h.config_hash,
            participants=(),
            last_merged={},
            stamp=h.stamp,
            blob=describe("dn", b"1234"),
        )

    assert newest_published(h, []) == (-1, -1)
    ours, theirs = h.anchor_digests[0], "f" * 32
    assert newest_published(h, [published(0, 1, ours), published(1, 1, theirs)]) == (1, -1)
    assert newest_published(h, [published(0, 1, ours), published(0, 2, theirs)]) == (2, -1)
    assert newest_published(h, [published(0, 2, theirs, epoch=0)]) == (-1, -1)
    whole, delta = (
        published(0, 0, ours),
        published(0, 1, ours).model_copy(update={"prev_version": 0}),
    )
    assert newest_keyframes(h, [whole, delta]) == (0, -1)
    assert newest_keyframes(h, [published(1, 99, theirs), published(0, 0, ours, epoch=9)]) == (
        -1,
        -1,
    )
    at_the_head = published(0, h.versions[0], ours)
    assert newest_keyframes(h, [whole, at_the_head]) == (h.versions[0], -1)
    # Of what had been published, all or not all is there.
    assert rewound(h, (h.versions[0], -1), [whole, at_the_head]) is None
    assert rewound(h, (h.versions[0] + 1, -1), [at_the_head]) == Rewound(
        (h.versions[0], -1), (h.versions[0], -1)
    )
    head = published(0, 1, ours, before=0)
    assert newest_published(h, [head]) == (-1, -1), "what it builds on is lost"
    assert newest_published(h, [head, published(0, 0, theirs)]) == (1, -1)


@pytest.mark.parametrize("known", range(len(EVENTFUL) + 1))
def test_a_snapshot_at_any_place_goes_on_alike(known: int) -> None:
    h = of(*EVENTFUL[:known])
    again = History.restore(spec(), json.loads(json.dumps(h.meta(), allow_nan=False)))
    assert again.meta() == h.meta()
    for seq, record in enumerate(EVENTFUL[known:], known + 1):
        again.apply(record, seq)
    assert again.meta() == of(*EVENTFUL).meta()
    assert again.layout == of(*EVENTFUL).layout
    assert (again.quorum, again.paused) == (2, True), "not what the specification says"


def test_a_snapshot_of_another_configuration_is_refused() -> None:
    other = RunSpec.model_validate({**spec().model_dump(), "seed": 5})
    with pytest.raises(TapeFault, match="another configuration"):
        History.restore(other, of(*EVENTFUL).meta())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (init(), "second init"),
        (term(1), "term 1 after 1"),
        (round_(3), "round 3 where 2 was due"),
        (round_(1), "round 1 where 2 was due"),
        (round_(2, version=3), "version 3 of 0 after 1"),
        (round_(2, version=1), "version 1 of 0 after 1"),
        (round_(2, outcome="skipped"), "version 2 of 0 after 1"),
        (round_(2, fragment=2), "fragment 2"),
        (round_(2, epoch=1), "round 2 of epoch 1, term 1 in epoch 0, term 1"),
        (round_(2, term=0), "round 2 of epoch 0, term 0 in epoch 0, term 1"),
        (TapeEpoch(epoch=0, term=1, reason="", at=1.0), "epoch 0 after 0"),
    ],
)
def test_a_record_that_cannot_follow_is_refused_and_changes_nothing(
    record: TapeRecord, words: str
) -> None:
    h = of(term(1), init(), round_(0), round_(1))
    before = h.meta()
    with pytest.raises(TapeFault, match=words):
        h.apply(record, 5)
    assert h.meta() == before


def test_sequences_only_grow() -> None:
    h = of(term(1), init())
    with pytest.raises(TapeFault, match="record 2 after 2"):
        h.apply(round_(0), 2)
    # Gaps are fine: records of other kinds may be compacted away.
    h.apply(round_(0), 7)
    assert h.seq == 7


def test_parameters_of_another_configuration_are_refused() -> None:
    with pytest.raises(TapeFault, match="configuration is not this run's"):
        of(term(1), init(config_hash="f" * 32))


def test_a_round_before_any_parameters_is_refused() -> None:
    with pytest.raises(TapeFault, match="fragment 0"):
        of(term(1), round_(0, version=0))


def test_nothing_follows_the_end() -> None:
    end = TapeEnd(term=1, outcome="finished", reason="", versions=(0, 0), at=1.0)
    h = of(term(1), init(), end)
    with pytest.raises(TapeFault, match="follows the end"):
        h.apply(setting("paused", 1), 4)


def test_the_budget_leaves_one_last_round_of_every_fragment() -> None:
    h = of(term(1), init(), round_(0))
    full = Stamp(round=1, steps=8, fraction=1.0, fraction_per_step=0.1)
    h.apply(round_(1, stamp=full), 4)
    assert h.finishing_from == 2 and not h.finished_rounds
    h.apply(round_(2, stamp=full), 5)
    assert not h.finished_rounds
    h.apply(round_(3, stamp=full), 6)
    assert h.finished_rounds


def test_stopping_ends_likewise() -> None:
    h = of(term(1), init(), round_(0), setting("stopping", 1))
    assert h.stopping and h.finishing_from == 1


def test_progress_by_steps_is_exact() -> None:
    h = of(term(1), init(), run=spec(steps=80))
    assert h.stamp_after(9, 0.0) == Stamp(round=9, steps=40, fraction=0.5, fraction_per_step=1 / 80)
    assert h.stamp_after(19, 0.0).fraction == 1.0
    assert h.stamp_after(99, 0.0).fraction == 1.0


@pytest.mark.parametrize("skew_s", [-7200.0, 0.0, 7200.0])
@pytest.mark.parametrize("begins", [TapeTerm, TapeRebirth])
def test_only_what_passes_within_a_term_counts_as_time(skew_s: float, begins: type) -> None:
    """The next leader's clock may be hours off the one of the leader that recorded a round."""
    of_term = {"fraction": 0.1, "fraction_per_step": 0.1}
    h = of(
        term(1),
        init(),
        round_(0, stamp=Stamp(round=0, steps=4, fraction=0.0, fraction_per_step=0.0)),
        round_(1, at=20.0, stamp=Stamp(round=1, steps=8, **of_term)),
        setting("paused", 1).model_copy(update={"at": 40.0}),  # the last that term 1 recorded
        run=spec(seconds=100.0),
    )
    there = 50.0 + skew_s
    again = {"versions": (1, 1), "anchor_digests": ("a" * 32, "b" * 32), "reason": "lost"}
    rebirth = TapeRebirth(epoch=1, term=2, leader="s2", at=0.0, **again)
    second = rebirth if begins is TapeRebirth else term(2)
    h.apply(second.model_copy(update={"at": there}), 6)
    assert h.stamp_after(2, there).fraction == pytest.approx(0.3)
    h = History.restore(spec(seconds=100.0), json.loads(json.dumps(h.meta())))
    assert h.stamp_after(2, there + 20.0).fraction == pytest.approx(0.5)


def test_the_time_that_an_older_leader_has_recorded_as_used_is_used() -> None:
    """It subtracted one machine's clock from another's; its snapshot may not know its tail."""
    used = Stamp(round=0, steps=4, fraction=0.6, fraction_per_step=0.1)
    h = of(term(1), init(), round_(0, stamp=used), run=spec(seconds=100.0))
    h.tail = None
    h.apply(term(2).model_copy(update={"at": 5000.0}), 4)
    assert h.stamp_after(1, 5010.0).fraction == pytest.approx(0.7)


def test_the_days_until_a_hub_is_put_back_are_not_counted_as_time() -> None:
    run = spec(seconds=100.0)
    h = of(term(1), init(), round_(0), round_(1, at=20.0), run=run)
    back = TapeEpoch(epoch=7, term=900, reason="restored from a backup", at=1e6)
    h.apply(back, 5)
    h.apply(term(901, epoch=7).model_copy(update={"at": 1e6 + 60.0}), 6)
    assert h.stamp_after(2, 1e6 + 60.0).fraction == pytest.approx(0.1)


def test_a_term_before_the_first_round_uses_no_time() -> None:
    h = of(term(1), init(), term(2), run=spec(seconds=100.0))
    assert h.first_round_at == 0.0
    h.apply(round_(0, term=2), 4)
    assert h.first_round_at == 10.0


def test_progress_by_tokens_and_seconds_never_falls() -> None:
    h = of(term(1), init(), round_(0), run=spec(tokens=1000))
    h.ledger.saw(LifeCount(learner="a", incarnation=0, tokens=400))
    assert h.stamp_after(1, 0.0) == Stamp(round=1, steps=8, fraction=0.5, fraction_per_step=0.5 / 8)
    h = of(term(1), init(), round_(0), run=spec(seconds=100.0))
    assert h.first_round_at == 10.0
    assert h.stamp_after(1, 60.0).fraction == 0.5
    # The clock was set back: progress was not.
    assert h.stamp_after(1, 0.0).fraction == h.stamp.fraction
    assert h.stamp_after(1, 1e6).fraction == 1.0
