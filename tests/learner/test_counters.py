"""Counters per fragment: exact sums over intervals, and only the adopted fragment starts again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_learner.exchange.counters import Counters

FRAGMENTS = 3


def test_only_the_adopted_fragment_starts_again() -> None:
    c = Counters([0, 0, 0])
    c.stepped(10)
    c.stepped(20)
    c.adopt(1, 1)
    c.stepped(5)
    assert [c.c_steps(p) for p in range(3)] == [3, 1, 3]
    assert [c.c_tokens(p) for p in range(3)] == [35, 5, 35]
    assert (c.step, c.tokens) == (3, 35)
    assert (c.step_at_P, c.tokens_at_P) == ([0, 2, 0], [0, 30, 0])


def test_versions_only_grow() -> None:
    c = Counters([4, 4, 4])
    with pytest.raises(AssertionError, match="fragment 2: version 4 after 4"):
        c.adopt(2, 4)


def test_a_void_version_counts_nothing_until_the_next_adoption() -> None:
    c = Counters([4, 4, 4])
    c.stepped(10)
    c.void()
    c.stepped(10)
    assert not c.complete
    assert [c.c_steps(p) for p in range(3)] == [0, 0, 0]
    c.adopt(0, 2)
    c.stepped(7)
    assert [c.c_tokens(p) for p in range(3)] == [7, 0, 0]


def test_covers_compares_every_fragment() -> None:
    c = Counters([2, 3, 4])
    assert c.covers((2, 3, 4)) and c.covers((-1, -1, -1))
    assert not c.covers((2, 4, 4))
    assert not c.covers((2, 3))


def sounding(*skipped: bool) -> list[int]:
    """Sound steps after each boundary, where fragment 0 was adopted after five steps. `skipped`:
    whether the fifth step was, and those after it but the newest, of which nobody knows."""
    c = Counters([0])
    for _ in range(5):
        c.stepped(1)
    c.adopt(0, 1)
    found = []
    for one in skipped:
        c.stepped(1, skipped=one)
        found.append(c.c_sound(0))
    return found


def test_who_skips_all_its_steps_after_an_adoption_has_no_sound_one() -> None:
    """However sound the step before it was. The newest is taken to be as the one before it."""
    assert sounding(False, *[True] * 23) == [1] + [0] * 23
    assert sounding(True, *[True] * 23) == [0] * 24
    # One that is sound is enough, and what was skipped before the adoption takes nothing from it.
    assert sounding(True, False, True, True) == [0, 2, 1, 1]
    assert sounding(False, True, True, False, False) == [1, 0, 0, 2, 3]


@given(st.lists(st.booleans(), min_size=2, max_size=30), st.integers(0, 29))
def test_sound_steps_are_those_known_and_perhaps_the_newest(bad: list[bool], at: int) -> None:
    """Of steps of which `bad` tells, all but the newest are known; adopted after the `at`-th."""
    at %= len(bad) - 1
    c = Counters([0])
    for n in range(len(bad)):
        c.stepped(1, skipped=bad[n - 1] if n else False)
        if n + 1 == at:
            c.adopt(0, 1)
    known = sum(not one for one in bad[at:-1])
    assert c.c_sound(0) == known + (not bad[-2])


@given(st.lists(st.tuples(st.integers(0, 500), st.sampled_from([-1, 0, 1, 2])), max_size=60))
def test_counts_are_the_sums_over_the_interval_since_adoption(
    history: list[tuple[int, int]],
) -> None:
    c = Counters([0] * FRAGMENTS)
    since: list[list[int]] = [[] for _ in range(FRAGMENTS)]
    for tokens, adopted in history:
        c.stepped(tokens)
        for fragment in since:
            fragment.append(tokens)
        if adopted >= 0:
            c.adopt(adopted, c.adopted_P[adopted] + 1)
            since[adopted] = []
    assert [c.c_steps(p) for p in range(FRAGMENTS)] == [len(s) for s in since]
    assert [c.c_tokens(p) for p in range(FRAGMENTS)] == [sum(s) for s in since]
    assert c.tokens == sum(tokens for tokens, _ in history)
