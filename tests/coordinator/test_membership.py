"""Who is a member and who was one, by notes that outlive a coordinator."""

from diloco_coordinator.runs.membership import (
    FORGET_DRAINED_S,
    FORGET_S,
    MEMBERS_MAX,
    SPEED_S_MAX,
    UNHEARD_S,
    UNRENEWED_S,
    MemberNote,
    Renewals,
    Roll,
    Speeds,
)
from diloco_shared.process.membership import REFRESH_S, TTL_S
from diloco_shared.protocol.records import LearnerSpeed, MemberRecord


def record(name: str = "a", boot: str = "1", *, draining: bool = False) -> MemberRecord:
    return MemberRecord(
        id=name,
        role="learner",
        boot=boot,
        host="h",
        pid=1,
        lock="l",
        started_at=1.0,
        draining=draining,
    )


def test_refreshes_are_not_worth_a_note_but_changes_are() -> None:
    roll = Roll()
    assert roll.seen(record(), 1.0) is not None
    assert roll.seen(record(), 1.0) is None
    assert roll.seen(record(boot="2"), 1.0) is not None


def test_a_member_that_falls_silent_is_gone_since_then() -> None:
    roll = Roll()
    roll.seen(record(), 1.0)
    note = roll.silent("a", 7.0)
    assert note is not None and (note.alive, note.gone_since) == (False, 7.0)
    assert roll.silent("a", 9.0) is None, "it is gone since the first silence"
    assert roll.silent("unknown", 9.0) is None
    assert roll.living == {}
    roll.seen(record(boot="2"), 1.0)
    assert roll.notes["a"].alive


def test_notes_from_before_tell_what_the_silent_ones_were() -> None:
    roll = Roll()
    roll.restore(MemberNote(record=record("a")), 5.0)
    roll.restore(MemberNote(record=record("b"), gone_since=3.0), 5.0)
    lost = roll.absent(living=set(), now=8.0)
    assert [(n.record.id, n.gone_since) for n in lost] == [("a", 8.0)]
    assert roll.notes["b"].gone_since == 3.0


def test_a_note_by_a_clock_that_is_ahead_is_of_now() -> None:
    """Else a member that is gone would keep its place for as long as that clock is ahead."""
    roll = Roll()
    roll.restore(MemberNote(record=record("a"), gone_since=9e4, back_at=8e4), 100.0)
    roll.restore(MemberNote(record=record("b"), gone_since=40.0, back_at=30.0), 100.0)
    assert roll.notes["a"].since_s(131.0) == 31.0
    assert roll.notes["b"].since_s(131.0) == 91.0
    assert roll.expired(100.0 + FORGET_S + 1.0, ()) == ["a", "b"]


def test_a_clock_that_is_set_back_makes_nobody_gone_for_ever() -> None:
    """A machine begins a day ahead, a member dies, and then the machine hears what time it is."""
    roll = Roll()
    for name in ("a", "b", "c"):
        roll.seen(record(name), 9e4)
    roll.silent("a", 9e4 + 1)
    roll.not_ahead(100.0)
    roll.silent("b", 110.0)
    roll.not_ahead(131.0)
    assert [roll.notes[name].since_s(131.0) for name in ("a", "b", "c")] == [31.0, 21.0, 31.0]


def test_a_wish_to_drain_outlives_the_process() -> None:
    roll = Roll()
    roll.seen(record(), 1.0)
    roll.drain("a", True)
    roll.silent("a", 1.0)
    roll.seen(record(boot="2"), 1.0)
    assert roll.notes["a"].draining
    assert not roll.drain("a", False).draining
    assert MemberNote(record=record(draining=True)).draining, "by its own wish"


def test_what_a_user_asks_of_a_member_outlives_that_it_is_forgotten_meanwhile() -> None:
    """Both take their time, and the one that was asked for later counts."""
    roll = Roll()
    roll.seen(record(), 1.0)
    roll.silent("a", 1.0)
    before = roll.notes["a"]
    with roll.asking("a"), roll.asking("a"):
        with roll.asking("a"):
            roll.drain("a", True)
        roll.left("a")
        assert not roll.forget("a", before) and roll.notes["a"].drained
    assert roll.forget("a", roll.notes["a"]) and not roll.notes
    roll.seen(record(), 1.0)
    roll.left("a")
    assert roll.notes["a"].alive, "it has come back"
    roll.silent("a", 2.0)
    roll.left("a")
    assert not roll.notes and roll.forget("a", before)


def test_members_are_bounded_and_the_longest_gone_go_first() -> None:
    """I12."""
    roll = Roll()
    for n in range(MEMBERS_MAX + 2):
        roll.seen(record(f"m{n}"), 1.0)
    assert roll.surplus() == [], "the living are never forgotten"
    for n, name in enumerate(("m5", "m1", "m3")):
        roll.silent(name, float(n))
    assert roll.surplus() == ["m5", "m1"]
    roll.drain("m5", True)
    assert roll.surplus() == ["m1", "m3"], "last those that a user drained"


