"""A host that follows, with a process 0 that a test plays: what ends it, and what does not."""

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from waiting import wait_until

from diloco_learner.hosts import following_io, plan
from diloco_learner.hosts.carrying_io import ERRAND
from diloco_learner.hosts.following_io import ORDERS_MAX, LeadingHost
from diloco_learner.hosts.link_io import (
    UNACKNOWLEDGED_S_MIN,
    close,
    head_of,
    receive,
    send,
    values_of,
)
from diloco_learner.hosts.place import HostPlace

PATIENCE_S = 30.0
SILENCE_S = 1.0


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why this process would have ended."""
    found: list[str] = []
    monkeypatch.setattr(following_io, "end", lambda why, status: found.append(why))
    return found


@pytest.fixture
def follower(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LeadingHost, socket.socket]]:
    """One that listens, and the connection on which process 0 gives it orders."""
    monkeypatch.setattr(following_io, "BEAT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as server:
        leader = LeadingHost(HostPlace(2, 1, "127.0.0.1", server.getsockname()[1]))
        joining = threading.Thread(target=leader.join)
        joining.start()
        orders, answers = server.accept()[0], server.accept()[0]
        for sock in (orders, answers):
            assert values_of(receive(sock)[0])[0] == "hello"
        send(orders, head_of("welcome", "nowhere", SILENCE_S))
        joining.join(PATIENCE_S)
    leader.listen()
    yield leader, orders
    leader.over.set()
    close(orders, answers, leader.reading, leader.writing, leader.answering)


def told_pieces(orders: socket.socket, many: int) -> None:
    """As an anchor is handed out: one order for each piece, and nobody waits for an answer."""
    for n in range(1, many + 1):
        send(orders, plan.encode(n, plan.Hold(7, 0, n)), [memoryview(b"a")])


def test_one_that_computes_while_pieces_of_anchors_come_does_not_take_process_0_for_dead(
    follower: tuple[LeadingHost, socket.socket], ended: list[str]
) -> None:
    """Signs of life wait behind orders that it does not take up."""
    leader, orders = follower
    many = 3 * ORDERS_MAX
    told_pieces(orders, many)
    wait_until(leader.orders.full, "a queue that is full")
    since = leader.hearing.looked_at
    wait_until(
        lambda: leader.hearing.looked_at > since + 2 * SILENCE_S or ended, "a long computation"
    )
    assert ended == []
    told = leader.told()
    assert [next(told)[0] for _ in range(many)] == list(range(1, many + 1))


def test_one_that_computes_while_pieces_of_anchors_come_notices_the_end_of_process_0(
    follower: tuple[LeadingHost, socket.socket], ended: list[str]
) -> None:
    leader, orders = follower
    told_pieces(orders, 3 * ORDERS_MAX)
    wait_until(leader.orders.full, "a queue that is full")
    orders.close()
    wait_until(lambda: bool(ended), "the end", patience_s=PATIENCE_S)
    assert ended[0].startswith("process 0 of this island is gone: ")


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_a_machine_of_process_0_that_is_gone_shows_by_what_it_does_not_acknowledge(
    follower: tuple[LeadingHost, socket.socket],
) -> None:
    """Also to one that computes, behind whose orders signs of life wait."""
    leader, _ = follower
    limit_ms = leader.writing.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit_ms == 1000 * max(leader.hearing.limit_s, UNACKNOWLEDGED_S_MIN)


def test_signs_of_life_are_no_orders_and_orders_come_with_what_belongs_to_them(
    follower: tuple[LeadingHost, socket.socket], ended: list[str]
) -> None:
    leader, orders = follower
    since = leader.hearing.heard_at
    for _ in range(2):
        send(orders, head_of("alive"))
    told_pieces(orders, 1)
    wait_until(lambda: not leader.orders.empty() or bool(ended), "an order")
    number, order, data = leader.orders.get_nowait()
    assert (number, order, bytes(data)) == (1, plan.Hold(7, 0, 1), b"a")
    assert ended == [] and leader.hearing.heard_at > since


def test_who_reads_on_says_so_with_a_sign_of_life(
    follower: tuple[LeadingHost, socket.socket], ended: list[str]
) -> None:
    """One by one: who reads no further does not go on saying it."""
    leader, orders = follower
    orders.settimeout(PATIENCE_S)
    for _ in range(2):
        leader.reads.moved()
        said: list[str] = []
        while said[-1:] != ["reads"]:
            said.append(values_of(receive(orders)[0])[0])
        for _ in range(3):
            said.append(values_of(receive(orders)[0])[0])
        assert said.count("reads") == 1 and said[-3:] == ["alive"] * 3
    assert ended == []


def test_what_is_to_be_carried_goes_to_who_carries(
    follower: tuple[LeadingHost, socket.socket], ended: list[str]
) -> None:
    leader, orders = follower
    carried: list[tuple[object, ...]] = []
    leader.carrier = SimpleNamespace(told=lambda *values: carried.append(values))  # type: ignore[assignment]
    send(orders, head_of(ERRAND, "give", 7, "up.r.a"))
    wait_until(lambda: bool(carried) or bool(ended), "an errand")
    assert carried == [("give", 7, "up.r.a")] and ended == []
