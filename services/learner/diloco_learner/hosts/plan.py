"""What the processes of an island do, in which order: the plan that process 0 tells the others.

The plan is a row of orders, numbered from 1. Between two `Step`s stand those of one step boundary:
what is adopted, contributed, copied, evaluated. Each names what is done and with which numbers;
how fast a step learns is one of them, so that nobody else needs to know where the run stands. An
order takes some dozen bytes. What it is done with, as a batch, follows it as bytes,
to each process its own part. Pure: how orders travel is `leading_io`'s and `following_io`'s affair.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from typing import Any, get_type_hints

import msgpack

# --- orders ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """Get ready for a run: build its programs, compute nothing. Answered by "" or what is wrong."""

    spec: str  # of the run, as JSON
    mesh: str  # over the devices of all processes
    separator: int  # between documents; -1: there is none
    begun: bool = False  # the run: what it began from is not opened


@dataclass(frozen=True, slots=True)
class Begin:
    """Make the parameters and moments that every learner of the run begins with."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compile what training needs, for batches of so many sequences. Nothing is computed, so that
    nobody waits in a program for one that compiles for longer."""

    sequences: int


@dataclass(frozen=True, slots=True)
class WarmRows:
    """Compile and compute once what copies of the moments are made with (`state_shares`): told once
    all have carried out `WarmUp`."""


@dataclass(frozen=True, slots=True)
class Step:
    """One inner step on the batch that follows, at this learning rate."""

    rate: float
    poisoned: bool
    shape: tuple[int, ...]  # of the batch: (sequences, L + 1)
    dtype: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep what follows: of your part of an anchor, the bytes from `at` on; see `held_anchors`.

    `gone`: keys of anchors that nobody needs any more.
    """

    key: int  # by which other orders name it
    fragment: int
    at: int
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Gather:
    """Give the parts of an anchor that are kept here."""

    key: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Mix a kept anchor into its fragment: theta <- alpha theta + (1 - alpha) anchor."""

    fragment: int
    alpha: float
    key: int


@dataclass(frozen=True, slots=True)
class Contribute:
    """Encode the fragment for that round, and give the parts of it that are held here.

    A process that is one of the `carriers` keeps its share instead, and gives the checks of its
    chunks, and its other bytes: see `shares`.
    """

    fragment: int
    round: int
    chunk_bytes: int = 0
    carriers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """What became of the contribution to that round: residuals follow from it."""

    fragment: int
    round: int
    merged: bool


@dataclass(frozen=True, slots=True)
class Read:
    """Give the parts of a fragment of the parameters that are held here."""

    fragment: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Give the parts of a tensor of the moments that are held here."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Share:
    """Copy what is held here of all moments to the host's memory, as a newcomer is given them.

    A process that is one of the `carriers` keeps that, as it does its share of a contribution, but
    until it is told to let go. The others give it.
    """

    chunk_bytes: int
    carriers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareFragment:
    """The same of a fragment of the parameters that a run begins with."""

    fragment: int
    chunk_bytes: int
    carriers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Replace a tensor of the moments by what follows."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Look:
    """Is the place for checkpoints of all hosts the one that process 0 sees? Answered by `Told`."""

    name: str  # of this learner's folder there
    token: str  # that process 0 has left there


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy what is held here of the moments, and write it beside what follows, as that checkpoint.

    Answered by `Told`, once it is written or cannot be.
    """

    sequence: str  # in digits, which may be more than an integer of 64 bits has


@dataclass(frozen=True, slots=True)
class Restore:
    """Replace the moments by those of a checkpoint. Answered by `Told`: where anything is wrong
    with it, no process may use its moments before another `Restore` or `Anew`."""

    sequence: str  # in digits


@dataclass(frozen=True, slots=True)
class Anew:
    """Make the moments that every learner of the run begins with again: no checkpoint is sound."""


