"""How `up` keeps its message server, and its own place on it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.up import stack as stack_module
from diloco_cli.up.stack import EachLearner, Stack
from diloco_shared.bus.port import Unavailable
from diloco_shared.hub.nats_binary import BinaryError

pytestmark = pytest.mark.virtual


class Ended(Exception):
    """Of a test: it has seen enough."""


def stack_of(folder: Path, **nats: Any) -> Stack:
    stack = Stack(folder, learners=1, port=0, chaos=False, each=EachLearner())
    stack.nats = SimpleNamespace(url="nats://x", **nats)  # type: ignore[assignment]
    return stack


async def test_a_message_server_that_does_not_start_is_tried_again_and_each_time_told(
    tmp_path: Path,
) -> None:
    troubles: list[Exception | None] = [BinaryError("port taken"), OSError("no room"), None]
    ended = iter([9, Ended()])

    async def start() -> None:
        if trouble := troubles.pop(0):
            raise trouble

    async def wait() -> int:
        if isinstance(code := next(ended), Exception):
            raise code
        return code

    stack = stack_of(tmp_path, start=start, wait=wait)
    began = asyncio.get_running_loop().time()
    with pytest.raises(Ended):
        await stack._keep_nats()
    pause_s = stack_module.NATS_PAUSE_S + 2 * stack_module.NATS_RETRIES[0]
    assert asyncio.get_running_loop().time() - began == pytest.approx(pause_s)
    assert [said.partition(" ")[2] for said in stack.messages] == [
        "nats ended (9), starting again",
        "nats does not start: port taken",
        "nats does not start: no room",
    ]
    assert stack.nats_restarts == 1 and not troubles


async def test_a_fault_of_ours_is_no_reason_to_try_again(tmp_path: Path) -> None:
    async def start() -> None:
        raise Ended

    async def wait() -> int:
        return 0

    with pytest.raises(Ended):
        await stack_of(tmp_path, start=start, wait=wait)._keep_nats()


async def test_the_supervisor_becomes_a_member_once_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[Exception] = [Unavailable("nobody there"), Unavailable("not yet"), Ended()]

    async def connect(url: str, *, name: str) -> Any:
        assert (url, name) == ("nats://x", "supervisor")
        raise troubles.pop(0)

    monkeypatch.setattr(stack_module.NatsBus, "connect", connect)
    stack = stack_of(tmp_path)
    with pytest.raises(Ended):
        await stack._be_member()
    assert [said.partition(" ")[2] for said in stack.messages] == [
        "the supervisor is no member yet: nobody there",
        "the supervisor is no member yet: not yet",
    ]


@pytest.mark.parametrize(("lasts", "ends_at"), [((10.0, 10.0), 14.0), ((10.0, 1.0), 10.0)])
async def test_a_hang_of_the_message_server_is_over_with_the_last_of_those_that_were_asked_for(
    tmp_path: Path, lasts: tuple[float, float], ends_at: float
) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    began, resumed = loop.time(), list[float]()

    def resume() -> None:
        resumed.append(loop.time() - began)
        over.set()

    stack = stack_of(tmp_path, running=True, pause=lambda: None, resume=resume)
    first, second = stack._abilities(), stack._abilities()  # of two lives as a member
    assert first.hang and second.hang
    first.hang(lasts[0])
    await asyncio.sleep(4.0)
    second.hang(lasts[1])
    await over.wait()
    assert resumed == [pytest.approx(ends_at)]
    second.hang(1.0)
    over.clear()
    await over.wait()
    assert resumed[1:] == [pytest.approx(ends_at + 1.0)]


async def test_a_hang_is_over_with_the_server_that_hangs(tmp_path: Path) -> None:
    """It was killed, and the next one stands still for as long as it is asked to alone."""
    loop, resumed = asyncio.get_running_loop(), list[float]()
    began, ended = loop.time(), iter([9, Ended()])

    async def wait() -> int:
        if isinstance(code := next(ended), Exception):
            raise code
        return code

    async def start() -> None:
        pass

    def resume() -> None:
        resumed.append(loop.time() - began)

    over: dict[str, Any] = {"running": True, "pause": lambda: None, "resume": resume}
    stack = stack_of(tmp_path, start=start, wait=wait, **over)
    abilities = stack._abilities()
    assert abilities.hang
    abilities.hang(30.0)
    with pytest.raises(Ended):
        await stack._keep_nats()
    abilities.hang(5.0)
    await asyncio.sleep(40.0)
    assert resumed == [pytest.approx(stack_module.NATS_PAUSE_S + 5.0)]
