"""Recovery: every way from a new incarnation to its first step, or out."""

from typing import Any, TypeVar

import pytest

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Begin,
    CheckpointLoaded,
    GrantSeen,
    InitMoved,
    Leave,
    LoadState,
    RecoveryEffect,
    RecoveryEvent,
    SendInit,
    SendJoin,
    StateBad,
    StateComing,
    StateMoved,
    StateSeen,
    Tell,
    TimePassed,
)
from diloco_learner.recovery.recovery import (
    DONORS_MAX,
    INIT_S,
    JOIN_S,
    MOVES,
    SLOWER,
    STATE_BYTES_PER_S,
    STATE_S,
    STATE_SILENCE_S,
    OwnModel,
    Recovery,
    Stage,
    recovery_times,
)
from diloco_shared.protocol.messages import Beat, Grant, Stamp
from diloco_shared.protocol.pace import transfer_s
from diloco_shared.spec.run import RunSpec, shared_keys

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 3, "sync_every_steps": 12},
        "budget": {"steps": 120},
    }
)
E = TypeVar("E")


def stamp(round_: int = -1) -> Stamp:
    return Stamp(round=round_, steps=4 * (round_ + 1), fraction=0.0, fraction_per_step=1 / 120)


def beat(**change: Any) -> BeatSeen:
    b = Beat(
        run="r",
        epoch=0,
        term=1,
        state="running",
        reason="as planned",
        versions=(5, 5, 4),
        stamp=stamp(13),
        live=("b",),
    )
    return BeatSeen(b.model_copy(update=change))


def anchors(*versions: int, epoch: int = 0) -> list[AnchorReady]:
    return [AnchorReady(epoch, p, v, 3 * v, stamp(3 * v), {}) for p, v in enumerate(versions)]


NAMED = beat(state="bootstrapping", initializer="a", versions=(-1, -1, -1), stamp=stamp())


class Desk:
    """A recovery, its clock and what it asked for."""

    def __init__(
        self, spec: RunSpec = SPEC, *, has_checkpoint: bool = False, initial: bool = True
    ) -> None:
        self.now = 50.0
        self.recovery = Recovery(
            spec,
            "a",
            2,
            OwnModel("d"),
            has_checkpoint=has_checkpoint,
            nonce_seed="boot",
            initial=initial,
        )

    def tell(self, *events: RecoveryEvent) -> list[RecoveryEffect]:
        return [e for event in events for e in self.recovery.handle(event, self.now)]

    def pass_time(self, seconds: float) -> list[RecoveryEffect]:
        self.now += seconds
        return self.tell(TimePassed())

    def grant(
        self, donor: str = "", versions: tuple[int, ...] = (5, 5, 4), **change: Any
    ) -> GrantSeen:
        g = Grant(
            learner="a",
            incarnation=2,
            nonce=self.recovery.nonce,
            accepted=True,
            reason="welcome",
            epoch=0,
            term=1,
            versions=versions,
            donor=donor,
            stamp=stamp(13) if max(versions) >= 0 else stamp(),
        )
        return GrantSeen(g.model_copy(update=change))


def only(effects: list[RecoveryEffect], kind: type[E]) -> list[E]:
    return [e for e in effects if isinstance(e, kind)]


def test_a_join_is_repeated_under_one_nonce_until_granted() -> None:
    desk = Desk()
    (first,) = only(desk.tell(TimePassed()), SendJoin)
    assert first.join.config == shared_keys(SPEC) | {"layout": "d"} and first.join.incarnation == 2
    assert desk.recovery.deadline == desk.now + JOIN_S
    assert not desk.pass_time(JOIN_S / 2)
    assert desk.pass_time(JOIN_S / 2) == [first]
    desk.tell(desk.grant())
    assert not desk.pass_time(5 * JOIN_S)


def test_a_refusal_is_final() -> None:
    desk = Desk()
    desk.tell(TimePassed())
    refused = desk.tell(desk.grant(accepted=False, reason="the configuration differs: seed"))
    assert refused == [Leave("refused", "the configuration differs: seed")]
    assert desk.tell(desk.grant(), TimePassed(), beat()) == []
    assert desk.recovery.deadline is None


