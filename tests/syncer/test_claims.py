"""How often a learner's word alone begins an epoch, and how far ahead one may be."""

import pytest

from diloco_syncer.members import claims as claims_module
from diloco_syncer.members.claims import AGAIN_S, AT_ONCE, EPOCHS_AHEAD_MAX, Claims, too_far


def test_a_word_counts_a_few_times_at_once_and_then_now_and_again_i12() -> None:
    claims = Claims()
    assert [claims.counts("a", 0.0) for _ in range(AT_ONCE + 2)] == [True] * AT_ONCE + [False] * 2
    assert claims.counts("b", 0.0), "of each learner by itself"
    assert not claims.counts("a", AGAIN_S - 1.0)
    assert claims.counts("a", AGAIN_S) and not claims.counts("a", AGAIN_S)


def test_nobody_is_remembered_for_ever_i12() -> None:
    claims = Claims()
    for n in range(100):
        assert claims.counts(f"m{n}", AGAIN_S * n)
    assert list(claims.used_until) == ["m99"]


def test_no_more_are_remembered_than_their_limit_i12(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "WORDS_MAX", 2)
    claims = Claims()
    assert [claims.counts(who, 0.0) for who in "abca"] == [True, True, False, True]
    assert claims.counts("c", 2 * AGAIN_S), "once there is room"


def test_nobody_is_in_an_epoch_far_beyond_the_tape() -> None:
    assert not too_far(3 + EPOCHS_AHEAD_MAX, 3)
    assert too_far(4 + EPOCHS_AHEAD_MAX, 3)
