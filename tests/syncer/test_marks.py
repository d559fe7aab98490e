"""Whose word of a checkpoint's mark another shard than the first goes by."""

from diloco_syncer.checkpoints.marks import DOUBTED_MAX, PATIENCE_S, Marks


def test_what_is_shown_is_believed_at_once_and_nothing_is_set_that_nobody_has_met() -> None:
    marks = Marks()
    marks.show(2)
    assert (marks.seen, marks.newest, marks.deadline) == (0, 0, None)
    marks.met("a", 1, 0.0)
    assert (marks.seen, marks.newest, marks.deadline) == (1, 1, None)


def test_what_is_not_shown_yet_is_waited_for() -> None:
    marks = Marks()
    marks.met("a", 3, 0.0)
    marks.met("a", 4, 1.0)
    marks.met("b", 3, 2.0)
    assert (marks.seen, marks.newest, marks.deadline) == (0, 4, PATIENCE_S)
    marks.show(3)
    assert (marks.seen, marks.newest, marks.deadline) == (3, 4, PATIENCE_S)
    marks.show(4)
    assert (marks.seen, marks.newest, marks.deadline) == (4, 4, None)
    assert not list(marks.expire(PATIENCE_S)) and not marks.held


def test_whoever_told_of_what_was_not_shown_in_time_is_waited_for_no_more() -> None:
    marks = Marks()
    marks.met("a", 9, 0.0)
    assert not list(marks.expire(PATIENCE_S - 1.0))
    assert list(marks.expire(PATIENCE_S)) == [("a", 9)]
    marks.met("a", 10, PATIENCE_S)
    assert (marks.newest, marks.deadline) == (0, None)
    marks.met("b", 10, PATIENCE_S)
    assert marks.newest == 10, "others are believed as before"
    marks.show(10)
    marks.met("a", 10, PATIENCE_S)
    assert marks.seen == 10


def test_no_more_are_doubted_than_their_limit_i12() -> None:
    marks = Marks()
    for n in range(DOUBTED_MAX + 3):
        marks.met(f"m{n}", 1, 0.0)
    assert len(list(marks.expire(PATIENCE_S))) == DOUBTED_MAX + 3
    assert len(marks.doubted) == DOUBTED_MAX and "m0" not in marks.doubted
