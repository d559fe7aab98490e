"""Every range once, whichever thread takes it; errors reach the caller."""

import threading

import pytest

from diloco_shared.numerics.compiled import parallel_for


@pytest.mark.parametrize(("ranges", "threads"), [(1, 4), (5, 1), (7, 3), (1000, 2)])
def test_every_range_is_worked_on_once(ranges: int, threads: int) -> None:
    done: list[int] = []
    parallel_for(lambda first, last: done.extend(range(first, last)), ranges, threads)
    assert sorted(done) == list(range(ranges))


def test_threads_work_side_by_side() -> None:
    both = threading.Barrier(2, timeout=30)
    met = threading.local()

    def work(first: int, last: int) -> None:
        if not hasattr(met, "other"):
            met.other = both.wait()

    parallel_for(work, 100, 2)


def test_an_error_is_raised_when_nobody_works_any_more() -> None:
    started = threading.Event()
    working: list[int] = []

    def work(first: int, last: int) -> None:
        if first == 0:
            assert started.wait(30)
            raise ValueError("bad share")
        working.append(first)
        started.set()
        working.remove(first)

    with pytest.raises(ValueError, match="bad share"):
        parallel_for(work, 64, 2)
    assert not working


def test_merges_at_the_same_time_do_not_wait_for_each_others_helpers() -> None:
    def merge(done: list[int]) -> None:
        parallel_for(lambda first, last: done.extend(range(first, last)), 300, 2)

    several: list[list[int]] = [[] for _ in range(8)]
    threads = [threading.Thread(target=merge, args=(done,)) for done in several]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(sorted(done) == list(range(300)) for done in several)
