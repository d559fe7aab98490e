"""Whether a series of the soak grows (bench/storms/growth.py)."""

import pytest
from storms import growth
from storms.growth import Series, verdicts

from diloco_shared.budget.streams import RECORDS_IN_STREAM

# Of three learners' rounds as docs/results/soak.json has them, in bytes; and of an hour.
RECORD, HOUR_S, ROUNDS = 1604, 3600.0, 22_000


def sizes(tape: list[float]) -> Series:
    """So many looks in an hour."""
    return [(n * HOUR_S / len(tape), size, 0.0) for n, size in enumerate(tape)]


def flat(name: str, series: Series) -> bool:
    (row,) = verdicts({name: series})
    return bool(row["flat"])


def test_a_tape_that_keeps_all_its_records_is_not_flat() -> None:
    grows = [RECORD * ROUNDS * n / 100 for n in range(100)]
    assert not flat("stream TAPE-soak", sizes(grows))


def test_a_tape_may_fill_up_to_what_it_may_hold() -> None:
    """A short run archives nothing; a long one does so again and again."""
    short = [RECORD * RECORDS_IN_STREAM * n / 100 for n in range(100)]
    assert flat("stream TAPE-soak", sizes(short))
    saw = [RECORD * (RECORDS_IN_STREAM + 400 * (n % 7)) for n in range(100)]
    assert flat("stream TAPE-soak", sizes(saw))


def test_a_bound_of_records_is_none_of_bytes_of_other_streams() -> None:
    bounds = {
        name: verdicts({name: sizes([1.0] * 20)})[0]["bound"]
        for name in ("stream TAPE-soak", "stream UP-soak")
    }
    assert bounds["stream UP-soak"] == growth.SLACK["stream"] != bounds["stream TAPE-soak"]
    assert bounds["stream TAPE-soak"] == growth.TAPE_BYTES


@pytest.mark.parametrize("name", ["stream EVENTS"])
def test_events_have_the_limit_of_their_stream(name: str) -> None:
    assert verdicts({name: sizes([float(n << 20) for n in range(50)])}) == []
