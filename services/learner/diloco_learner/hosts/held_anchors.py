"""Anchors that lie in parts with the hosts of an island: given away, whole again, let go of.

    decoded and checked --> Holder.hold -- Hold, to each host its part --> OwnParts of that host
                                |
                                v
                            HeldAnchor -- numpy.asarray -- Gather --> the parts, put together

Process 0 decodes a publication as a whole, since its digest is one of the whole. Then it gives the
anchor away: every host, process 0 too, keeps the part that its own devices are given when the
anchor is adopted or evaluated. What is told then is which anchor, by its key. The next delta needs
the whole for a moment: it is gathered.

Nobody writes to an anchor. Whoever adopts one, evaluates it, or builds upon it has the handle. Once
nobody has it any more, the hosts are told with the next anchor that is given away: at a moment when
an order may be told, and after all orders that named it. Pure.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diloco_learner.hosts import plan
from diloco_learner.hosts.parts import Buffer, Parts, Span, cut, put_together, size_of, split
from diloco_learner.hosts.whole import HostLost
from diloco_shared.memory.pages import fill, pages

F32 = np.dtype(np.float32)
# So many bytes are told at a time, to all hosts together: the order of a step comes between two
# such pieces, and waits for one at most: some milliseconds, on the network of an island.
PIECE_BYTES = 4 << 20
# Anchors of one fragment that a host keeps. Handles of at most eight are in use: of the book's
# newest one, of two that wait in the mailbox and two that are taken in (`arrivals.ANCHORS`), of the
# adopted one, and of one for each evaluation: under way, and the last one of the run. More would
# show that process 0 lets none go, and the host ends rather than fill its memory.
KEPT_MAX = 16

# By process: the parts of a fragment that its devices hold.
Spans = Mapping[int, Sequence[Span]]


class Tells(Protocol):
    """What is needed of process 0's connections: see `hosts.trainer.Link`."""

    def tell(
        self, order: plan.Order, parts: Callable[[int], Sequence[memoryview]] | None = None
    ) -> int: ...
    def answers(self, number: int) -> Mapping[int, Buffer]:
        """By process: what it gives for that order. Waits for all. Raises HostLost."""


