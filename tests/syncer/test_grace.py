"""How long to wait: moving averages, Eq. 3, and the timeout that doubles."""

from typing import Any

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.events import Wanted
from diloco_syncer.rounds.grace import Average, Timings, grace_s, pull_timeout_s, stragglers_s

quick = examples(60)


def timings(**seconds: float) -> Timings:
    seen = Timings()
    for name, value in seconds.items():
        getattr(seen, name).update(value)
    return seen


def test_an_average_begins_with_its_first_sample_and_moves_a_quarter() -> None:
    average = Average()
    assert average.value is None and average.or_zero == 0.0
    average.update(8.0)
    assert average.value == 8.0
    average.update(4.0)
    assert average.value == 7.0
    assert average.or_zero == 7.0


@quick
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_an_average_stays_within_its_samples(samples: list[float]) -> None:
    average = Average()
    for sample in samples:
        average.update(sample)
    assert min(samples) * (1 - 1e-9) <= average.or_zero <= max(samples) * (1 + 1e-9)


def test_equation_three_by_hand() -> None:
    seen = timings(quorum=3.0, sync=2.0)
    given_ = {"factor": 0.5, "overlap_steps": 2, "step_s": 10.0, "timings": seen}
    assert grace_s(**given_, limit_s=60.0) == 0.5 * (20 - 3 - 2)  # type: ignore[arg-type]
    assert grace_s(**given_, limit_s=5.0) == 5.0  # type: ignore[arg-type]


@quick
@given(
    st.floats(0, 1),
    st.integers(0, 10),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
)
def test_a_window_is_never_negative_nor_beyond_its_limit(
    factor: float, overlap: int, step_s: float, quorum_s: float, sync_s: float, limit_s: float
) -> None:
    seen = timings(quorum=quorum_s, sync=sync_s)
    window = grace_s(
        factor=factor, overlap_steps=overlap, step_s=step_s, timings=seen, limit_s=limit_s
    )
    assert 0.0 <= window <= limit_s
    # With no step to overlap, every second of waiting would be felt.
    if overlap == 0:
        assert window == 0.0


def test_stragglers_get_what_publication_leaves() -> None:
    settings_ = {"factor": 0.5, "overlap_steps": 2, "step_s": 10.0}
    assert stragglers_s(**settings_, timings=timings(publish=4.0)) == 8.0  # type: ignore[arg-type]
    assert stragglers_s(**settings_, timings=timings(publish=40.0)) == 0.0  # type: ignore[arg-type]


def test_the_pull_timeout_doubles_with_every_skip_up_to_its_limit() -> None:
    def timeout(transfer_s: float, skips: int) -> float:
        return pull_timeout_s(transfer_s=transfer_s, skips=skips, least_s=2.0, limit_s=300.0)

    assert [timeout(0.0, n) for n in range(4)] == [2.0, 4.0, 8.0, 16.0]
    assert timeout(5.0, 0) == 20.0
    assert timeout(0.0, 8) == timeout(0.0, 10**9) == 300.0
    assert timeout(100.0, 0) == timeout(100.0, 9) == 400.0, "what four transfers take is given"


def pulled(running: Any) -> float:
    """Wait for the first round's pull: seconds since it opened."""
    (opened,) = running.machine.rounds.open
    while not running.pulls:
        running.wait(0.05)
    return float(running.now - opened.opened_at)


def test_a_record_tells_how_long_quorum_and_answers_took(running: Any) -> None:
    running.wait(0.5)
    running.step("a", 8)
    running.wait(2.0)
    running.step("b", 8)
    pulled(running)
    running.answer(running.pulls[0], "a")
    running.wait(0.25)
    running.answer(running.pulls[0], "b")
    (record,) = running.rounds
    assert (record.outcome, record.quorum_s) == ("committed", 2.0)
    assert abs(record.sync_s - 0.25) <= 0.05


def test_a_record_tells_how_long_others_were_given(running: Any) -> None:
    running.give(Wanted(paused=False, stopping=False, quorum=1))
    running.wait(0.5)
    running.step("a", 8)
    waited = pulled(running)
    running.answer(running.pulls[0], "a")
    running.wait(60.0)
    (record,) = running.rounds
    assert (record.outcome, record.quorum_s) == ("committed", 0.0)
    assert record.grace_s > 0 and abs(record.grace_s - waited) <= 0.05
