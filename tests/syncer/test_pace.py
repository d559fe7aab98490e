"""How long a learner's steps take, by its word and by the leader's clock."""

from syncer.test_roster import report

from diloco_syncer.members.pace import FIRST_STEPS, MARGIN, REPORTS, LifePace


def paced(*heard: tuple[float, int], step_s: float = 1.0) -> LifePace:
    """Of one whose reports came at these times, with these steps."""
    pace = LifePace()
    for at, step in heard:
        pace.saw(report("a", 0, "stepping", 0, step).model_copy(update={"step_s": step_s}), at)
    return pace


def test_its_word_counts_as_long_as_the_clock_does_not_gainsay_it() -> None:
    pace = paced((0.0, 10), (1.3, 11), (2.6, 12))
    assert pace.least_s(2.6) == pace.borne_out_s(2.6) == 1.0, "some of the time is not computing"


def test_steps_that_take_no_time_in_words_are_as_long_as_they_are_seen_to_be() -> None:
    pace = paced((0.0, 10), (16.0, 11), (32.0, 12), step_s=1e-6)
    assert pace.least_s(32.0) == 16.0 / MARGIN
    at_once = paced((0.0, 10), (32.0, 11), (32.0, 12), step_s=1e-6)
    assert at_once.least_s(32.0) == 16.0 / MARGIN, "two reports at once make no quick step"


def test_one_that_stands_still_is_not_quick() -> None:
    assert paced((0.0, 10), step_s=1e-6).least_s(30.0) == 30.0 / MARGIN
    assert paced((0.0, 10), (1.0, 11), (2.0, 12), step_s=1e-6).least_s(62.0) == 31.0 / MARGIN


def test_steps_that_take_a_day_in_words_are_borne_out_by_the_clock_or_not() -> None:
    pace = paced((0.0, 10), (1.0, 11), (2.0, 12), step_s=86_400.0)
    assert pace.borne_out_s(2.0) == 1.0 * MARGIN
    assert pace.least_s(2.0) == 86_400.0


def test_its_word_counts_until_the_clock_has_seen_whole_steps() -> None:
    """As after a takeover: the new leader has heard of it for seconds."""
    hour_s = 3600.0
    assert paced((0.0, 40), step_s=hour_s).borne_out_s(2.0) == hour_s
    assert paced((0.0, 40), (5.0, 41), step_s=hour_s).borne_out_s(6.0) == hour_s
    after = paced((0.0, 40), (5.0, 41), (5.0 + hour_s, 42), step_s=hour_s)
    assert after.borne_out_s(5.0 + hour_s) > 0.7 * hour_s


def test_what_had_waited_on_its_way_and_comes_at_once_makes_no_quick_steps() -> None:
    cut_off = [(500.0 + n / 25, 3 + n) for n in range(1, 2 * REPORTS)]
    pace = paced((0.0, 1), (8.0, 2), (16.0, 3), *cut_off, step_s=8.0)
    assert pace.borne_out_s(502.0) == pace.least_s(502.0) >= 8.0
    assert paced((0.0, 7), (0.1, 30), (0.2, 60), step_s=8.0).borne_out_s(1.0) == 8.0
    from_0 = [(n / 50, n) for n in range(8)]  # the first of them said that it recovers
    assert paced(*from_0, step_s=8.0).borne_out_s(0.3) == 8.0
    quick = [(500.0 + n / 25, n) for n in range(3, 4 * REPORTS)]
    assert paced(*quick, step_s=3600.0).borne_out_s(quick[-1][0]) < 0.1, "it goes on so"


def test_nobody_is_slow_in_the_first_moments_after_a_pause() -> None:
    """All steps of a moment are one hearing: how many they were is known from the next one on."""
    quick = [(n / 50, 9 + n) for n in range(1, 24)]
    assert paced(*quick, step_s=0.02).least_s(0.46) == 0.02


def test_first_steps_compile_and_tell_nothing_of_the_next_ones() -> None:
    first = ((0.0, 0), (600.0, 1), (610.0, FIRST_STEPS))
    assert paced(*first).least_s(610.0) == 1.0
    assert paced(*first, step_s=1200.0).borne_out_s(610.0) > 450.0, "but that it took so long"
    pace = paced(*first, (611.0, 3), (612.0, 4))
    assert pace.least_s(612.0) == 1.0 and pace.seen_s(612.0) == 1.0


def test_only_the_newest_reports_count_and_none_from_before_a_pause() -> None:
    slow = [(10.0 * n, n) for n in range(10, 20)]
    quick = [(190.0 + n, 19 + n) for n in range(1, REPORTS + 1)]
    assert paced(*slow, *quick).seen_s(190.0 + REPORTS) == 1.0
    pace = paced(*slow)
    pace.saw(report("a", 0, "paused", 0, 19), 500.0)
    pace.saw(report("a", 0, "stepping", 0, 20), 501.0)
    assert pace.seen_s(501.0) == 1.0
