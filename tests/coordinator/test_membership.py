"""Who is a member and who was one, by notes that outlive a coordinator."""

from diloco_coordinator.membership import MEMBERS_MAX, MemberNote, Roll
from diloco_shared.protocol.records import MemberRecord


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
    assert roll.seen(record()) is not None
    assert roll.seen(record()) is None
    assert roll.seen(record(boot="2")) is not None


def test_a_member_that_falls_silent_is_gone_since_then() -> None:
    roll = Roll()
    roll.seen(record())
    note = roll.silent("a", 7.0)
    assert note is not None and (note.alive, note.gone_since) == (False, 7.0)
    assert roll.silent("a", 9.0) is None, "it is gone since the first silence"
    assert roll.silent("unknown", 9.0) is None
    assert roll.living == {}
    roll.seen(record(boot="2"))
    assert roll.notes["a"].alive


def test_notes_from_before_tell_what_the_silent_ones_were() -> None:
    roll = Roll()
    roll.restore(MemberNote(record=record("a")))
    roll.restore(MemberNote(record=record("b"), gone_since=3.0))
    lost = roll.absent(living=set(), now=8.0)
    assert [(n.record.id, n.gone_since) for n in lost] == [("a", 8.0)]
    assert roll.notes["b"].gone_since == 3.0


def test_a_wish_to_drain_outlives_the_process() -> None:
    roll = Roll()
    roll.seen(record())
    roll.drain("a", True)
    roll.silent("a", 1.0)
    roll.seen(record(boot="2"))
    assert roll.notes["a"].draining
    assert not roll.drain("a", False).draining
    assert MemberNote(record=record(draining=True)).draining, "by its own wish"


def test_members_are_bounded_and_the_longest_gone_go_first() -> None:
    """I12."""
    roll = Roll()
    for n in range(MEMBERS_MAX + 2):
        roll.seen(record(f"m{n}"))
    assert roll.surplus() == [], "the living are never forgotten"
    for n, name in enumerate(("m5", "m1", "m3")):
        roll.silent(name, float(n))
    assert roll.surplus() == ["m5", "m1"]


def test_a_note_survives_its_way_through_json() -> None:
    note = MemberNote(record=record(), gone_since=1.5, drained=True)
    assert MemberNote.model_validate_json(note.model_dump_json()) == note