def test_moments_from_the_donor_parameters_from_the_anchors() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant("b"))
    assert desk.recovery.deadline == desk.now + STATE_S
    assert not desk.tell(*anchors(5, 6, 4))
    effects = desk.tell(StateSeen("b", desk.recovery.nonce))
    assert effects[0] == LoadState("donor", "b", "boot-1")
    assert isinstance(effects[1], Tell) and effects[1].kind == "recovered"
    assert effects[1].data["source"] == "donor" and effects[1].data["donor"] == "b"
    assert effects[2:] == [Begin(0, 0, (5, 6, 4), stamp(18))]
    assert desk.tell(*anchors(7, 7, 7), TimePassed()) == []


def test_it_begins_at_nothing_older_than_granted() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant(), *anchors(5, 5, 3))
    assert desk.recovery.state is Stage.ANCHORING
    (begin,) = only(desk.tell(*anchors(5, 5, 4)), Begin)
    assert begin == Begin(0, 0, (5, 5, 4), stamp(15))


@pytest.mark.parametrize(("has_checkpoint", "source"), [(True, "checkpoint"), (False, "fresh")])
def test_without_a_donor_its_own_checkpoint_or_fresh_moments(
    has_checkpoint: bool, source: str
) -> None:
    desk = Desk(has_checkpoint=has_checkpoint)
    effects = desk.tell(TimePassed(), desk.grant(), *anchors(5, 5, 4))
    assert only(effects, LoadState) == [LoadState(source, "", "")]
    assert bool(only(effects, Begin)) is not has_checkpoint, "not before it is known what it held"
    effects += desk.tell(CheckpointLoaded()) if has_checkpoint else []
    assert only(effects, Tell)[0].data["source"] == source
    assert only(effects, Begin)


def test_where_no_checkpoint_can_be_used_nobody_is_told_that_one_was() -> None:
    desk = Desk(has_checkpoint=True)
    desk.tell(TimePassed(), desk.grant(), *anchors(5, 5, 4))
    effects = desk.tell(CheckpointLoaded(none=True))
    (told,) = only(effects, Tell)
    assert told.text == "a trains again (life 2), with a new optimizer state"
    assert told.data["source"] == "fresh" and only(effects, Begin)
    assert recovery_times(desk.recovery, 0.0, None, desk.now).source == "fresh"


def test_state_is_believed_only_from_the_granted_donor_under_the_granted_nonce() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant("b"))
    for donor, nonce in (("c", "boot-1"), ("b", "boot-0"), ("b", "")):
        assert desk.tell(StateSeen(donor, nonce), StateBad(donor, nonce, "torn")) == []
    assert desk.recovery.state is Stage.RECEIVING
    assert only(desk.tell(StateSeen("b", "boot-1")), LoadState)


def test_state_may_overtake_its_grant() -> None:
    desk = Desk()
    desk.tell(TimePassed(), StateSeen("b", "boot-1"))
    assert only(desk.tell(desk.grant("b")), LoadState) == [LoadState("donor", "b", "boot-1")]
    other = Desk()
    other.tell(TimePassed(), StateSeen("c", "boot-1"))
    assert not only(other.tell(other.grant("b")), LoadState)


def test_a_silent_or_bad_donor_is_replaced() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant("b"))
    effects = desk.pass_time(STATE_S)
    assert only(effects, Tell)[0].data["donor"] == "b"
    (again,) = only(effects, SendJoin)
    assert (again.join.nonce, again.join.failed_donors) == ("boot-2", ("b",))
    desk.tell(desk.grant("c"))
    assert desk.recovery.deadline == desk.now + STATE_S
    (again,) = only(desk.tell(StateBad("c", "boot-2", "digest")), SendJoin)
    assert again.join.failed_donors == ("b", "c")
    effects = desk.tell(desk.grant("b"))  # one that failed before is no donor
    assert only(effects, LoadState) == [LoadState("fresh", "", "")]


def test_donors_are_not_tried_without_end() -> None:
    desk = Desk(has_checkpoint=True)
    desk.tell(TimePassed())
    for n in range(DONORS_MAX):
        desk.tell(desk.grant(f"d{n}"))
        assert desk.recovery.state is Stage.RECEIVING
        desk.pass_time(STATE_S)
    assert only(desk.tell(desk.grant("d9")), LoadState) == [LoadState("checkpoint", "", "")]


