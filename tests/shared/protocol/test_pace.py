"""The window opens on fast links, stays small on slow ones, and never causes its own time-out."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.protocol.pace import LATENCY_S, TIMEOUT_S_MAX, Pace


class Link:
    """One chunk after the other at `chunk_s` seconds each, answered `rtt_s` later."""

    def __init__(self, chunk_s: float, rtt_s: float) -> None:
        self.chunk_s = chunk_s
        self.rtt_s = rtt_s

    def send(self, pace: Pace, chunks: int) -> tuple[float, float, int]:
        """Seconds in all, the largest latency, and timeouts."""
        now = free_at = latency_max = 0.0
        sent = timeouts = 0
        flying: list[tuple[float, float]] = []
        while sent < chunks or flying:
            while sent < chunks and len(flying) < pace.window:
                free_at = max(free_at, now) + self.chunk_s
                heapq.heappush(flying, (free_at + self.rtt_s, now))
                timeouts += free_at + self.rtt_s - now > pace.timeout_s
                sent += 1
            now, began = heapq.heappop(flying)
            latency_max = max(latency_max, now - began)
            pace.answered(now - began)
        return now, latency_max, timeouts


def test_a_fast_link_gets_the_whole_window() -> None:
    pace = Pace(window_max=16, timeout_s_min=5.0)
    Link(chunk_s=0.002, rtt_s=0.001).send(pace, 20)
    assert (pace.window, pace.timeout_s) == (16, 5.0)


@pytest.mark.parametrize("rtt_s", [0.0, 0.06, 0.3])
def test_a_wide_long_link_is_filled(rtt_s: float) -> None:
    chunk_s = 0.02
    pace = Pace(window_max=32, timeout_s_min=5.0)
    seconds, _, _ = Link(chunk_s, rtt_s).send(pace, 400)
    assert seconds < 1.2 * (400 * chunk_s + 10 * rtt_s)


@given(st.floats(0.001, 4.0), st.floats(0.0, 0.5))
def test_no_link_makes_chunks_time_out_by_queueing(chunk_s: float, rtt_s: float) -> None:
    seconds, latency_max, timeouts = Link(chunk_s, rtt_s).send(Pace(16, 5.0), 200)
    assert timeouts == 0 or 2 * chunk_s + rtt_s > 5.0
    assert latency_max <= max(3 * (LATENCY_S + chunk_s), 2 * chunk_s) + rtt_s
    # The link is never idle for long: at least 60 % of what it can do.
    assert seconds <= max(200 * chunk_s, 200 * (chunk_s + rtt_s) / 16) / 0.6 + 10 * rtt_s


def test_silence_halves_the_window_and_doubles_the_patience_up_to_a_limit() -> None:
    pace = Pace(window_max=16, timeout_s_min=5.0)
    for _ in range(20):
        pace.answered(0.01)
    seen = []
    for n in range(6):
        pace.timed_out(sent_at=100.0 * n, now=100.0 * n + pace.timeout_s)
        seen.append((pace.window, pace.timeout_s))
    assert seen == [(8, 10.0), (4, 20.0), (2, 40.0), (1, TIMEOUT_S_MAX), (1, TIMEOUT_S_MAX),
                    (1, TIMEOUT_S_MAX)]  # fmt: skip
    pace.answered(0.01)
    assert (pace.window, pace.timeout_s) == (2, 5.0)


def test_chunks_lost_in_one_silence_count_once() -> None:
    pace = Pace(window_max=64, timeout_s_min=5.0)
    for _ in range(70):
        pace.answered(0.01)
    for n in range(64):  # sent within a second, given up one by one
        pace.timed_out(sent_at=n / 64, now=n / 64 + 5.0)
    assert (pace.window, pace.timeout_s) == (32, 10.0)
    pace.answered(0.01)  # of another connection: the silence is over, and still counts once
    pace.timed_out(sent_at=1.0, now=6.1)
    assert (pace.window, pace.timeout_s) == (33, 5.0)
    pace.timed_out(sent_at=7.0, now=12.0)  # what was sent after it meets the next one
    assert (pace.window, pace.timeout_s) == (16, 10.0)


def test_a_refusal_halves_the_window_and_leaves_the_patience() -> None:
    pace = Pace(window_max=16, timeout_s_min=5.0)
    for _ in range(20):
        pace.answered(0.01)
    pace.refused()
    assert (pace.window, pace.timeout_s) == (8, 5.0)


def test_the_window_ends_where_queueing_shows() -> None:
    # 500 MB/s shared with nine others: a tenth of a second is 10 chunks.
    pace = Pace(window_max=64, timeout_s_min=5.0)
    Link(chunk_s=0.01, rtt_s=0.001).send(pace, 1000)
    assert 9 <= pace.window <= 21
    # 1 Gbit/s at 60 ms: 7.5 MB, 15 chunks, are the least; three times that is enough.
    pace = Pace(window_max=64, timeout_s_min=5.0)
    Link(chunk_s=0.0042, rtt_s=0.06).send(pace, 1000)
    assert 15 <= pace.window <= 64


def test_a_window_of_one_stays_one() -> None:
    pace = Pace(window_max=1, timeout_s_min=1.0)
    pace.answered(0.01)
    assert pace.window == 1
    pace.timed_out(0.0, 1.0)
    assert pace.window == 1