def test_a_note_survives_its_way_through_json() -> None:
    note = MemberNote(record=record(), gone_since=1.5, drained=True)
    assert MemberNote.model_validate_json(note.model_dump_json()) == note


def test_the_gone_leave_the_list_by_themselves_unless_a_run_needs_them() -> None:
    roll = Roll()
    for name in ("a", "b", "c"):
        roll.seen(record(name), 1.0)
    for name in ("a", "b"):
        roll.silent(name, 100.0)
    assert roll.expired(100.0 + FORGET_S, ()) == []
    assert roll.expired(101.0 + FORGET_S, ()) == ["a", "b"]
    assert roll.expired(101.0 + FORGET_S, {"b"}) == ["a"]
    roll.drain("a", True)
    assert roll.expired(101.0 + FORGET_S, ()) == ["b"], "it would be given work when it comes back"
    assert roll.expired(101.0 + FORGET_DRAINED_S, ()) == ["a", "b"]
    roll.seen(record("a", boot="2"), 200.0 + FORGET_S)
    assert roll.notes["a"].draining


def test_how_long_a_member_is_there_counts_from_its_return() -> None:
    roll = Roll()
    roll.seen(record(), 10.0)
    roll.seen(record(), 50.0)
    assert roll.notes["a"].since_s(60.0) == 50.0
    roll.silent("a", 70.0)
    assert roll.notes["a"].since_s(75.0) == 5.0
    roll.seen(record(), 80.0)
    assert roll.notes["a"].since_s(81.0) == 1.0, "it stood still, and goes on"


def renewed(renewals: Renewals, member: str, since: float, until: float) -> None:
    """Every second, by a living process."""
    for at in range(int(since), int(until) + 1):
        renewals.hear(member, member, at, float(at))


def test_who_renews_its_key_no_more_is_overdue_after_some_lifetimes() -> None:
    """A key without a lifetime stays on the server for ever."""
    assert UNRENEWED_S > 5 * TTL_S and 2 * REFRESH_S < UNHEARD_S <= TTL_S
    renewals = Renewals()
    assert renewals.hear("a", "LEARNER.a", 7, 100.0)
    renewed(renewals, "b", 100.0, 100.0 + UNRENEWED_S)
    assert renewals.overdue() == []
    renewed(renewals, "b", 101.0 + UNRENEWED_S, 101.0 + UNRENEWED_S)
    assert renewals.overdue() == ["a"]
    assert not renewals.hear("a", "LEARNER.a", 7, 132.0), "a watch that begins again tells it"
    assert renewals.overdue() == ["a"]
    assert renewals.hear("a", "LEARNER.a", 900, 132.0)
    assert renewals.overdue() == []


def test_time_without_the_message_server_is_nobodys_silence() -> None:
    renewals = Renewals()
    for member in ("a", "b"):
        renewals.hear(member, member, 1, 100.0)
    assert renewals.overdue() == []
    renewed(renewals, "b", 101.0, 120.0)
    # It is away for a minute, or the coordinator stands still: b is heard first.
    renewed(renewals, "b", 180.0, 180.0 + UNRENEWED_S)
    assert renewals.overdue() == []
    renewed(renewals, "b", 181.0 + UNRENEWED_S, 181.0 + UNRENEWED_S)
    assert renewals.overdue() == ["a"]


def test_whose_key_is_gone_is_overdue_no_more() -> None:
    renewals = Renewals()
    for member in ("a", "c"):
        renewals.hear(member, member, 1, 100.0)
    renewed(renewals, "b", 100.0, 101.0 + UNRENEWED_S)
    assert renewals.overdue() == ["a", "c"]
    renewals.end("a")
    renewals.keep(["a", "b"])
    assert renewals.overdue() == [] and renewals.heard.keys() == {"b"}


def speed(learner: str, run: str = "demo") -> LearnerSpeed:
    return LearnerSpeed(
        run=run,
        learner=learner,
        incarnation=0,
        platform="cpu",
        device="cpu",
        devices=1,
        steps=1,
        seconds=1.0,
        memory_of="process",
        memory_bytes=1,
        memory_peak_bytes=1,
    )


def test_a_speed_is_shown_while_it_is_fresh_and_of_the_run_in_question() -> None:
    speeds = Speeds()
    speeds.hear(speed("a"), 100.0)
    assert speeds.of("a", "demo", 100.0 + SPEED_S_MAX) == speed("a")
    assert speeds.of("a", "demo", 100.1 + SPEED_S_MAX) is None
    assert speeds.of("a", "another", 100.0) is None
    assert speeds.of("b", "demo", 100.0) is None


def test_no_more_speeds_are_kept_than_there_may_be_members() -> None:
    """I12: the newest word of each; room is made by those that said nothing for a while."""
    speeds = Speeds()
    for n in range(MEMBERS_MAX):
        speeds.hear(speed(f"l-{n}"), 100.0)
    speeds.hear(speed("late"), 101.0)
    assert speeds.of("late", "demo", 101.0) is None
    speeds.hear(speed("l-0"), 109.0)
    speeds.hear(speed("late"), 100.5 + SPEED_S_MAX)
    assert speeds.heard.keys() == {"l-0", "late"}
