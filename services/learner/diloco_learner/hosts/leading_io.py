"""Process 0's connections to the other processes of its island: see `link_io`.

with hosts.turn:
    number = hosts.tell(order, parts)    # to all, to each its own part
    ...                                  # the same, here
hosts.answers(number)                    # what each of them gave
"""

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from diloco_learner.hosts import plan
from diloco_learner.hosts.carrying_io import ERRAND, Carriers, SharedUpload
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.hosts.link_io import (
    JOIN_S,
    BadFrame,
    close,
    head_of,
    prompt,
    receive,
    send,
    values_of,
)
from diloco_learner.hosts.parts import Buffer
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.shares import CONTRIBUTION
from diloco_learner.hosts.trainer import ForEach, SharedPayload
from diloco_learner.hosts.whole import (
    BEAT_S,
    LAST_WORDS_S,
    ORDER_S_MAX,
    HostLost,
    OfWork,
    WholeIsland,
    silence,
)
from diloco_shared import VERSION, ambient

log = structlog.get_logger()

# Whoever connects says within so many seconds who it is.
HELLO_S = 10.0
# Between two looks at whether they take too long.
LOOK_S = 1.0


class Host:
    """One process that follows. `name`: as people know it."""

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = f"host {index} ({name})"
        self.sending = threading.Lock()  # of whole frames
        self.orders: socket.socket | None = None
        self.writing: socket.socket | None = None
        self.answers: socket.socket | None = None
        # It is in the middle of an answer to an order; when a part of one came last.
        self.gives, self.moved_at = False, -math.inf

    def take(self, kind: str, sock: socket.socket) -> None:
        """A connection of it; the newest counts, since an older one is of a life before."""
        if kind == "answers":
            if self.answers is not None:
                close(self.answers)
            # Answers are rare: signs of life come on the other connection.
            sock.settimeout(None)
            self.answers = sock
            return
        if self.orders is not None and self.writing is not None:
            close(self.orders, self.writing)
        self.orders, self.writing = prompt(sock)

    @property
    def whole(self) -> bool:
        return self.orders is not None and self.answers is not None

    def send(self, head: bytes, data: Any = ()) -> None:
        """Write one frame to it; any thread may. Raises OSError where the connection is broken."""
        assert self.writing is not None
        with self.sending:
            send(self.writing, head, data)

    def beat(self) -> None:
        """A sign of life; an order that is on its way is one too."""
        if self.sending.acquire(blocking=False):
            try:
                assert self.writing is not None
                send(self.writing, head_of("alive"))
            finally:
                self.sending.release()

    def begins(self, head: bytes) -> None:
        """A frame of what it gives: an answer, or chunks that it carries (see `carrying_io`)."""
        self.gives = values_of(head)[0] >= 0

    def moves(self) -> None:
        """A piece of such a frame came."""
        if self.gives:
            self.moved_at = ambient.monotonic()

    def close(self) -> None:
        close(*(s for s in (self.orders, self.writing, self.answers) if s is not None))


