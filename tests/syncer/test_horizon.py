"""What may be purged: nothing that a later round may have brought."""

from diloco_syncer.streams.room import Horizon


def test_the_first_pull_of_the_next_round_is_the_limit() -> None:
    horizon = Horizon()
    horizon.pulled(4, 10)
    horizon.pulled(5, 20)
    horizon.pulled(5, 29)  # sent again
    assert horizon.below(4, up_seq=33) == 21


def test_of_several_later_rounds_the_one_pulled_first_is_the_limit() -> None:
    horizon = Horizon()
    for n, up_seq in ((5, 20), (6, 25), (7, 25)):
        horizon.pulled(n, up_seq)
    assert horizon.below(4, up_seq=33) == 21
    assert horizon.below(5, up_seq=33) == 26


def test_a_round_skipped_without_a_pull_does_not_open_the_way_for_later_ones() -> None:
    horizon = Horizon()
    horizon.pulled(6, 20)  # round 5 had nobody to ask
    assert horizon.below(4, up_seq=33) == 21


def test_without_a_later_pull_everything_seen_may_go() -> None:
    horizon = Horizon()
    horizon.pulled(4, 10)
    assert horizon.below(4, up_seq=33) == 34


def test_covered_rounds_are_forgotten() -> None:
    horizon = Horizon()
    for n in range(100):
        horizon.pulled(n, n)
    horizon.below(97, up_seq=200)
    assert sorted(horizon.floor) == [98, 99]


def test_sequences_that_come_again_belong_to_the_rounds_of_now() -> None:
    """UP lost everything after 12: what stands at 13 from now on may be of round 5."""
    horizon = Horizon()
    horizon.pulled(4, 10)
    horizon.pulled(5, 20)
    horizon.rewound(12)
    assert horizon.below(4, up_seq=15) == 13