@dataclass(frozen=True, slots=True)
class Compile:
    """Compile what evaluates batches of so many sequences of so many tokens, while orders go on.
    Give nothing once that is done, or say what failed."""

    tokens: int
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Assemble:
    """Begin a set of parameters that is to be evaluated, beside those that are trained. Give
    nothing, or say what failed: no other process is needed for it, so the island goes on in
    step."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """Put a kept anchor into them."""

    fragment: int
    key: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """The loss of those parameters on the sequences that follow."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Those parameters are not needed any more."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The work for the run is over: let go of all of it."""


@dataclass(frozen=True, slots=True)
class Bye:
    """Process 0 ends, and so does the island."""


Order = (
    Prepare
    | Begin
    | WarmUp
    | WarmRows
    | Step
    | Hold
    | Gather
    | Adopt
    | Contribute
    | Decided
    | Read
    | Copy
    | Share
    | ShareFragment
    | Load
    | Look
    | Keep
    | Restore
    | Anew
    | Compile
    | Assemble
    | Assembled
    | Evaluate
    | LetGo
    | Leave
    | Bye
)
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Order.__args__}
_TYPES = {name: get_type_hints(kind) for name, kind in _KINDS.items()}


class BadOrder(ValueError):
    """Bytes that are no order: the processes of an island must be of one release."""


def encode(number: int, order: Order) -> bytes:
    """Its place in the plan, and what is to be done."""
    packed: bytes = msgpack.packb([number, type(order).__name__, *astuple(order)])
    return packed


def decode(data: bytes) -> tuple[int, Order]:
    """The same again. Raises BadOrder."""
    try:
        number, name, *values = msgpack.unpackb(data, use_list=False)
    except Exception as error:  # msgpack raises many kinds, all meaning the same here
        raise BadOrder(f"{len(data)} bytes that are no order: {error}") from None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or type(number) is not int or len(values) != len(fields(kind)):
        raise BadOrder(f"an order {str(name)[:40]!r} of {len(values)} values, which nobody knows")
    for wanted, value in zip(_TYPES[name].items(), values, strict=True):
        if not _fits(wanted[1], value):
            raise BadOrder(f"an order {name} whose {wanted[0]} is {str(value)[:40]!r}")
    return number, kind(*values)


def _fits(kind: Any, value: Any) -> bool:
    if kind in (int, float, bool, str):
        return type(value) is kind
    return type(value) is tuple and all(type(n) is int and n >= 0 for n in value)


class OutOfOrder(ValueError):
    """An order is missing, or came twice."""


@dataclass(slots=True)
class Following:
    """That orders are taken up one after the other, and none is left out."""

    taken: int = 0

    def take(self, number: int) -> None:
        """Order `number` comes next. Raises OutOfOrder if it does not."""
        if number != self.taken + 1:
            raise OutOfOrder(f"order {number} came after order {self.taken}")
        self.taken = number


# --------------------------------------------------------------------------------------------------
# Who keeps the others waiting.

# Weight of the newest step in the figures of a host: they tell of about the last twenty.
SHARE = 0.05
# A step that a host takes up so many seconds late, or a sign of life, is worth an event by itself.
LATE_TOLD_S = 1.0
# Between two such events, in seconds.
TELL_S = 60.0


@dataclass(slots=True)
class HostPace:
    """Of one host that follows. Seconds, as moving averages over steps."""

    late_s: float = 0.0  # it took up a step so long after process 0 had told it
    waited_s: float = 0.0  # it had waited so long for that order: little, where it is the slow one
    ahead: deque[tuple[int, float, bool]] = field(default_factory=deque)  # not taken up yet
    moved_at: float = -math.inf  # when it has read on last, of what an order lets it read

    def told(self, number: int, now: float, *, step: bool) -> None:
        """An order went out to it."""
        self.ahead.append((number, now, step))

    def taken(self, number: int, waited_s: float, now: float) -> float:
        """It has taken up order `number`; by how much it was late, 0.0 for what is no step."""
        late_s = 0.0
        while self.ahead and self.ahead[0][0] <= number:
            _, at, step = self.ahead.popleft()
            if step:
                late_s = max(now - at, 0.0)
                self.late_s += SHARE * (late_s - self.late_s)
                self.waited_s += SHARE * (waited_s - self.waited_s)
        return late_s

    def behind_s(self, now: float) -> float:
        """For how long it has done nothing that shows while it owes to take up the oldest order;
        0.0 if it owes nothing."""
        return max(now - max(self.ahead[0][1], self.moved_at), 0.0) if self.ahead else 0.0


@dataclass(slots=True)
class Stragglers:
    """When to say that a host is late."""

    told_at: float = -math.inf
    untold: dict[str, float] = field(default_factory=dict)  # the worst of each, in seconds

    def late(self, host: str, seconds: float) -> None:
        """A host took up a step late by so much, or gave no sign of life for so much too long."""
        if seconds >= LATE_TOLD_S:
            self.untold[host] = max(seconds, self.untold.get(host, 0.0))

    def tell(self, now: float) -> str:
        """What to say, or "": at most one text in TELL_S seconds."""
        if not self.untold or now < self.told_at + TELL_S:
            return ""
        worst = sorted(self.untold.items(), key=lambda item: -item[1])
        self.told_at, self.untold = now, {}
        return "the island waited for " + _listed(f"{host} for {s:.1f} s" for host, s in worst)


def _listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last