def test_who_the_beat_names_sends_the_initial_parameters() -> None:
    desk = Desk(has_checkpoint=True)
    desk.tell(TimePassed())
    assert not only(desk.tell(NAMED), SendInit)  # not yet granted
    effects = desk.tell(desk.grant(versions=(-1, -1, -1)))
    assert effects == [LoadState("fresh", "", ""), SendInit()]
    assert desk.tell(NAMED) == []
    desk.now += 9.0
    assert desk.tell(NAMED) == []
    desk.now += 1.0
    assert desk.tell(NAMED) == [SendInit()]
    desk.now += 19.0
    assert desk.tell(NAMED) == []
    desk.now += 1.0
    assert desk.tell(NAMED) == [SendInit()]
    effects = desk.tell(*anchors(0, 0, 0))
    assert only(effects, Tell)[0].kind == "began"
    assert only(effects, Tell)[0].text == "a begins to train (life 2), with a new optimizer state"
    assert effects[-1] == Begin(0, 0, (0, 0, 0), stamp(0))


def test_who_has_not_read_the_initial_parameters_leaves_when_it_is_asked_for_them() -> None:
    """Its own are zeros, which nobody may be given."""
    desk = Desk(initial=False)
    effects = desk.tell(TimePassed(), desk.grant(versions=(-1, -1, -1)), NAMED)
    assert not only(effects, SendInit) and only(effects, Leave)[0].outcome == "unread"
    desk = Desk(initial=False)
    desk.tell(TimePassed(), desk.grant())
    assert only(desk.tell(*anchors(5, 5, 4)), Begin), "who is not asked needs none"


@pytest.mark.parametrize(
    "signs",
    [
        [*anchors(0), NAMED],
        [BeatSeen(NAMED.beat.model_copy(update={"versions": (0, 0, 0)}))],
        [BeatSeen(NAMED.beat.model_copy(update={"state": "running"}))],
        [BeatSeen(NAMED.beat.model_copy(update={"initializer": "b"}))],
    ],
)
def test_a_fresh_initialisation_is_never_sent_where_a_version_may_exist(
    signs: list[RecoveryEvent],
) -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant(versions=(-1, -1, -1)))
    assert not only(desk.tell(*signs), SendInit)


def test_a_run_that_had_versions_when_it_joined_is_never_initialised() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant())
    assert not only(desk.tell(NAMED), SendInit)


def test_a_run_whose_first_versions_are_wanted_is_never_initialised() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant(versions=(0, 0, 0)))
    unborn = NAMED.beat.model_copy(update={"versions": (-1, -1, -1)})
    assert not only(desk.tell(BeatSeen(unborn)), SendInit)


def test_a_shard_that_has_none_gets_them_from_whoever_joined_later() -> None:
    """The others began with versions of their own: nobody may be left who joined before any."""
    settings = {**SPEC.model_dump(), "algorithm": {"fragments": 4, "shards": 2}}
    desk = Desk(RunSpec.model_validate(settings))
    desk.tell(TimePassed(), desk.grant(versions=(0, -1, 0, -1)))
    assert desk.recovery.state is Stage.ANCHORING
    named = NAMED.beat.model_copy(update={"versions": (0, -1, 0, -1)})
    assert desk.tell(BeatSeen(named)) == [SendInit()]
    assert only(desk.tell(*anchors(0, 0, 0, 0)), Begin)


def test_somebody_else_may_initialise() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant(versions=(-1, -1, -1)))
    other = NAMED.beat.model_copy(update={"initializer": "b"})
    assert not desk.tell(BeatSeen(other))
    assert only(desk.tell(*anchors(0, 0, 0)), Begin)


def test_a_raised_epoch_voids_anchors_and_asks_the_donor_anew() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant("b"), *anchors(5, 5, 4))
    effects = desk.tell(beat(epoch=1, term=1, versions=(2, 2, 2)))
    (again,) = only(effects, SendJoin)
    assert (again.join.nonce, again.join.failed_donors) == ("boot-2", ())
    assert desk.tell(StateSeen("b", "boot-1")) == []
    desk.tell(desk.grant("b", versions=(2, 2, 2), epoch=1))
    assert not only(desk.tell(StateSeen("b", "boot-2"), *anchors(9, 9, 9)), Begin)
    (begin,) = only(desk.tell(*anchors(2, 2, 3, epoch=1)), Begin)
    assert (begin.epoch, begin.versions) == (1, (2, 2, 3))


