"""Process 0's connections, with hosts that speak their part by hand."""

import asyncio
import math
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from waiting import until, wait_until

from diloco_learner.hosts import following_io, leading_io, plan
from diloco_learner.hosts.carrying_io import ERRAND
from diloco_learner.hosts.leading_io import Hosts
from diloco_learner.hosts.link_io import (
    BadFrame,
    close,
    head_of,
    receive,
    send,
    values_of,
)
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.whole import READS, HostLost
from diloco_shared import VERSION
from diloco_shared.protocol.chunks import Incoming, checks_of, cut

PATIENCE_S = 30.0
STOPPED = -15
LONG_AGO = -1e9


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class ByHand:
    """A host that follows."""

    everybody: ClassVar[list["ByHand"]] = []

    def __init__(self, place: HostPlace, index: int, *, hosts: int = 0) -> None:
        self.sockets = {kind: self._connected(place) for kind in ("orders", "answers")}
        self.everybody.append(self)
        for kind, sock in self.sockets.items():
            many = hosts or place.hosts
            send(sock, head_of("hello", kind, index, many, f"node{index}", VERSION))

    @staticmethod
    def _connected(place: HostPlace) -> socket.socket:
        for _ in range(1000):
            with suppress(ConnectionRefusedError):
                return socket.create_connection((place.address, place.port), PATIENCE_S)
            threading.Event().wait(0.01)
        raise AssertionError("nobody listens")

    def hears(self) -> tuple[tuple[Any, ...], bytes]:
        """The next frame that is no sign of life, and what followed it."""
        while True:
            head, data = receive(self.sockets["orders"])
            values = values_of(head)
            if values != ("alive",):
                return values, bytes(data)

    def says(self, *values: Any) -> None:
        send(self.sockets["orders"], head_of(*values))

    def gives(self, number: int, data: bytes, fault: str = "") -> None:
        send(self.sockets["answers"], head_of(number, fault), [memoryview(data)])

    def dies(self) -> None:
        for sock in self.sockets.values():
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def left() -> Iterator[list[int]]:
    """How this process would have ended: in order, or at once with a status."""
    yield []
    while ByHand.everybody:
        ByHand.everybody.pop().dies()


@pytest.fixture
def hosts(left: list[int]) -> Iterator[Hosts]:
    """Of three, with a silence that no test waits for; not gathered yet."""
    found = Hosts(
        HostPlace(3, 0, "127.0.0.1", free_port()),
        PATIENCE_S,
        stop=lambda: left.append(STOPPED),
        leave=left.append,
    )
    yield found
    found.whole.closing = True
    for host in found.hosts.values():
        host.close()


def gathered(hosts: Hosts) -> list[ByHand]:
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    followers = [ByHand(hosts.place, index) for index in (1, 2)]
    gathering.join(PATIENCE_S)
    assert not gathering.is_alive() and not hosts.missing()
    for follower in followers:
        assert follower.hears()[0] == ("welcome", hosts.meeting, PATIENCE_S)
    return followers


