"""The token bucket under a virtual clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.protocol.pace import BURST_S, TokenBucket

sizes = st.lists(st.integers(1, 600_000), min_size=1, max_size=60)


@given(sizes, st.sampled_from([1_000, 50_000, 10**6, 10**9]), st.data())
def test_no_span_sees_more_than_the_budget(
    chunks: list[int], rate: int, data: st.DataObject
) -> None:
    bucket, now = TokenBucket(rate), 100.0
    went: list[tuple[float, int]] = []
    for size in chunks:
        now += data.draw(st.sampled_from([0.0, 0.0, 0.01, 3.0]))
        while wait_s := bucket.take(size, now):
            now += wait_s
        went.append((now, size))
    slack = rate * BURST_S + max(chunks)
    for i, (began, _) in enumerate(went):
        for ended, _ in went[i:]:
            span = sum(size for at, size in went if began <= at <= ended)
            assert span <= (ended - began) * rate * 1.001 + slack


@given(sizes, st.sampled_from([1_000, 10**6]))
def test_a_busy_sender_gets_its_whole_budget(chunks: list[int], rate: int) -> None:
    bucket, now = TokenBucket(rate), 0.0
    for size in chunks:
        while wait_s := bucket.take(size, now):
            now += wait_s
    assert now <= sum(chunks) / rate * 1.001 + 1e-3


def test_a_wait_is_long_enough() -> None:
    bucket = TokenBucket(1000)
    assert bucket.take(1250, 0.0) == 0.0
    wait_s = bucket.take(1, 0.0)
    assert wait_s == pytest.approx(1.0, abs=1e-4)
    assert bucket.take(1, wait_s) == 0.0


def test_without_a_rate_everything_goes() -> None:
    assert all(TokenBucket().take(10**12, 0.0) == 0.0 for _ in range(3))
    with pytest.raises(ValueError, match="below 0"):
        TokenBucket(-1)