def test_moments_outlive_a_raised_epoch() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant("b"), StateSeen("b", "boot-1"), *anchors(5, 5))
    assert not only(desk.tell(*anchors(2, epoch=1)), SendJoin)
    effects = desk.tell(*anchors(2, 2, 2, epoch=1))
    assert not only(effects, LoadState) and only(effects, Begin)


def test_an_answer_from_before_the_epoch_is_asked_for_again() -> None:
    desk = Desk()
    desk.tell(TimePassed(), beat(epoch=1, versions=(2, 2, 2)))
    (again,) = only(desk.tell(desk.grant("b")), SendJoin)
    assert again.join.nonce == "boot-2"


def test_it_does_not_wait_for_more_than_a_new_leader_has() -> None:
    desk = Desk()
    desk.tell(TimePassed(), desk.grant(), *anchors(5, 4, 4))
    assert only(desk.tell(beat(term=2, versions=(5, 4, 4))), Begin)


def test_a_newer_incarnation_or_the_end_of_the_run_ends_it() -> None:
    """I10: two processes never act as one learner."""
    desk = Desk()
    desk.tell(TimePassed())
    assert only(desk.tell(beat(incarnations={"a": 3})), Leave)[0].outcome == "superseded"
    assert desk.pass_time(100.0) == []
    for state in ("finished", "stopped"):
        desk = Desk()
        desk.tell(TimePassed(), desk.grant("b"))
        assert only(desk.tell(beat(state=state)), Leave)[0].outcome == state


def test_what_is_for_others_changes_nothing_and_is_counted() -> None:
    """I11."""
    desk = Desk()
    desk.tell(TimePassed(), beat(term=4))
    before = len(desk.recovery.ignored)
    ignored: list[RecoveryEvent] = [
        desk.grant(nonce="boot-9"),
        desk.grant(incarnation=1),
        desk.grant(learner="b"),
        desk.grant(versions=(1, 1)),
        beat(term=3, state="finished"),
        beat(versions=(1,), state="finished"),
        StateSeen("b", "boot-9"),
    ]
    assert desk.tell(*ignored) == []
    assert desk.recovery.state is Stage.JOINING
    assert desk.recovery.ignored.total() - before == len(ignored)


def test_every_state_but_the_last_can_be_left() -> None:
    ends = {state for state, moves in MOVES.items() if not moves}
    assert ends == {Stage.BEGUN, Stage.LEFT} and set(MOVES) == set(Stage)
    assert all(Stage.LEFT in moves for moves in MOVES.values() if moves)


def test_no_state_becomes_what_nothing_leads_to() -> None:
    """By an error of its own, which `python -O` leaves in."""
    recovery = Desk().recovery
    with pytest.raises(RuntimeError, match="a recovery is JOINING and cannot be BEGUN"):
        recovery._move(Stage.BEGUN)
    assert recovery.state is Stage.JOINING


# --- donors that die, and transfers that take long -----------------------------------------------


def receiving(desk: Desk, donor: str = "b") -> None:
    desk.tell(TimePassed(), desk.grant(donor=donor))
    assert desk.recovery.state is Stage.RECEIVING


def test_a_donor_that_falls_silent_is_not_waited_for() -> None:
    desk = Desk()
    receiving(desk)
    assert not only(desk.tell(beat(live=("a", "b"))), SendJoin)
    effects = desk.tell(beat(live=("a", "c")))
    (join,) = only(effects, SendJoin)
    assert join.join.failed_donors == ("b",) and only(effects, Tell)


def test_a_donor_that_lives_is_waited_for_over_a_long_step() -> None:
    """It gives between two steps, and in a run of two nobody else can."""
    desk = Desk()
    receiving(desk)
    for _ in range(45):  # a step of five seconds, and a rest that lets it compute a tenth
        desk.now += 1.0
        assert not only(desk.tell(beat(live=("a", "b"), incarnations={"b": 3})), SendJoin)
    assert only(desk.tell(StateSeen("b", desk.recovery.nonce)), LoadState)


