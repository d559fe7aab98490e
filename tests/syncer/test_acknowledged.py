"""What the message server took may be gone: when to look, and what can be put there again."""

import pytest

from diloco_syncer.merging.acknowledged import Acknowledged, torn, with_coming


def test_a_new_leader_looks_through_what_was_left_to_it() -> None:
    known = Acknowledged()
    assert known.doubted
    known.found((7, "dn.7"), "life 1")
    assert not known.doubted


def test_a_sequence_that_comes_again_tells_of_a_loss() -> None:
    """Two publications came after the power cut: the newest of before is there again by number."""
    known = Acknowledged()
    known.found((7, "dn.7"), "life 1")
    known.took(8, "dn.8", "life 1")
    assert not known.doubted
    known.took(8, "dn.8 again", "life 1")
    assert known.doubted
    assert known.newest == (8, "dn.8 again")


def test_another_life_of_the_server_tells_of_a_loss() -> None:
    """The chunks of the next publication took the sequences that came again: its own is new."""
    known = Acknowledged()
    known.found((7, "dn.7"), "life 1")
    known.took(9, "dn.9", "life 2")
    assert known.doubted
    known.found((9, "dn.9"), "life 2")
    known.took(11, "dn.11", "life 2")
    assert not known.doubted


def test_a_look_through_that_began_in_an_earlier_life_is_not_the_last_one() -> None:
    known = Acknowledged()
    known.found((7, "dn.7"), "life 1")
    known.took(9, "dn.9", "life 2")
    known.found((9, "dn.9"), "life 1")
    known.took(11, "dn.11", "life 2")
    assert known.doubted


@pytest.mark.parametrize(
    ("head", "whole", "seen", "coming", "expected"),
    [
        (5, 5, 5, {}, False),
        (5, 4, 4, {}, False),  # put again under its own subject
        (5, 3, 5, {}, True),  # a difference whose base is gone
        (5, 4, 4, {5: False}, False),  # a difference on its way, to what is there
        (5, 3, 3, {5: False}, True),
        (5, 3, 3, {5: True}, False),  # a keyframe on its way
        (5, 3, 3, {4: True, 5: False}, False),  # so is what it builds on
        (5, 3, 3, {4: False, 5: False}, False),
    ],
)
def test_only_what_stands_without_its_base_cannot_be_put_again(
    head: int, whole: int, seen: int, coming: dict[int, bool], expected: bool
) -> None:
    assert torn(head, *with_coming(whole, seen, coming)) is expected
