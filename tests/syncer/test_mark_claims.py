"""A claim of a mark is settled by a look that begins after it, however often it is repeated."""

from diloco_syncer.checkpoints.checkpoints import REFUTED_MAX, MarkClaims


def told(*claims: tuple[str, int]) -> MarkClaims:
    found = MarkClaims()
    for learner, number in claims:
        found.tell(number, learner)
    return found


def test_a_look_begins_once_for_what_is_told() -> None:
    claims = told(("a", 3))
    assert claims.newest == 3
    assert [claims.look(), claims.look()] == [True, False]
    assert not MarkClaims().look()


def test_a_mark_that_is_there_is_nobodys_lie() -> None:
    claims = told(("a", 3))
    claims.look()
    assert claims.found(3) == ""
    assert claims.newest == 0 and not claims.look()


def test_learners_that_all_repeat_a_mark_that_the_tape_has_lost_are_settled() -> None:
    """A report of somebody comes within every look: a round would wait for ever."""
    claims, looks = told(("a", 3)), 0
    while claims.look():
        looks += 1
        for learner in "abc":
            claims.tell(3, learner)
        claims.found(0)
    assert looks == 2
    assert claims.newest == 0


def test_whoever_tells_of_another_mark_each_time_holds_nothing_up() -> None:
    claims, looks = told(("liar", 3)), 0
    while claims.look():
        looks += 1
        claims.tell(3 + looks, "liar")
        claims.found(0)
    assert looks == 1


def test_what_was_looked_for_in_vain_is_not_looked_for_again_when_it_is_repeated() -> None:
    """Its checkpoint is over, and the record in the archive."""
    claims = told(("a", 3))
    claims.look()
    claims.found(0)
    claims.tell(3, "a")
    assert claims.newest == 0 and not claims.look()
    claims.tell(3, "b")
    assert claims.newest == 3, "who says so first may be right"


def test_a_true_mark_told_of_during_a_look_is_looked_for_again() -> None:
    """A lie about a higher one does not hide it."""
    claims = told(("liar", 1000))
    claims.look()
    claims.tell(5, "a")
    assert claims.found(0) == "liar"
    assert claims.newest == 5 and claims.look()
    assert claims.found(5) == ""


def test_whoever_was_wrong_is_heard_again_later() -> None:
    claims = told(("a", 3))
    claims.look()
    claims.found(0)
    claims.tell(4, "a")
    assert claims.newest == 4 and claims.look()


def test_names_of_strangers_take_no_room_for_ever() -> None:
    claims = MarkClaims()
    for n in range(REFUTED_MAX + 5):
        claims.tell(3, f"stranger-{n}")
        claims.look()
        claims.found(0)
    assert len(claims.refuted) == REFUTED_MAX and "stranger-0" not in claims.refuted


def test_who_told_of_the_highest_is_named() -> None:
    claims = told(("a", 3), ("b", 7))
    claims.look()
    assert claims.found(2) == "b"