def test_a_donor_that_begins_again_is_not_waited_for() -> None:
    """It is back within its lease, and its new life was not asked."""
    desk = Desk()
    receiving(desk)
    old, new = ({"a": 2, "b": life} for life in (3, 4))
    assert not only(desk.tell(beat(live=("b",), incarnations={"b": 2})), SendJoin), "of before"
    assert not only(desk.tell(beat(live=("a", "b"), incarnations=old)), SendJoin)
    assert not only(desk.tell(beat(live=("a", "b"))), SendJoin), "a leader that has just begun"
    (join,) = only(desk.tell(beat(live=("a", "b"), incarnations=new)), SendJoin)
    assert join.join.failed_donors == ("b",)
    desk.tell(desk.grant("c"))
    assert not only(desk.tell(beat(live=("a", "c"), incarnations={"c": 9})), SendJoin)


def test_what_a_donor_completed_before_it_began_again_is_fetched_to_the_end() -> None:
    desk = Desk()
    receiving(desk)
    desk.tell(beat(live=("a", "b"), incarnations={"b": 3}), StateComing("b", desk.recovery.nonce))
    assert not only(desk.tell(beat(live=("a", "b"), incarnations={"b": 4})), SendJoin)


def test_a_beat_that_does_not_know_the_newcomer_yet_says_nothing_about_the_donor() -> None:
    desk = Desk()
    receiving(desk)
    assert not only(desk.tell(beat(live=())), SendJoin)


def test_what_a_donor_completed_before_it_died_is_fetched_to_the_end() -> None:
    desk = Desk()
    receiving(desk)
    nonce = desk.recovery.nonce
    desk.tell(StateComing("b", nonce))
    assert not only(desk.tell(beat(live=("a", "c"))), SendJoin)
    desk.now += STATE_S + 1
    assert not only(desk.tell(TimePassed()), SendJoin), "fetching takes its time"
    assert only(desk.tell(StateSeen("b", nonce)), LoadState)


def test_a_large_state_is_given_the_time_that_its_donor_needs_to_begin() -> None:
    recovery = Recovery(
        SPEC,
        "a",
        2,
        OwnModel("d", state_bytes=1000 * STATE_BYTES_PER_S),
        has_checkpoint=False,
        nonce_seed="boot",
    )
    desk = Desk()
    desk.recovery = recovery
    receiving(desk)
    assert recovery.deadline == desk.now + STATE_S + 1000


def test_a_donor_whose_state_moves_is_not_given_up() -> None:
    """However long it takes: moments may be old, anchors are fetched anew."""
    desk = Desk()
    receiving(desk)
    nonce = desk.recovery.nonce
    for n in range(100):
        effects = desk.tell(StateMoved("b", nonce, n * 10_000_000))
        desk.now += STATE_SILENCE_S - 1
        effects += desk.tell(TimePassed())
        assert not only(effects, SendJoin)
    effects = desk.pass_time(1.0)
    assert only(effects, Tell)[0].kind == "donor-failed"
    assert only(effects, SendJoin)


LITTLE = 100_000  # bytes within STATE_SILENCE_S


# Of all, on a link that is slow and worth using.
ALLOWED_S = STATE_S + STATE_SILENCE_S + SLOWER * transfer_s(10 * LITTLE)


@pytest.mark.parametrize(
    ("sign", "most"),
    [
        (lambda nonce, n: StateMoved("b", nonce), STATE_SILENCE_S),  # announced again
        (lambda nonce, n: StateComing("b", nonce), STATE_SILENCE_S),  # said to be there, again
        (lambda nonce, n: StateMoved("b", nonce, LITTLE), STATE_SILENCE_S),  # sent again
        (lambda nonce, n: StateMoved("b", nonce, LITTLE * (n + 1)), ALLOWED_S),  # little by little
        (lambda nonce, n: StateMoved("b", nonce, 100 * LITTLE * (n + 1)), ALLOWED_S),  # too much
    ],
)
def test_a_donor_that_only_says_that_it_sends_is_given_up(sign: Any, most: float) -> None:
    desk = Desk()
    desk.recovery.state_bytes = 10 * LITTLE
    receiving(desk)
    nonce = desk.recovery.nonce
    began, effects = desk.now, list[RecoveryEffect]()
    for n in range(100):
        effects += desk.tell(sign(nonce, n)) if not n % 10 else desk.tell(TimePassed())
        if only(effects, SendJoin):
            break
        desk.now += STATE_SILENCE_S / 20
    assert only(effects, Tell)[0].kind == "donor-failed"
    assert desk.now - began <= most + STATE_SILENCE_S / 20


