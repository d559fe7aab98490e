"""A process that follows: it comes to process 0, carries out its orders, and ends with the island.

It follows no subject of the bus and says nothing there: at most it carries its share of what the
island sends (`carrying_io`). It keeps nothing on its disk. Orders are read by a thread of their
own, so that the end of process 0 is noticed at once, whatever this one computes.
"""

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import structlog

from diloco_learner.hosts import plan
from diloco_learner.hosts.carrying_io import ERRAND, Carrier, Connect, Got
from diloco_learner.hosts.hand import Beside, Gift, GivenShare, Hand, NoGift
from diloco_learner.hosts.link_io import (
    GATHERING_S,
    JOIN_S,
    BadFrame,
    close,
    give_up_after,
    head_of,
    prompt,
    receive,
    send,
    values_of,
)
from diloco_learner.hosts.parts import Buffer, packed
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.sharded import Promised
from diloco_learner.hosts.trainer import GivenArrays
from diloco_learner.hosts.whole import BEAT_S, READS, Hearing, ReadOn, silence
from diloco_learner.settings import STOP_S
from diloco_shared import VERSION, ambient
from diloco_shared.process.membership import own_host
from diloco_shared.process.stopping import CLOSES_S

log = structlog.get_logger()

# Between two attempts to reach process 0, in seconds.
AGAIN_S = 0.5
# Orders that wait to be carried out, with what belongs to them. Process 0 is a step ahead at most
# while it trains; while it loads moments, as many tensors; while it hands out an anchor, as many
# pieces of it. More of them wait in the connection.
ORDERS_MAX = 8
# What waits to be given, in arrays fetched or to be fetched: one contribution of every round in
# flight.
GIVEN_MAX = 64
# Orders whose failure says nothing of the island: the run does not suit this host, or it has no
# room for an evaluation. No other process waits in what they are carried out with.
MAY_FAIL = plan.Prepare | plan.Assemble
# What an evaluation consists of then. All compute it together, and where it fails on one the others
# wait in it.
EVALUATES = plan.Assembled | plan.Evaluate


class EvaluationFailed(Exception):
    """Here, in the middle of what all hosts compute together; the text says why."""


class TurnedAway(Exception):
    """Process 0 does not take this one; the text says why."""


