"""Who is live and who trains: what the roster remembers is what a fresh look would find."""

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.protocol.messages import LearnerState, LifeCount, Progress
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.history import History
from diloco_syncer.members.recoveries import Recoveries
from diloco_syncer.members.roster import MEMBERS_MAX, REFUSED_MAX, Member, Roster

LEASE_S = 5.0
STATES: tuple[LearnerState, ...] = ("recovering", "stepping", "paused", "draining", "finished")

ACTIONS = st.tuples(
    st.sampled_from(["progress"] * 4 + ["join", "forgive", "drop", "nothing"]),
    st.sampled_from("abc"),
    st.integers(0, 2),  # incarnation
    st.sampled_from(STATES),
    st.integers(0, 1),  # epoch
    st.sampled_from([0.0, 0.5, 2.0, 5.0, 5.1]),  # seconds before it
)


def report(learner: str, incarnation: int, state: LearnerState, epoch: int, step: int) -> Progress:
    return Progress(
        learner=learner,
        incarnation=incarnation,
        epoch=epoch,
        state=state,
        step=step,
        tokens=step,
        c_steps=(0,),
        c_tokens=(0,),
        adopted=(0,),
        adopted_at=(0,),
        loss=1.0,
        step_s=1.0,
        wait_s=0.0,
    )


@examples(200)
@given(st.lists(ACTIONS, max_size=40))
def test_what_is_remembered_is_what_a_fresh_look_finds(
    actions: list[tuple[str, str, int, LearnerState, int, float]],
) -> None:
    roster, now = Roster(LEASE_S), 0.0
    for n, (what, learner, incarnation, state, epoch, seconds) in enumerate(actions):
        now += seconds
        if what == "progress":
            roster.progress(report(learner, incarnation, state, epoch, n), now)
        elif what == "join" and incarnation >= roster.newest(learner):
            roster.join(learner, incarnation, "n", now)
        elif what == "forgive":
            roster.forgive((learner,), now)
        elif what == "drop":
            roster.drop(learner)
        members = sorted(roster.members.values(), key=lambda m: m.learner)
        live = [m for m in members if now - m.seen_at <= LEASE_S]
        assert list(roster.live(now)) == live
        assert list(roster.names(now)) == [m.learner for m in live]
        stepping = [m for m in live if m.stepping]
        assert list(roster.stepping(now)) == stepping
        assert list(roster.stepping(now, 1)) == [m for m in stepping if in_epoch(m, 1)]


def test_a_new_leader_takes_no_data_from_those_who_have_yet_to_speak_to_it() -> None:
    history = History(RunSpec.model_validate({"name": "r", "budget": {"steps": 1}}))
    roster = Roster(LEASE_S, since=100.0, recoveries=Recoveries(history))
    for learner in ("a", "b", "c"):
        history.ledger.saw(LifeCount(learner=learner, incarnation=0, tokens=5))
    history.ledger.saw(LifeCount(learner="c", incarnation=0, tokens=5, left=True))
    roster.progress(report("b", 0, "stepping", 0, 1), 104.0)
    assert roster.names(104.0) == ("b",)
    assert roster.holders(104.0) == roster.holders(105.0) == ("a", "b"), "c has left"
    assert roster.holders(105.1) == ("b",)
    roster.forgive(("b",), 200.0)
    assert roster.holders(201.0) == ("a", "b"), "nobody could speak until now"


def test_a_new_leader_believes_of_those_whom_the_tape_knows_that_their_steps_are_long() -> None:
    """Else a fleet of long steps would have pulls that are too short; and a stranger's word that
    it has trained for long, in steps of an hour, is nobody's but its own."""
    history = History(RunSpec.model_validate({"name": "r", "budget": {"steps": 1}}))
    history.ledger.saw(LifeCount(learner="a", incarnation=0, tokens=5))

    def usual_s(learner: str, after_s: float = 1.0, *, steps: int = 40) -> float:
        roster = Roster.of(history.spec, history)
        roster.lease_s, roster.since = LEASE_S, 100.0
        for step in (40, steps):
            long = report(learner, 0, "stepping", 0, step).model_copy(update={"step_s": 3600.0})
            roster.progress(long, 100.0 + after_s)
            after_s += 1.0
        return roster.usual_step_s(100.0 + after_s)

    assert usual_s("a") == 3600.0
    assert usual_s("stranger") < 1.0
    # Before the first record that names lives the tape knows none, and a leader may be replaced.
    history.term = 1
    assert usual_s("stranger") == 3600.0
    assert usual_s("stranger", after_s=LEASE_S + 1.0) == 3600.0, "it may have been cut off"
    assert usual_s("stranger", steps=42) < 2.0, "but it takes two steps in a second"


def test_no_more_holders_are_told_than_there_may_be_learners_i12() -> None:
    history = History(RunSpec.model_validate({"name": "r", "budget": {"steps": 1}}))
    for n in range(MEMBERS_MAX + 2):
        history.ledger.saw(LifeCount(learner=f"m{n}", incarnation=0, tokens=5))
    roster = Roster(LEASE_S, recoveries=Recoveries(history))
    roster.progress(report("z", 0, "stepping", 0, 1), 1.0)
    told = roster.holders(1.0)
    assert len(told) == MEMBERS_MAX and {"z", f"m{MEMBERS_MAX + 1}"} <= {*told}
    assert "m0" not in told


def in_epoch(member: Member, epoch: int) -> bool:
    return member.progress is not None and member.progress.epoch == epoch


def test_no_more_refused_lives_are_remembered_than_their_limit_i12() -> None:
    """The newest stay: those are still to be told."""
    roster = Roster(LEASE_S)
    for n in range(REFUSED_MAX + 2):
        roster.join(f"m{n}", 1, "n", 0.0)
        assert "superseded by 1" in roster.over(f"m{n}", 0, float(n))
    assert len(roster.refused) == REFUSED_MAX
    assert next(iter(roster.refused)) == "m2"