def test_a_donor_is_not_blamed_for_what_waits_behind_other_payloads() -> None:
    desk = Desk()
    receiving(desk)
    nonce = desk.recovery.nonce
    for _ in range(100):
        desk.now += STATE_SILENCE_S - 1
        effects = desk.tell(StateMoved("b", nonce, waiting=True), TimePassed())
        assert not only(effects, SendJoin)
    assert desk.recovery.deadline == desk.now + STATE_SILENCE_S
    desk.tell(StateMoved("b", nonce, LITTLE))
    desk.now += STATE_S + STATE_SILENCE_S
    assert only(desk.tell(TimePassed()), SendJoin)


def test_only_the_donor_that_is_waited_for_is_given_time() -> None:
    desk = Desk()
    receiving(desk)
    desk.tell(StateMoved("b", "another"))
    assert desk.recovery.deadline == desk.now + STATE_S


def test_a_state_that_moves_does_not_outlive_its_donor_unless_all_of_it_is_there() -> None:
    desk = Desk()
    receiving(desk)
    desk.tell(StateMoved("b", desk.recovery.nonce))
    assert only(desk.tell(beat(live=("a", "c"))), SendJoin)


def test_initial_parameters_that_move_are_not_asked_for_again() -> None:
    desk = Desk()
    desk.tell(TimePassed(), NAMED, desk.grant(versions=(-1, -1, -1)))
    for _ in range(100):
        desk.now += INIT_S - 1
        assert desk.tell(InitMoved()) == []
        assert desk.tell(NAMED) == []
    desk.now += INIT_S
    assert desk.tell(NAMED) == [SendInit()]


def test_phases_are_timed() -> None:
    desk = Desk()
    desk.tell(TimePassed())
    desk.now += 1
    desk.tell(desk.grant(donor="b"))
    desk.now += 2
    desk.tell(StateSeen("b", desk.recovery.nonce))
    times = recovery_times(desk.recovery, 40.0, None, desk.now)
    assert (times.granted_s, times.donor_s, times.settled_s) == (11.0, 11.0, 13.0)
    assert (times.age_s, times.stepping_s) == (13.0, None)
    assert (times.donor, times.source, times.attempts) == ("b", "donor", 1)
    assert recovery_times(desk.recovery, 40.0, 55.0, 60.0).stepping_s == 15.0


def test_anchors_of_a_new_epoch_wait_for_its_first_beat_where_there_are_shards() -> None:
    """A publication tells where its own shard is; where the run is, only a beat does."""
    settings = {**SPEC.model_dump(), "algorithm": {"fragments": 4, "shards": 2}}
    desk = Desk(RunSpec.model_validate(settings))
    desk.tell(TimePassed(), desk.grant(versions=(0, -1, 0, -1)))
    assert not only(desk.tell(*anchors(0, 0, 0, 0, epoch=1)), Begin)
    (begin,) = only(desk.tell(beat(epoch=1, versions=(0, 0, 0, 0), stamp=stamp(2))), Begin)
    assert (begin.epoch, begin.versions, begin.stamp) == (1, (0, 0, 0, 0), stamp(2))


def test_where_a_new_epoch_stands_is_told_once_every_shard_is_in_it() -> None:
    """A beat put together while one shard is behind tells where the run was before, too."""
    settings = {**SPEC.model_dump(), "algorithm": {"fragments": 4, "shards": 2}}
    desk = Desk(RunSpec.model_validate(settings))
    desk.tell(TimePassed(), desk.grant(versions=(0, -1, 0, -1)))
    half = beat(epoch=1, terms=(1, 0), versions=(0, -1, 0, -1), stamp=stamp(3))
    assert not only(desk.tell(half, *anchors(0, 0, 0, 0, epoch=1)), Begin)
    whole = beat(epoch=1, term=2, terms=(1, 1), versions=(0, 0, 0, 0), stamp=stamp(2))
    (begin,) = only(desk.tell(whole), Begin)
    assert begin.stamp == stamp(2)