# --------------------------------------------------------------------------------------------------
# Process 0.


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class HeldAnchor:
    """The handle of an anchor of shape (F,), fp32: to be read where this process has a part."""

    key: int
    own: Parts
    spans: Spans
    holder: "Holder"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.own.shape

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def size(self) -> int:
        """Values of the whole anchor."""
        return self.own.size

    @property
    def own_bytes(self) -> int:
        """What this process has of it in its memory."""
        return sum(part.nbytes for part in self.own.parts.values())

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """One of this process's parts, by its slices."""
        return self.own[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy of the whole: waits for the other processes. Raises HostLost."""
        parts = dict(self.own.parts)
        for process, data in self.holder.gather(self.key).items():
            parts |= split(self.spans.get(process, ()), F32, data)
        whole = put_together(self.shape, F32, parts)
        whole.flags.writeable = False
        return whole if dtype is None else whole.astype(dtype, copy=False)


class Holder:
    """Gives the anchors of one trainer away. Different threads may call it."""

    def __init__(
        self, tells: Tells, spans_of: Callable[[int], Spans], piece_bytes: int = PIECE_BYTES
    ) -> None:
        """`spans_of`: how a fragment lies with the processes. `piece_bytes`: told at a time."""
        self.tells = tells
        self.spans_of = spans_of
        self.piece_bytes = piece_bytes
        self.keys = 0  # given so far, each one once
        # Of handles that nobody has any more. A collector of garbage may add to it in the middle of
        # anything, in any thread: that is all it does.
        self.gone: deque[int] = deque()
        self.closed = False
        self.lock = threading.Lock()  # held while an order is told

    def hold(self, fragment: int, anchor_F: Any) -> Any:
        """The handle of an anchor, to which nobody may write any more; of a handle, itself.

        Raises HostLost.
        """
        if isinstance(anchor_F, HeldAnchor):
            return anchor_F
        spans = self.spans_of(fragment)
        with self.lock:
            self.keys += 1
            key = self.keys
        own = {s: _own(anchor_F, s) for s in spans.get(0, ())}
        sizes = [size_of(s, F32) for n, s in spans.items() if n]
        piece = max(self.piece_bytes // max(len(sizes), 1), 1)
        for at in range(0, max([*sizes, 1]), piece):
            parts = partial(_piece, anchor_F, spans, at, at + piece)
            self._tell(partial(self._next, key, fragment, at), parts)
        held = HeldAnchor(key, Parts(tuple(anchor_F.shape), F32, own), spans, self)
        weakref.finalize(held, self.gone.append, key).atexit = False
        return held

    def gather(self, key: int) -> Mapping[int, Buffer]:
        """The other processes' parts of an anchor. Raises HostLost."""
        return self.tells.answers(self._tell(lambda: plan.Gather(key)))

    def close(self) -> None:
        """The hosts are about to let all of it go: nothing is told of these anchors from now on,
        also by a thread that is in the middle of one. That thread meets HostLost."""
        with self.lock:
            self.closed = True

    def _tell(
        self,
        order: Callable[[], plan.Order],
        parts: Callable[[int], Sequence[memoryview]] | None = None,
    ) -> int:
        with self.lock:
            if self.closed:
                raise HostLost("the work for its run is over, and with it this anchor")
            return self.tells.tell(order(), parts)

    def _next(self, key: int, fragment: int, at: int) -> plan.Hold:
        return plan.Hold(key, fragment, at, () if at else self._gone())

    def _gone(self) -> tuple[int, ...]:
        found: list[int] = []
        while self.gone:
            found.append(self.gone.popleft())
        return tuple(found)


def _piece(
    anchor_F: NDArray[Any], spans: Spans, start: int, stop: int, process: int
) -> list[memoryview]:
    """Of the bytes of a process's parts, one part after the other, those from `start` to `stop`."""
    found, at = list[memoryview](), 0
    for part in cut(anchor_F, spans.get(process, ())):
        found.append(part[max(start - at, 0) : max(stop - at, 0)])
        at += len(part)
    return found


def _own(anchor_F: NDArray[Any], span: Span) -> NDArray[Any]:
    """A copy: a view would keep the whole."""
    ((start, stop),) = span
    part = anchor_F[start:stop].copy()
    part.flags.writeable = False
    return part


# --------------------------------------------------------------------------------------------------
# A process that follows.


@dataclass(slots=True)
class _Kept:
    """What is there of one anchor's parts: `came` of their bytes."""

    fragment: int
    shape: tuple[int, ...]
    spans: Sequence[Span]
    data: memoryview
    came: int = 0

    @property
    def parts(self) -> Parts:
        return Parts(self.shape, F32, split(self.spans, F32, self.data.toreadonly()))


class OwnParts:
    """This process's parts of the anchors that process 0 has given away and not let go."""

    def __init__(self) -> None:
        self.kept: dict[int, _Kept] = {}  # by key

    def take(self, order: plan.Hold, values: int, spans: Sequence[Span], data: Buffer) -> None:
        """A piece of them. `values`: of the whole fragment, in which this process has the `spans`.

        Raises ValueError for what process 0 never tells.
        """
        for key in order.gone:
            if self.kept.pop(key, None) is None:
                raise ValueError(f"anchor {key} is let go, and is not kept here")
        if order.at == 0:
            alike = sum(one.fragment == order.fragment for one in self.kept.values())
            if alike >= KEPT_MAX:
                raise ValueError(f"process 0 lets no anchor of fragment {order.fragment} go")
            room = pages(size_of(spans, F32))
            self.kept[order.key] = _Kept(order.fragment, (values,), spans, room)
        one, whole = self.kept[order.key], memoryview(data).cast("B")
        # Others may have more of a fragment that fills its last device's part only in part.
        if one.came != min(order.at, len(one.data)) or len(one.data) < one.came + len(whole):
            raise ValueError(f"of anchor {order.key} bytes from {order.at} on came out of turn")
        fill(one.data[one.came : one.came + len(whole)], whole)
        one.came += len(whole)

    def of(self, key: int, fragment: int) -> Parts:
        """Of one anchor, all that this process has. Raises ValueError where it is not here."""
        one = self.kept.get(key)
        if one is None or one.fragment != fragment or one.came < len(one.data):
            raise ValueError(f"anchor {key}, of fragment {fragment}, is not kept here")
        return one.parts

    def given(self, key: int) -> list[NDArray[Any]]:
        """The same, for process 0."""
        return list(self.of(key, self.kept[key].fragment).parts.values())

    @property
    def bytes(self) -> int:
        """Of all that is kept."""
        return sum(len(one.data) for one in self.kept.values())