def test_who_waits_for_the_others_hears_signs_of_life_and_may_come_again(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies before all are there is missed, and takes its place anew."""
    monkeypatch.setattr(leading_io, "LOOK_S", 0.02)
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    first = ByHand(hosts.place, 1)
    for _ in range(2):
        assert values_of(receive(first.sockets["orders"])[0]) == ("alive",)
    first.dies()
    wait_until(lambda: not hosts.hosts, "host 1 missed")
    followers = [ByHand(hosts.place, index) for index in (2, 1)]
    gathering.join(PATIENCE_S)
    assert not gathering.is_alive()
    assert [f.hears()[0][0] for f in followers] == ["welcome", "welcome"]


def test_a_host_goes_to_another_process_0_where_the_first_says_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine is gone, which closes no connection."""
    monkeypatch.setattr(following_io, "GATHERING_S", 0.05)
    monkeypatch.setattr(following_io, "AGAIN_S", 0.01)
    monkeypatch.setattr(leading_io, "LOOK_S", 0.01)
    place, came = hosts.place, list[str]()
    leader = following_io.LeadingHost(HostPlace(3, 1, place.address, place.port))
    joining = threading.Thread(target=lambda: came.append(leader.join()))
    with socket.create_server((place.address, place.port)) as server:
        joining.start()
        said_nothing = [server.accept()[0] for _ in range(2)]
        third = server.accept()[0]  # it has given the first up
    for sock in (*said_nothing, third):
        sock.close()
    # Time enough; and some are left if it met both, one with each connection.
    monkeypatch.setattr(following_io, "GATHERING_S", PATIENCE_S / 10)
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    ByHand(place, 2)
    for thread in (joining, gathering):
        thread.join(PATIENCE_S)
    assert came == [hosts.meeting]
    close(leader.reading, leader.writing, leader.answering)


def test_all_hear_the_same_orders_each_with_its_own_part_and_give_theirs(hosts: Hosts) -> None:
    one, two = gathered(hosts)
    assert hosts.tell(plan.Begin()) == 1
    number = hosts.tell(plan.Hold(7, 3, 0), lambda index: [memoryview(b"a" * index)])
    for follower, part in ((one, b"a"), (two, b"aa")):
        assert follower.hears() == ((1, "Begin"), b"")
        assert follower.hears() == ((2, "Hold", 7, 3, 0, ()), part)
    two.gives(number, b"2")
    one.gives(number, b"1")
    assert {n: bytes(data) for n, data in hosts.answers(number).items()} == {1: b"1", 2: b"2"}


def test_an_answer_may_take_as_long_as_more_of_it_comes(hosts: Hosts) -> None:
    """All moments of a large model take longer than anything may stand still."""
    one, two = gathered(hosts)
    number = hosts.tell(plan.Begin())
    two.gives(number, b"2")
    wait_until(lambda: hosts.whole.awaited(number) == [1])
    before_s = hosts._left_s(number, LONG_AGO)
    assert before_s < 0, "an order of long ago"
    head = head_of(number, "")
    one.sockets["answers"].sendall(struct.pack("!IQ", len(head), 2) + head + b"1")
    wait_until(lambda: hosts._left_s(number, LONG_AGO) > 0)
    one.sockets["answers"].sendall(b"1")
    assert bytes(hosts.answers(number)[1]) == b"11"


@pytest.mark.parametrize("number", [1, 2])
def test_who_reads_on_for_an_order_is_waited_for(hosts: Hosts, number: int) -> None:
    """Of weights that all hosts read at once, in a place that is slow: nothing is given meanwhile.
    Another one that does nothing is given up."""
    one, two = gathered(hosts)
    for order in (plan.Prepare("{}", "fsdp=3", -1), plan.Begin())[:number]:
        hosts.tell(order)
    two.gives(number, b"")
    wait_until(lambda: hosts.whole.awaited(number) == [1])
    two.says(READS)
    wait_until(lambda: hosts.whole.moved_at(2) > 0)
    assert hosts._left_s(number, LONG_AGO) < 0, "another host than the one that is waited for"
    one.says(READS)
    wait_until(lambda: hosts._left_s(number, LONG_AGO) > 0)
    one.gives(number, b"")
    assert hosts.answers(number).keys() == {1, 2}


def test_chunks_for_the_hub_are_no_part_of_an_answer(hosts: Hosts) -> None:
    """Whoever carries them may hang in an order all the same."""
    one, two = gathered(hosts)
    number = hosts.tell(plan.Begin())
    two.gives(number, b"2")
    came: list[int] = []
    hosts.carriers.came = lambda index, *_: came.append(index)  # type: ignore[method-assign]
    one.gives(-1, b"chunks")
    wait_until(lambda: came == [1] and hosts.whole.awaited(number) == [1])
    assert not hosts.hosts[1].gives and hosts.hosts[1].moved_at == -math.inf
    assert hosts._left_s(number, LONG_AGO) < 0


def test_a_step_that_waits_comes_before_the_next_piece_of_an_anchor(hosts: Hosts) -> None:
    """Whoever tells many orders in a row lets others tell theirs between two of them."""
    one, two = gathered(hosts)
    stepping = threading.Thread(target=hosts.tell, args=(plan.Step(0.1, False, (2, 9), "int32"),))

    def piece(index: int) -> list[memoryview]:
        if index == 1 and stepping.ident is None:
            stepping.start()
            wait_until(hosts.next_turn.locked, "a step that waits for its turn")
        return [memoryview(b"a")]

    for at in range(3):
        hosts.tell(plan.Hold(7, 3, at), piece)
    stepping.join(PATIENCE_S)
    for follower in (one, two):
        told = [follower.hears()[0][:2] for _ in range(4)]
        assert told == [(1, "Hold"), (2, "Step"), (3, "Hold"), (4, "Hold")]


def test_what_a_host_cannot_get_ready_for_is_told_and_ends_nothing(hosts: Hosts) -> None:
    one, two = gathered(hosts)
    number = hosts.tell(plan.Prepare("{}", "fsdp=3", -1))
    one.gives(number, b"")
    two.gives(number, b"", "ModuleNotFoundError: mine")
    answers = hosts.answers(number)
    assert (bytes(answers[1]), bytes(answers[2])) == (
        b"",
        b"host 2 (node2): ModuleNotFoundError: mine",
    )
    assert not hosts.lost


def test_a_host_that_dies_ends_every_wait_with_its_name(hosts: Hosts, left: list[int]) -> None:
    one, two = gathered(hosts)
    told = threading.Event()
    hosts.when_lost = told.set  # as one that trains
    number = hosts.tell(plan.Copy("0/mu/x"))
    one.gives(number, b"1")
    two.dies()
    with pytest.raises(HostLost, match=r"host 2 \(node2\) is gone: .*The island ends"):
        hosts.answers(number)
    assert told.wait(PATIENCE_S)
    with pytest.raises(HostLost, match=r"host 2 \(node2\)"):
        hosts.tell(plan.Begin())
    assert not left, "whoever trains tells it, and ends by itself"
    assert isinstance(HostLost("x"), OSError), "as any trouble of the network"


def test_a_host_that_says_nothing_counts_as_dead(left: list[int]) -> None:
    hosts = Hosts(
        HostPlace(2, 0, "127.0.0.1", free_port()),
        0.2,
        stop=lambda: left.append(STOPPED),
        leave=left.append,
    )
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    silent = ByHand(hosts.place, 1)
    gathering.join(PATIENCE_S)
    with pytest.raises(HostLost, match=r"host 1 \(node1\) is gone: no sign of life for 0.2 s"):
        hosts.answers(hosts.tell(plan.Begin()))
    silent.dies()
    for host in hosts.hosts.values():
        host.close()


def test_signs_of_life_wait_for_no_other_host(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that computes for long takes no order from its connection, nor signs of life."""
    monkeypatch.setattr(leading_io, "BEAT_S", 0.02)
    _, two = gathered(hosts)
    full = hosts.hosts[1]
    assert full.writing is not None
    with full.sending:
        full.writing.settimeout(0.05)
        with pytest.raises(TimeoutError):
            send(full.writing, b"", [memoryview(bytes(64 << 20))])
        full.writing.settimeout(PATIENCE_S)
    wait_until(full.sending.locked, "a sign of life that waits", every_s=0.001)
    two.sockets["orders"].setblocking(False)
    with suppress(BlockingIOError):
        while two.sockets["orders"].recv(1 << 16):
            pass  # what it was told before
    two.sockets["orders"].settimeout(PATIENCE_S)
    for _ in range(3):
        assert values_of(receive(two.sockets["orders"])[0]) == ("alive",)


def test_a_host_that_fails_says_why(hosts: Hosts) -> None:
    one, _ = gathered(hosts)
    one.says("failed", "MemoryError: full")
    with pytest.raises(HostLost, match=r"host 1 \(node1\) failed: MemoryError: full"):
        hosts.answers(hosts.tell(plan.Begin()))


def test_one_that_does_not_train_is_stopped_when_a_host_dies(hosts: Hosts, left: list[int]) -> None:
    one, _ = gathered(hosts)
    one.dies()
    wait_until(lambda: left == [STOPPED], patience_s=PATIENCE_S)
    assert "host 1 (node1) is gone" in hosts.lost


def test_where_one_host_is_told_to_stop_the_island_ends_in_order(
    hosts: Hosts, left: list[int]
) -> None:
    one, two = gathered(hosts)
    one.says("stop")
    wait_until(lambda: left == [STOPPED], patience_s=PATIENCE_S)
    two.says("stop")  # once is enough
    assert hosts.stopped_by == "host 1 (node1)" and not hosts.lost
    hosts.close()
    assert [f.hears()[0] for f in (one, two)] == [(1, "Bye"), (1, "Bye")]
    assert left == [STOPPED]


def test_who_is_late_is_shown_by_name(hosts: Hosts) -> None:
    one, two = gathered(hosts)
    number = hosts.tell(plan.Step(0.1, False, (0, 17), "int32"))
    for follower in (one, two):
        follower.says("taken", number, 2.0)
        follower.gives(number, b"")
    hosts.answers(number)
    wait_until(
        lambda: all(pace["waited_s"] for pace in hosts.shown().values()), patience_s=PATIENCE_S
    )
    shown = hosts.shown()
    assert shown.keys() == {"host 1 (node1)", "host 2 (node2)"}
    assert shown["host 1 (node1)"]["waited_s"] == pytest.approx(plan.SHARE * 2.0)


def test_who_counts_otherwise_is_refused_and_the_island_waits_for_the_right_one(
    hosts: Hosts,
) -> None:
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    wrong = ByHand(hosts.place, 1, hosts=4)
    values, _ = wrong.hears()
    assert values[0] == "refused" and "DILOCO_HOSTS must be the same for all" in values[1]
    followers = [ByHand(hosts.place, index) for index in (1, 2)]
    gathering.join(PATIENCE_S)
    assert not hosts.missing()
    assert [f.hears()[0][0] for f in followers] == ["welcome", "welcome"]


def test_a_host_that_was_started_again_meanwhile_takes_its_own_place(hosts: Hosts) -> None:
    gathering = threading.Thread(target=hosts.gather)
    gathering.start()
    ByHand(hosts.place, 1).dies()
    followers = [ByHand(hosts.place, index) for index in (1, 2)]
    gathering.join(PATIENCE_S)
    assert [f.hears()[0][0] for f in followers] == ["welcome", "welcome"]


def test_the_last_order_is_a_good_bye(hosts: Hosts, left: list[int]) -> None:
    one, two = gathered(hosts)
    hosts.close()
    for follower in (one, two):
        assert follower.hears()[0] == (1, "Bye")
    assert not hosts.lost and not left


def test_a_frame_is_bounded_before_it_is_received() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"\xff\xff\xff\xff" + bytes(8))
        with pytest.raises(BadFrame):
            receive(there)
    for head in (b"", b"\xc1", b"\x01", b"\x90"):
        with pytest.raises(BadFrame):
            values_of(head)


async def test_errands_stand_beside_the_plan(hosts: Hosts) -> None:
    """A host that carries hears them between orders, and what it says of them is no answer."""
    one, two = gathered(hosts)
    one.says(ERRAND, "state", True, "", 100, 10)
    two.says(ERRAND, "state", False, "no NATS server", 0, 0)
    await until(lambda: hosts.ready() == (1,), patience_s=PATIENCE_S)
    blob = cut("s", bytes(8), chunk_bytes=4).blob
    storing = asyncio.create_task(hosts.carriers.put(1, 7, blob, PATIENCE_S))
    told = (ERRAND, "put", 7, "s", 8, 4, 2, blob.digest, PATIENCE_S, None)
    assert (await asyncio.to_thread(one.hears))[0] == told
    assert hosts.tell(plan.Begin()) == 1, "it has no number among orders"
    one.says(ERRAND, "carried", 7, "")
    await storing

    incoming = Incoming(blob, lambda size: memoryview(bytearray(size)))
    lent = hosts.carriers.lend(1, incoming, (1,))
    fetching = asyncio.create_task(hosts.carriers.get(lent, "UP-r", 5))
    assert (await asyncio.to_thread(one.hears))[0] == ((1, "Begin"))
    told = (ERRAND, "get", -1, "s", 8, 4, 2, blob.digest, "UP-r", 5, 1)
    assert (await asyncio.to_thread(one.hears))[0] == told
    check = checks_of(memoryview(bytes(8)), (1,), 4)
    send(one.sockets["answers"], head_of(-1, "", 1), [memoryview(check), memoryview(bytes(4))])
    await fetching
    assert incoming.has(1) and not incoming.has(0)
    # The island ends, and nobody waits for what is still out.
    storing = asyncio.create_task(hosts.carriers.put(1, 9, blob, PATIENCE_S))
    await asyncio.to_thread(one.hears)
    hosts.when_lost = lambda: None
    one.dies()
    with pytest.raises(HostLost, match=r"host 1 \(node1\) is gone"):
        await storing
