"""Storing a payload over lanes: what is sent again, in which order, and after which pauses."""

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from diloco_shared.bus.nats import lane_put
from diloco_shared.bus.nats.lane_put import PAUSES_S, FirstPace, Sending
from diloco_shared.bus.nats.lane_socket import LaneBroken
from diloco_shared.bus.nats.wire import Arrived, WireMessage
from diloco_shared.bus.port import Refused, StreamFull, Traffic, TransferProgress, Unavailable
from diloco_shared.bus.repeating import pause_after
from diloco_shared.protocol.chunks import cut

PAYLOAD = bytes(range(100))
CHUNK = 10  # bytes: ten chunks
Answer = dict[str, Any] | None


class Freely:
    """A budget that anything may be sent within."""

    def take(self, size: int) -> float:
        return 0.0


class Lane:
    """A connection whose server answers as it is told: an answer each, None for none."""

    inbox, life, backlog, payload_bytes_max = "inbox", "life", 0, 1 << 20

    def __init__(self, answer: Callable[[int], Answer]) -> None:
        self.answer = answer
        self.sent: list[int] = []
        self.ids: list[str] = []
        self.answers: deque[Arrived] = deque()
        self.most = 0  # unanswered at a time
        self.aborted = False

    def send(self, head: bytes, data: memoryview, end: bytes) -> None:
        said = head.decode()
        index = int(said.split()[2].rpartition(".")[2])
        assert data == PAYLOAD[index * CHUNK : (index + 1) * CHUNK] and end == b"\r\n"
        self.ids += re.findall(r"Nats-Msg-Id: (\S+)", said)
        self.sent.append(index)
        answered = self.answer(index)
        if answered is not None:
            reply, status = said.split()[2], answered.get("status", 0)
            headers = {"Status": str(status)} if status else {}
            body = memoryview(json.dumps(answered).encode())
            self.answers.append(Arrived(WireMessage(reply, "", headers, len(body)), body))
        self.most = max(self.most, len(self.answers))

    def wait(self, timeout_s: float) -> bool:
        if not self.answers:
            time.sleep(min(timeout_s, 0.005))
        return bool(self.answers)

    def receive(self) -> Iterator[Arrived]:
        yield self.answers.popleft()

    def abort(self) -> None:
        self.aborted = True


def stored(index: int) -> Answer:
    return {"stream": "S", "seq": index + 1}


class Sent:
    """A payload on its way over lanes that a test makes; the pauses in between are told."""

    def __init__(self, *lanes: Any, window: int = 4, timeout_s_min: float = 5.0) -> None:
        self.lanes = deque(lanes)
        self.progress = TransferProgress()
        self.pauses: list[float] = []
        outgoing = cut("s.a", PAYLOAD, chunk_bytes=CHUNK)
        self.sending = Sending(
            outgoing,
            range(outgoing.blob.chunks),
            self.progress,
            Freely(),
            Traffic(),
            self.connect,
            message_id="mine/{}".format,
            first_pace=FirstPace(window, timeout_s_min),
        )
        self.sending._sleep = self.pauses.append  # type: ignore[method-assign]

    @contextmanager
    def connect(self) -> Iterator[Any]:
        if not self.lanes:
            self.sending.stopped = True
            raise Unavailable("no more lanes in this test")
        lane = self.lanes.popleft()
        if lane is None:
            raise Unavailable("the server is away")
        yield lane

    def work(self) -> "Sent":
        self.sending.work()
        return self


def test_all_is_stored_once_and_no_more_than_the_window_is_unanswered() -> None:
    lane = Lane(stored)
    sent = Sent(lane, window=3).work()
    assert sorted(lane.sent) == list(range(10)) == sorted(sent.progress.took)
    assert set(sent.progress.took.values()) == {"life"}
    assert (lane.most, lane.aborted, sent.pauses) == (3, False, [])


