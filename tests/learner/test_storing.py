"""A place that hangs is waited for within a limit, and holds one thread."""

import asyncio
import threading
import time

import pytest

from diloco_learner.recovery import checkpoint_io as storing
from diloco_learner.recovery.checkpoint_io import Storing


async def test_what_is_stored_is_waited_for_and_its_fault_is_raised() -> None:
    store, written = Storing(), []
    await store(8, written.append, b"x")
    assert written == [b"x"]
    with pytest.raises(OSError, match="no such place"):
        await store(8, _fails)


def _fails() -> None:
    raise OSError("no such place")


async def test_a_place_that_hangs_is_given_up_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "STORED_S_MIN", 0.01)
    store, answers, tries = Storing(), threading.Event(), []

    def hangs() -> None:
        tries.append(1)
        answers.wait()
        raise OSError("nobody asks any more")

    try:
        for why in ("not answer within", "still hangs", "still hangs"):
            with pytest.raises(OSError, match=why):
                await store(8, hangs)
        assert len(tries) == 1, "no thread more"
    finally:
        answers.set()
    monkeypatch.setattr(storing, "STORED_S_MIN", 60.0)
    while True:
        try:
            await store(8, tries.append, 2)
            break
        except OSError:
            await asyncio.sleep(0.01)
    assert tries == [1, 2]


async def test_a_large_state_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "STORED_S_MIN", 0.01)
    monkeypatch.setattr(storing, "STORED_BYTES_PER_S", 1)
    await Storing()(60, time.sleep, 0.1)
    monkeypatch.setattr(storing, "STORED_BYTES_PER_S", 10**9)
    await Storing()(60, time.sleep, 0.1, beside_s=60.0)