class LeadingHost:
    """Process 0, as one that follows sees it."""

    def __init__(
        self, place: HostPlace, connect: Connect | None = None, reading: ReadOn | None = None
    ) -> None:
        """`connect`: to the hub; None where this process carries nothing there. `reading`: told by
        what this process reads for an order."""
        self.place = place
        self.reads = reading or ReadOn()
        self.carrier = None if connect is None else Carrier(connect, self._say, self.give)
        self.sending = threading.Lock()
        self.orders: queue.Queue[tuple[int, plan.Order, Buffer]] = queue.Queue(ORDERS_MAX)
        self.given: queue.Queue[tuple[int, Gift | Got]] = queue.Queue(GIVEN_MAX)
        self.following = plan.Following()
        self.over = threading.Event()  # process 0 has said good-bye
        self.stopping = False  # this process is told to end

    # --- the beginning -------------------------------------------------------------------------

    def join(self) -> str:
        """Come to process 0; where jax's processes meet. Raises TurnedAway, or HostLost."""
        told_at = -JOIN_S
        while True:
            try:
                return self._join()
            except OSError as error:
                if self.stopping:
                    raise
                if ambient.monotonic() > told_at + JOIN_S / 20:
                    told_at = ambient.monotonic()
                    where = f"{self.place.address}:{self.place.port}"
                    log.info("waits for process 0 of its island", at=where, error=str(error))
                time.sleep(AGAIN_S)

    def _join(self) -> str:
        where = (self.place.address, self.place.port)
        orders, answers = socket.create_connection(where, 5.0), None
        try:
            answers = socket.create_connection(where, 5.0)
            for kind, sock in (("orders", orders), ("answers", answers)):
                hello = ("hello", kind, self.place.index, self.place.hosts, own_host(), VERSION)
                send(sock, head_of(*hello))
            orders.settimeout(GATHERING_S)
            what, *values = ("alive",)
            while what == "alive":
                what, *values = values_of(receive(orders, data_max=0)[0])
            if what == "refused":
                raise TurnedAway(values[0])
            if what != "welcome":
                raise BadFrame(f"process 0 says {str(what)[:40]!r}")
        except BaseException:
            close(*(s for s in (orders, answers) if s is not None))
            raise
        meeting, now = str(values[0]), ambient.monotonic()
        self.hearing = Hearing(float(values[1]), now, now)
        self.reading, self.writing = prompt(orders)
        give_up_after(orders, self.hearing.limit_s)
        answers.settimeout(None)
        self.answering = answers
        return meeting

    def listen(self) -> None:
        """From now on take in orders, give signs of life, and notice the end."""
        for name, work in (("orders", self._read), ("given", self._give), ("alive", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()
        if self.carrier is not None:
            threading.Thread(target=self.carrier.run, name="carrier", daemon=True).start()

    # --- orders --------------------------------------------------------------------------------

    def told(self) -> Iterator[tuple[int, plan.Order, Buffer]]:
        """Orders, one after the other; each is taken up when it is asked for."""
        while True:
            since = ambient.monotonic()
            number, order, data = self.orders.get()
            self._say("taken", number, ambient.monotonic() - since)
            yield number, order, data

    def give(self, number: int, given: Gift | Got) -> None:
        """What process 0 wants for an order. What is yet to be fetched, another thread fetches."""
        self.given.put((number, given))

    def failed(self, why: str) -> None:
        """An order could not be carried out, and the island ends of it."""
        self._say("failed", why)

    def stop(self) -> None:
        """This process is told to stop: process 0 ends the island in order."""
        self.stopping = True
        try:
            self._say("stop")
        except (OSError, AttributeError):  # it had not come there yet
            self.over.set()

    def _say(self, *values: Any) -> None:
        with self.sending:
            send(self.writing, head_of(*values))

    def _read(self) -> None:
        try:
            while True:
                head, data = receive(self.reading, moved=self._hears)
                values = values_of(head)
                if values[0] == "alive":
                    continue
                if values[0] == ERRAND and self.carrier is not None:
                    self.carrier.told(*values[1:])
                    continue
                number, order = plan.decode(head)
                self.following.take(number)
                if isinstance(order, plan.Bye):
                    self.over.set()
                    return
                self._waits(number, order, data)
        except (OSError, ValueError) as error:
            self._lost(str(error))

    def _waits(self, number: int, order: plan.Order, data: Buffer) -> None:
        """Until there is room for it. Meanwhile nothing more is read, signs of life among it: that
        this process computes for long is no silence of the other. Its end shows still, since
        signs of life cannot be sent then, or nothing acknowledges them."""
        while True:
            with suppress(queue.Full):
                self.orders.put((number, order, data), timeout=BEAT_S)
                return
            self._hears()

    def _hears(self) -> None:
        """Also in the middle of an order: what is large may take longer than a silence."""
        self.hearing.heard(ambient.monotonic())

    def _lost(self, why: str) -> None:
        if not self.over.is_set():
            end(f"process 0 of this island is gone: {why}", 0 if self.stopping else 1)

    def _give(self) -> None:
        try:
            while True:
                number, given = self.given.get()
                parts = packed(self._fetched(number, given))
                which = given.indices if isinstance(given, Got) else ()
                fault = given.why if isinstance(given, NoGift) else ""
                send(self.answering, head_of(number, fault, *which), parts)
                del given, parts  # they are large, and this waits
        except OSError as error:
            self._lost(str(error))
        except Exception as error:  # of a device: nobody would hear of it, and all would wait
            why = f"{type(error).__name__}: {error}"[:500]
            log.error("failed", error=repr(error), exc_info=error)
            with suppress(OSError):
                self.failed(why)
            end(why, 0 if self.stopping else 1)

    def _fetched(self, number: int, given: Gift | Got) -> Sequence[Any]:
        if isinstance(given, Got):
            return given.parts
        if isinstance(given, NoGift | Beside):
            return []
        if isinstance(given, GivenShare):
            assert self.carrier is not None, "an order for one who carries"
            kept, answer = given.fetch()
            self.carrier.keep(number, kept)
            return answer
        return given.fetch() if isinstance(given, GivenArrays | Promised) else given

    def _beat(self) -> None:
        try:
            while True:
                time.sleep(BEAT_S)
                if self.hearing.over(ambient.monotonic()):
                    self._lost(silence(self.hearing.limit_s))
                    return
                self._say(READS if self.reads.taken() else "alive")
        except OSError as error:
            self._lost(str(error))


def end(why: str, status: int) -> None:
    """Now: another thread may be in a program that waits for a dead process for ever."""
    tell = log.info if status == 0 else log.error
    tell("this host stops, since its island ends", reason=why)
    os._exit(status)


def follow(
    place: HostPlace,
    hand: Hand,
    meet: Callable[[str], None],
    connect: Connect | None = None,
    reading: ReadOn | None = None,
    stop_s: float = STOP_S,
) -> None:
    """Carry out orders until the island ends; the process ends with it.

    `meet` joins jax's processes at the address that it is given. `connect`: to the hub, where this
    process is to carry its share there. `reading`: see `LeadingHost`. `stop_s`: in which process 0
    ends the island when it is told to. Exit status 0 where this process was told to stop, 1
    otherwise: its supervisor starts it again, and so do those of the others.
    """
    leader = LeadingHost(place, connect, reading)

    def stop(number: int, frame: FrameType | None) -> None:
        told = (leader, stop_s)
        threading.Thread(target=_stop, args=told, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    # Signals come to this thread: so it must not be the one that waits for other processes.
    threading.Thread(target=_work, args=(leader, hand, meet), name="work", daemon=True).start()
    leader.over.wait()
    end("process 0 has ended the island", 0 if leader.stopping else 1)


def _stop(leader: LeadingHost, stop_s: float) -> None:
    """Not before process 0 is through with it: its last step and checkpoint need this process."""
    leader.stop()
    leader.over.wait(stop_s + CLOSES_S)
    end("told to stop", 0)


def _work(leader: LeadingHost, hand: Hand, meet: Callable[[str], None]) -> None:
    try:
        meeting = leader.join()
        leader.listen()
        meet(meeting)
        log.info("follows", host=leader.place.index, hosts=leader.place.hosts)
        for number, order, data in leader.told():
            _carry_out(leader, hand, number, order, data)
            del data
    except TurnedAway as error:
        end(str(error), 2)
    except BaseException as error:  # whatever a model raises: this thread is the process's work
        # The end of another host shows first in whatever waited for it.
        time.sleep(BEAT_S)
        log.error("failed", error=repr(error), exc_info=error)
        try:
            leader.failed(f"{type(error).__name__}: {error}"[:500])
        except (OSError, AttributeError) as gone:
            log.warning("process 0 is not told", error=str(gone))
        end(f"{type(error).__name__}: {str(error)[:300]}", 0 if leader.stopping else 1)


def _carry_out(
    leader: LeadingHost, hand: Hand, number: int, order: plan.Order, data: Buffer
) -> None:
    try:
        given = hand.carry_out(order, data)
    except (Exception, SystemExit) as error:
        if isinstance(order, EVALUATES):
            raise EvaluationFailed(f"{type(error).__name__}: {error}") from error
        if not isinstance(order, MAY_FAIL):
            raise
        leader.give(number, _fault(order, error))
        return
    if isinstance(given, Beside):
        doing = (leader, number, order, given)
        threading.Thread(target=_do, args=doing, name="beside", daemon=True).start()
    elif isinstance(given, Promised):
        work = (leader, number, given)
        threading.Thread(target=_tell, args=work, name="promised", daemon=True).start()
    elif given is not None:
        leader.give(number, given)
    if isinstance(order, plan.Leave) and leader.carrier is not None:
        leader.carrier.forget(number)


def _do(leader: LeadingHost, number: int, order: plan.Order, beside: Beside) -> None:
    """While orders go on. Whatever it raises, process 0 is told, which would wait for it."""
    try:
        beside.work()
    except (Exception, SystemExit) as error:
        leader.give(number, _fault(order, error))
    else:
        leader.give(number, [])


def _fault(order: plan.Order, error: BaseException) -> NoGift:
    what = type(order).__name__
    log.warning("this host cannot carry out an order", order=what, error=repr(error))
    return NoGift(f"{type(error).__name__}: {error}"[:300])


def _tell(leader: LeadingHost, number: int, promised: Promised) -> None:
    """Once there is something to tell: what others wait for does not wait for that."""
    leader.give(number, promised.fetch())