def test_what_was_flying_when_a_connection_broke_goes_first_over_the_next() -> None:
    """Under the same ids, so that the server stores none of them twice."""
    first = Lane(lambda index: stored(index) if index < 3 else None)
    second = Lane(stored)
    sent = Sent(first, second, timeout_s_min=0.05).work()
    flying = first.sent[3:]
    assert flying == sorted(flying) and len(flying) > 1
    assert second.sent == list(range(3, 10)), "in their order, and nothing else again"
    assert first.ids[3:] == second.ids[: len(flying)]
    assert len({*first.ids, *second.ids}) == 10
    assert all(name.startswith("mine/") for name in first.ids), "those that nobody can guess"
    assert sent.progress.trouble.startswith("no answer within")
    assert sent.pauses == [PAUSES_S[0]], "something was stored: the first pause"


def test_a_server_that_stays_away_is_asked_less_and_less() -> None:
    sent = Sent(*[None] * 8).work()
    wanted = [pause_after(failures, PAUSES_S) for failures in range(1, 10)]
    assert sent.pauses == wanted
    assert sent.progress.trouble == "no more lanes in this test"


def test_a_full_stream_is_told_and_tried_again_after_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lane_put, "PAUSES_S", (0.02, 0.04))
    refusals: list[float] = []
    full = {"error": {"err_code": 10077, "description": "maximum bytes exceeded"}}
    progress: list[str] = []

    def answer(index: int) -> Answer:
        if len(refusals) < 3:
            refusals.append(time.monotonic())
            return full
        progress.append(sent.progress.full)
        return stored(index)

    lane = Lane(answer)
    sent = Sent(lane, window=1)
    sent.work()
    assert lane.sent == [0, 0, 0, *range(10)]
    assert refusals[1] - refusals[0] >= 0.02 and refusals[2] - refusals[1] >= 0.04
    assert "maximum bytes exceeded" in progress[0] and progress[-1] == "" == sent.progress.full
    assert sent.sending.failure is None


@pytest.mark.parametrize("code", [10077, 10009])
def test_a_refusal_that_passes_is_no_failure(code: int) -> None:
    said = [{"error": {"err_code": code, "description": "not now"}}]
    lane = Lane(lambda index: said.pop() if said else stored(index))
    sent = Sent(lane).work()
    assert sent.sending.failure is None and sorted(sent.progress.took) == list(range(10))


def test_no_stream_there_passes_too() -> None:
    said = [{"status": 503}]
    lane = Lane(lambda index: said.pop() if said else stored(index))
    assert sorted(Sent(lane).work().progress.took) == list(range(10))


def test_a_refusal_for_good_ends_it() -> None:
    no = {"error": {"err_code": 10060, "description": "expected stream does not match"}}
    sent = Sent(Lane(lambda index: no)).work()
    assert isinstance(sent.sending.failure, Refused)
    assert not isinstance(sent.sending.failure, StreamFull) and not sent.progress.took


def test_chunks_that_the_server_would_not_take_are_not_sent() -> None:
    lane = Lane(stored)
    lane.payload_bytes_max = 2048 + CHUNK - 1
    sent = Sent(lane).work()
    assert isinstance(sent.sending.failure, Refused) and lane.sent == []
    lane.payload_bytes_max += 1
    assert Sent(lane).work().sending.failure is None


def test_a_connection_that_is_left_with_answers_to_come_is_not_used_again() -> None:
    lane = Lane(lambda index: None)

    def stop(timeout_s: float) -> bool:
        sent.sending.stopped = True
        return False

    lane.wait = stop  # type: ignore[method-assign]
    sent = Sent(lane, window=2)
    sent.work()
    assert lane.aborted and lane.sent == [0, 1]


def test_an_answer_to_somebody_elses_chunk_is_none() -> None:
    lane = Lane(stored)
    foreign = WireMessage("inbox.other.0", "", {}, 2)
    lane.answers.append(Arrived(foreign, memoryview(b"{}")))
    sent = Sent(lane).work()
    assert sorted(sent.progress.took) == list(range(10)) and not sent.progress.trouble


def test_silence_on_a_connection_breaks_it() -> None:
    lane = Lane(lambda index: None)
    sender = lane_put._Sender(Sent().sending, lane, lane_put.Pace(4, 0.05))  # type: ignore[arg-type]
    with pytest.raises(LaneBroken, match=r"no answer within 0\.\d s"):
        sender.run()