class Hosts:
    """The others, from the moment at which all are there to the end of the process."""

    def __init__(
        self,
        place: HostPlace,
        silence_s: float,
        *,
        carried: bool = True,
        stop: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGINT),
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """`silence_s`: so long without a sign of life, and a process counts as dead. `carried`:
        whether the others carry to the hub what they can. `stop`: has this one end in order, by
        another signal than those send who tell it themselves; `leave`: ends it where it does not.
        """
        self.place = place
        self.silence_s = silence_s
        self.stop, self.leave = stop, leave
        self.turn = threading.RLock()
        # So that all get orders in one order. Whoever waits for it has the `next_turn`: nobody who
        # tells one order after the other, as of an anchor's pieces, comes before a step that waits.
        self.telling, self.next_turn = threading.Lock(), threading.Lock()
        self.hosts: dict[int, Host] = {}
        self.whole = WholeIsland()
        self.changed = threading.Condition()  # held for all that is asked of `whole`
        # While this process trains: what ends that, and tells why. Else it is stopped.
        self.when_lost: Callable[[], None] | None = None
        self.meeting = ""  # where jax's processes meet, once all are here
        self.carriers = Carriers(lambda index, head: self.hosts[index].send(head), wanted=carried)

    @property
    def lost(self) -> str:
        """Why the island ends; "" while it does not."""
        return self.whole.lost

    @property
    def stopped_by(self) -> str:
        """The host that was told to stop, or ""."""
        return self.whole.stopped_by

    # --- the beginning -------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until every process of the island is there. OSError where nobody can come here."""
        family = socket.AF_INET6 if ":" in self.place.address else socket.AF_INET
        with socket.create_server(("", self.place.port), family=family) as server:
            server.settimeout(LOOK_S)
            until, said = ambient.monotonic() + JOIN_S, [0]
            while missing := self.missing():
                if missing != said:
                    log.info("waits for the other processes of this island", missing=missing)
                    said = missing
                if ambient.monotonic() > until:
                    raise HostLost(f"of this island, {missing} did not come within {JOIN_S:.0f} s")
                self._take_some(server)
                self._still_gathering()
        self._welcome()

    def missing(self) -> list[int]:
        """Those of which not all connections are there."""
        return [n for n in range(1, self.place.hosts) if n not in self.hosts or not self._is(n)]

    def _is(self, index: int) -> bool:
        return self.hosts[index].whole

    def _still_gathering(self) -> None:
        """A sign of life to those that are there. Who cannot be told any more is not there."""
        for index, host in list(self.hosts.items()):
            try:
                if host.whole:
                    host.beat()
            except OSError as error:
                log.warning("a host is gone before all are here", host=host.name, error=_why(error))
                host.close()
                del self.hosts[index]

    def _take_some(self, server: socket.socket) -> None:
        """One more connection, or none for a while."""
        try:
            sock, address = server.accept()
        except TimeoutError:
            return
        sock.settimeout(HELLO_S)
        try:
            head, _ = receive(sock, head_max=4096, data_max=0)
            self._take(sock, *_hello(values_of(head), self.place.hosts))
        except OSError as error:
            log.warning("a connection is no host of this island", of=address[0], error=str(error))
            with suppress(OSError):
                send(sock, head_of("refused", str(error)))
            close(sock)

    def _take(self, sock: socket.socket, kind: str, index: int, name: str, version: str) -> None:
        if version != VERSION:
            raise BadFrame(f"host {index} is of release {version}, and process 0 of {VERSION}")
        if index not in self.hosts or self.hosts[index].name != f"host {index} ({name})":
            self.hosts[index] = Host(index, name)
        self.hosts[index].take(kind, sock)

    def _welcome(self) -> None:
        """Tell all where jax's own processes meet, and begin to listen."""
        self.meeting = f"{_bracketed(self.place.address)}:{_free_port()}"
        names = {n: host.name for n, host in self.hosts.items()}
        self.whole.begins(names, self.silence_s, ambient.monotonic())
        for host in self.hosts.values():
            host.send(head_of("welcome", self.meeting, self.silence_s))
        for host in self.hosts.values():
            # Signs of life apart from each other and from looks: one may wait behind megabytes for
            # a host that stands still, and no other host must count this process as gone for it.
            works = (("orders", self._hear), ("answers", self._collect), ("beats", self._beat))
            for name, work in works:
                thread = threading.Thread(target=work, args=(host,), name=name, daemon=True)
                thread.start()
        threading.Thread(target=self._look, name="looks", daemon=True).start()

    # --- orders --------------------------------------------------------------------------------

    def work(self) -> OfWork:
        """The same for the work that begins now; what is left of the one before is over."""
        with self.changed:
            return OfWork(self, self.whole.begins_work())

    def end_work(self) -> None:
        """The work for a run is over, however it went. Raises HostLost."""
        with self.changed:
            prepared = self.whole.leaves()
        if prepared:
            self.tell(plan.Leave())

    def tell(self, order: plan.Order, parts: ForEach | None = None, of: int | None = None) -> int:
        """See `hosts.trainer.Link`, and `OfWork` of `of`."""
        with self.next_turn:
            self.telling.acquire()
        try:
            with self.changed:
                number, head = self.whole.tells(order, ambient.monotonic(), of)
            for host in self.hosts.values():
                try:
                    host.send(head, () if parts is None else parts(host.index))
                except OSError as error:
                    self.lose(f"{host.name} is gone: {_why(error)}")
            self.whole.check()
            return number
        finally:
            self.telling.release()

    def answers(self, number: int, patience_s: float = ORDER_S_MAX) -> Mapping[int, Buffer]:
        """What each host gave for an order. Raises HostLost, also where no part of that came for
        `patience_s`, and no host read on for it: all moments of a large model take longer than that
        on a slow network, and so do its weights in a slow place."""
        found: Mapping[int, Buffer] | None = None

        def there() -> bool:
            nonlocal found
            found = self.whole.answers(number)
            return found is not None

        with self.changed:
            since = ambient.monotonic()
            while not there() and (left_s := self._left_s(number, since, patience_s)) > 0:
                self.changed.wait(left_s)
            why = "" if found is not None else self.whole.never_came(number, patience_s)
        if found is not None:
            return found
        self.lose(why)
        raise HostLost(why)

    def _left_s(self, number: int, since: float, patience_s: float = ORDER_S_MAX) -> float:
        """Until an answer counts as one that never comes, if nothing more shows of it."""
        moved = (self.hosts[index].moved_at for index in self.whole.awaited(number))
        read = (self.whole.moved_at(index) for index in self.whole.awaited(number))
        return max([since, *moved, *read]) + patience_s - ambient.monotonic()

    def ready(self) -> tuple[int, ...]:
        """See `hosts.trainer.Link`."""
        return self.carriers.ready()

    def upload_of(self, shared: SharedPayload) -> SharedUpload:
        """See `hosts.trainer.Link`."""
        kind = SharedUpload if shared.of == CONTRIBUTION else SharedStateUpload
        return kind(self.carriers, shared.number, shared.carriers, shared)

    # --- what comes ----------------------------------------------------------------------------

    def _hear(self, host: Host) -> None:
        """Signs of life and what orders were taken up, until it is gone."""
        assert host.orders is not None
        try:
            while True:
                self._heard(host, values_of(receive(host.orders, data_max=0)[0]))
        except OSError as error:
            self.lose(f"{host.name} is gone: {_why(error)}")

    def _heard(self, host: Host, values: tuple[Any, ...]) -> None:
        with self.changed:
            stopped = self.whole.stopped_by
            fault = self.whole.hears(host.index, values, ambient.monotonic())
            stops = self.whole.stopped_by != stopped
        if values[0] == ERRAND:
            self.carriers.heard(host.index, host.name, *values[1:])
        if fault:
            self.lose(fault)
        if stops:
            log.warning("a host is told to stop, and the island with it", host=host.name)
            self.stop()

    def _collect(self, host: Host) -> None:
        """What it gives, until it is gone."""
        assert host.answers is not None
        try:
            while True:
                host.gives = False
                head, data = receive(host.answers, moved=host.moves, headed=host.begins)
                number, fault, *indices = values_of(head)
                if number < 0:
                    self.carriers.came(host.index, number, indices, data)
                    continue
                with self.changed:
                    self.whole.gave(host.index, int(number), data, str(fault))
                    self.changed.notify_all()
        except (OSError, ValueError) as error:
            self.lose(f"{host.name} is gone: {_why(error)}")

    def _beat(self, host: Host) -> None:
        try:
            while not self.lost and not self.whole.closing:
                host.beat()
                time.sleep(BEAT_S)
        except OSError as error:
            self.lose(f"{host.name} is gone: {_why(error)}")

    def _look(self) -> None:
        while not self.lost and not self.whole.closing:
            with self.changed:
                why = self.whole.looks(ambient.monotonic())
            if why:
                self.lose(why)
            time.sleep(BEAT_S)

    # --- what is shown -------------------------------------------------------------------------

    def shown(self) -> dict[str, dict[str, float]]:
        """By host: how late it takes up steps, and how long it waits for them."""
        with self.changed:
            return self.whole.shown()

    def straggling(self) -> str:
        """What to tell of hosts that keep the others waiting, or ""."""
        with self.changed:
            return self.whole.straggling(ambient.monotonic())

    # --- the end -------------------------------------------------------------------------------

    def lose(self, why: str) -> None:
        """The island is not whole any more: this process ends, after its last words."""
        with self.changed:
            if not self.whole.lose(why):
                return
            self.changed.notify_all()
        self.carriers.lost(self.lost)
        log.error("the island ends", reason=why)
        threading.Thread(target=self._end, name="end", daemon=True).start()
        if self.when_lost is not None:
            self.when_lost()
        else:
            self.stop()

    def _end(self) -> None:
        """A thread may be in the middle of a program that waits for the dead one for ever."""
        time.sleep(LAST_WORDS_S)
        log.error("ends without its last words", reason=self.lost)
        self.leave(1)

    def close(self) -> None:
        """The last order."""
        if not self.lost:
            try:
                self.tell(plan.Bye())
            except OSError as error:
                log.warning("a host is gone already", error=str(error))
        self.whole.closing = True
        for host in self.hosts.values():
            host.close()


def _hello(values: tuple[Any, ...], hosts: int) -> tuple[str, int, str, str]:
    """(which connection, host, its name, its release). Raises BadFrame."""
    match values:
        case (
            "hello",
            "orders" | "answers" as kind,
            int(index),
            int(many),
            str(name),
            str(version),
        ):
            if many != hosts or not 1 <= index < hosts:
                raise BadFrame(
                    f"host {index} says that {many} processes make this island, and here it has "
                    f"{hosts}: DILOCO_HOSTS must be the same for all"
                )
            return kind, index, name[:100], version
    raise BadFrame("no host of an island")


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):  # of what is sent: nobody waits for what comes
        return silence(ORDER_S_MAX)
    return str(error) or type(error).__name__


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _free_port() -> int:
    """For jax's own meeting of the processes, in this life of the island."""
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
