"""What the hosts of an island compute: each its part of the tiny quadratic, by one plan.

As in `diloco_learner.hosts.trainer`, process 0 tells every piece of work as an order and does it
itself; the others carry orders out. What they send and put together is cut by the product's code.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from diloco_learner.hosts import plan, shares
from diloco_learner.hosts.held_anchors import HeldAnchor, Holder, OwnParts
from diloco_learner.hosts.parts import Buffer, Span, cut, packed, put_together, split
from diloco_learner.hosts.shares import CONTRIBUTION, FRAGMENT, KeptPayload, Lying, kept
from diloco_learner.recovery import moments
from diloco_learner.training.evaluate import HeldOut, Losses, always
from diloco_learner.training.trainer import Published
from diloco_shared.numerics import codec
from diloco_shared.protocol.chunks import CHUNK_BYTES, Headed
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.islands import IslandLife
from diloco_simulator.islands.carrying import (
    SharedWhole,
    bytes_lie,
    parts_of,
    spans_of,
    values_lie,
)
from diloco_simulator.islands.links import Programs
from diloco_simulator.islands.waiting import waited
from diloco_simulator.worlds.computing import VirtualTrainer
from diloco_simulator.worlds.constants import CHUNKS
from diloco_simulator.worlds.tiny import Part, TinyTrainer, Values

F32, I64, U8 = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)
MOMENTS = "moments"
# Of what hosts carry, by the order.
KINDS: dict[type[Any], str] = {
    plan.Contribute: CONTRIBUTION,
    plan.ShareFragment: FRAGMENT,
    plan.Share: shares.MOMENTS,
}
ForEach = Callable[[int], Sequence[memoryview]]
# An anchor of some dozen bytes is given away in several orders, as a large one is.
PIECE_BYTES = 16
# Orders after which all hosts must hold the same; others are told beside them by other threads.
SHARED = plan.Begin | plan.Step | plan.Adopt | plan.Contribute | plan.Decided | plan.Load


def of_run(spec: RunSpec, learner: int, part: Part, report: Callable[[str, str], None]) -> Any:
    """The part of the run's tiny model that a host begins with."""
    a = spec.algorithm
    return TinyTrainer(a.fragments, learner, spec.seed, a.codec_up, report, part)


def rows_of(shape: Sequence[int], hosts: int) -> dict[int, list[Span]]:
    """By host: the sequences of a batch that it reads."""
    rows = spans_of(shape[0], hosts)
    return {n: [(spans[0][0], (0, shape[1]))] for n, spans in rows.items()}


def moments_of(tiny: TinyTrainer) -> bytes:
    """As a newcomer is given them."""
    return save({MOMENTS: np.array([tiny.moments], I64)})


def shared_state(tiny: TinyTrainer) -> str:
    """Of what every host of an island holds alike, whatever its part: a digest."""
    rounds = [sorted(one) for one in tiny.undecided], [sorted(f.pending) for f in tiny.feedback]
    state = (tiny.moments, tiny.consumed, tiny.noise.getstate(), rounds)
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


def digest_of_part(values: Values) -> str:
    """Of what one host has of an anchor."""
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


class Leads(Protocol):
    """What process 0 needs of the others; see `islands.processes.Leading`."""

    programs: Programs
    hosts: int
    life: IslandLife  # to whom is shown what it does

    @property
    def carries(self) -> bool: ...
    def ready(self) -> tuple[int, ...]: ...
    def upload_of(self, shared: SharedWhole) -> Any: ...
    def tell(self, order: plan.Order, parts: ForEach | None = None) -> int: ...
    def answers(self, number: int) -> Mapping[int, Buffer]: ...
    def gathered(self, payload: bytes, expected: bytes, fragment: int, round_: int) -> None:
        """A contribution of all hosts is put together; it should be `expected`."""


@dataclass(slots=True)
class MeanLoss:
    """Of a step, once all hosts have taken it."""

    met: Any  # a future of every host's part
    poisoned: bool

    def __float__(self) -> float:
        loss = float(sum(waited(self.met)))
        return math.nan if self.poisoned else loss

    def block_until_ready(self) -> None:
        waited(self.met)

    def is_ready(self) -> bool:
        return True  # the loop's clock stands still while a step is taken


@dataclass(slots=True)
class Gathering:
    """An encoded contribution of which every host gives its part."""

    leading: Leads
    number: int
    own: memoryview
    size: int
    done: Callable[[bytes], None]
    payload: bytes | None = None

    def fetch(self) -> bytes:
        """Waits for all of them. Raises HostLost."""
        if self.payload is None:
            spans = spans_of(self.size, self.leading.hosts)
            parts = split(spans[0], U8, self.own)
            for index, data in self.leading.answers(self.number).items():
                parts |= split(spans[index], U8, data)
            self.payload = put_together((self.size,), U8, parts).tobytes()
            self.done(self.payload)
        return self.payload


class LeadingTrainer(VirtualTrainer):
    """Of process 0, which holds the first part."""

    def __init__(
        self, spec: RunSpec, learner: int, leading: Leads, report: Callable[[str, str], None]
    ) -> None:
        self.leading, hosts = leading, leading.hosts
        prepare = plan.Prepare(spec.model_dump_json(), f"data={hosts}", -1)
        if faults := [bytes(f).decode() for f in self._answers(prepare).values() if len(f)]:
            raise ValueError("; ".join(faults))
        number = leading.tell(plan.Begin())
        super().__init__(spec, of_run(spec, learner, Part(0, hosts), report))
        # Computes all by itself: what the parts are put together to must be the same.
        self.reference: TinyTrainer = of_run(spec, learner, Part(), lambda promise, text: None)
        sizes = self.tiny.layout.sizes
        self.holder = Holder(leading, lambda p: spans_of(sizes[p], hosts), PIECE_BYTES)
        self.held: list[Any] = [None for _ in sizes]  # adopted
        # What only those who look on know: of every handle, all that it stands for.
        self.wholes: WeakKeyDictionary[HeldAnchor, Values] = WeakKeyDictionary()
        self._carried(number)
        self._answers(plan.WarmUp(spec.inner.batch_sequences * spec.inner.accumulation))
        self._answers(plan.WarmRows())
        self.fragment(0)

    def _answers(self, order: plan.Order) -> Mapping[int, Buffer]:
        return self.leading.answers(self.leading.tell(order))

    def _carried(self, number: int) -> None:
        self.leading.life.carried(0, number, shared_state(self.tiny))

    # --- steps ---------------------------------------------------------------------------------

    def step(self, tokens_BxL1: NDArray[Any], rate: float, *, poisoned: bool = False) -> Any:
        shape = tuple(tokens_BxL1.shape)
        order = plan.Step(float(rate), poisoned, shape, str(tokens_BxL1.dtype))
        rows = rows_of(shape, self.leading.hosts)
        number = self.leading.tell(order, lambda n: cut(tokens_BxL1, rows[n]))
        self.leading.life.acts()  # it was told: an island that has lost a host tells nothing
        loss = self.tiny.step(rate)
        self.reference.step(rate)
        self._carried(number)
        return MeanLoss(self.leading.programs.meet(number, 0, loss), poisoned)

    def hold(self, p: int, anchor_F: Values) -> Any:
        held = self.holder.hold(p, anchor_F)
        self.wholes[held] = anchor_F
        return held

    def adopt(self, p: int, anchor_F: Any, alpha: float) -> None:
        number = self._named(plan.Adopt(p, float(alpha), anchor_F.key), anchor_F)
        self.tiny.adopt(p, anchor_F[self.tiny.spans[p]], alpha)
        self.reference.adopt(p, self.wholes[anchor_F], alpha)
        self.held[p] = anchor_F
        self._carried(number)

    def _named(self, order: plan.Adopt | plan.Assembled, anchor_F: Any) -> int:
        """Told; and for those who look on, which part each host must take now."""
        number, whole_F = self.leading.tell(order), self.wholes[anchor_F]
        parts = {n: Part(n, self.leading.hosts).of(len(whole_F)) for n in range(self.leading.hosts)}
        self.leading.life.named(number, {n: digest_of_part(whole_F[s]) for n, s in parts.items()})
        return number

    def contribution(self, p: int, round_: int) -> Any:
        """A handle of the payload that all hosts encode together; checked once it is whole."""
        carriers = self.leading.ready()
        chunk_bytes = CHUNKS.value if self.leading.carries else 0
        number = self.leading.tell(plan.Contribute(p, round_, chunk_bytes, carriers))
        self.leading.life.acts()
        met = self.leading.programs.meet(number, 0, self.tiny.gives(p))
        payload = self.tiny.sent(p, round_, np.concatenate(waited(met)))
        expected = self.reference.contribution(p, round_)
        self._carried(number)

        def done(whole: bytes) -> None:
            self.leading.gathered(whole, expected, p, round_)

        if carriers:
            lying = bytes_lie(len(payload), self.leading.hosts)
            return self._upload_of(number, lying, expected, carriers, CONTRIBUTION, done)
        own = memoryview(payload)[Part(0, self.leading.hosts).of(len(payload))]
        return Gathering(self.leading, number, own, len(payload), done)

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        number = self.leading.tell(plan.Decided(p, round_, merged))
        self.tiny.decided(p, round_, merged=merged)
        self.reference.decided(p, round_, merged=merged)
        self._carried(number)

    def fragment(self, p: int) -> Values:
        return self._read(p, plan.Read(p))

    def initial_fragment(self, p: int) -> Any:
        """All give their parts, unless they have a connection to the hub."""
        if not self.leading.carries:
            return Headed(*codec.frame(self._read(p, plan.ShareFragment(p, CHUNK_BYTES, ()))))
        carriers = self.leading.ready()
        number = self.leading.tell(plan.ShareFragment(p, CHUNKS.value, carriers))
        whole = codec.encode("fp32", self.reference.theta[p])
        lying = values_lie(self.tiny.layout.sizes[p], self.leading.hosts)
        return self._upload_of(number, lying, whole, carriers, FRAGMENT)

    def _upload_of(
        self,
        number: int,
        lying: Lying,
        whole: bytes,
        carriers: tuple[int, ...],
        of: str,
        done: Callable[[bytes], None] | None = None,
    ) -> Any:
        done = done or (lambda made: self.leading.life.shared(made, whole, of))
        link: Any = self.leading
        return link.upload_of(
            SharedWhole(link, number, lying, whole, carriers, CHUNKS.value, of, done)
        )

    def _read(self, p: int, order: plan.Order) -> Values:
        number = self.leading.tell(order)
        own, size = self.tiny.theta[p].copy(), self.tiny.layout.sizes[p]
        spans = spans_of(size, self.leading.hosts)
        parts: dict[Span, NDArray[Any]] = {spans[0][0]: own}
        for index, data in self.leading.answers(number).items():
            parts |= split(spans[index], F32, data)
        return put_together((size,), F32, parts)

    # --- evaluation and inner state --------------------------------------------------------------

    def published(self, *, alone: bool = False) -> Published:
        return Published(self.held)

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        """The sum of absolute values over all hosts: enough to see that each has its part."""
        self._answers(plan.Compile(1, (1,)))
        self._answers(plan.Assemble())
        total = 0.0
        for p, anchor_F in enumerate(published):
            anchor: Any = anchor_F
            self._named(plan.Assembled(p, anchor.key), anchor)
            total += float(np.abs(anchor_F[self.tiny.spans[p]]).sum())
        number = self.leading.tell(plan.Evaluate((1, 1), "int32"))
        losses = waited(self.leading.programs.meet(number, 0, total))
        self.leading.tell(plan.LetGo())
        return Losses(float(sum(losses)))

    def inner_state(self) -> memoryview:
        """As the last host has it: one that follows, since process 0's own would show nothing."""
        return self._moments(plan.Copy(MOMENTS))

    def given_state(self) -> Any:
        """The moments, or a handle of them where hosts carry their shares to the hub."""
        if not self.leading.carries:
            return self._moments(plan.Share(CHUNK_BYTES, ()))
        carriers = self.leading.ready()
        number = self.leading.tell(plan.Share(CHUNKS.value, carriers))
        whole = moments_of(self.reference)
        lying = bytes_lie(len(whole), self.leading.hosts)
        return self._upload_of(number, lying, whole, carriers, shares.MOMENTS)

    def _moments(self, order: plan.Order) -> memoryview:
        found = self._answers(order)
        counts = np.frombuffer(found[self.leading.hosts - 1], I64)
        return memoryview(save({MOMENTS: counts}))

    def inner_state_pieces(self) -> list[bytes]:
        return [bytes(self.inner_state())]

    def load_inner_state(self, data: moments.State) -> None:
        values = np.array(moments.views(data)[MOMENTS], I64)
        order = plan.Load(MOMENTS, tuple(values.shape), str(values.dtype))
        number = self.leading.tell(order, lambda n: cut(values, [((0, len(values)),)]))
        self.tiny.moments = self.reference.moments = int(values[0])
        self._carried(number)


class FollowingTrainer:
    """Of a host that follows: carries out what process 0 tells. See `hosts.trainer.Hand`."""

    def __init__(
        self,
        learner: int,
        part: Part,
        programs: Programs,
        report: Callable[[str, str], None],
        took: Callable[[int, str], None],
        keep: Callable[[int, KeptPayload], None] | None = None,
    ) -> None:
        """`took(number, digest)` is shown every part of an anchor that an order makes it take.
        `keep`: its share of what it carries to the hub; None where process 0 does that."""
        self.learner, self.part, self.programs, self.report = learner, part, programs, report
        self.took, self.keep = took, keep
        self.anchors = OwnParts()
        self.spec: RunSpec | None = None
        self.tiny: Any = None
        self.evaluated = 0.0

    async def carry_out(self, number: int, order: plan.Order, data: Buffer) -> Sequence[Any] | None:
        """What is to be given to process 0, or None."""
        tiny = self.tiny
        match order:
            case plan.Prepare():
                self.spec, self.anchors = RunSpec.model_validate_json(order.spec), OwnParts()
                return []
            case plan.Begin():
                assert self.spec is not None
                self.tiny = of_run(self.spec, self.learner, self.part, self.report)
            case plan.WarmUp() | plan.WarmRows() | plan.Compile():
                return []
            case plan.Step():
                split(self._rows(order.shape), np.dtype(order.dtype), data)
                await self.programs.meet(number, self.part.index, tiny.step(order.rate))
            case plan.Hold():
                size = tiny.layout.sizes[order.fragment]
                self.anchors.take(order, size, self._spans(size), data)
            case plan.Gather():
                return self.anchors.given(order.key)
            case plan.Adopt():
                tiny.adopt(order.fragment, self._anchor(number, order), order.alpha)
            case plan.Contribute():
                given = tiny.gives(order.fragment)
                met = await self.programs.meet(number, self.part.index, given)
                payload = tiny.sent(order.fragment, order.round, np.concatenate(met))
                if order.carriers:
                    lying = bytes_lie(len(payload), self.part.hosts)
                    return self._given(number, order, lying, self._own(payload, lying))
                return [np.frombuffer(payload, U8)[self.part.of(len(payload))]]
            case plan.Decided():
                tiny.decided(order.fragment, order.round, merged=order.merged)
            case plan.ShareFragment() if self.keep is not None:
                lying = values_lie(tiny.layout.sizes[order.fragment], self.part.hosts)
                return self._given(number, order, lying, [tiny.theta[order.fragment].copy()])
            case plan.Share() if self.keep is not None:
                whole = moments_of(tiny)
                lying = bytes_lie(len(whole), self.part.hosts)
                return self._given(number, order, lying, self._own(whole, lying))
            case plan.Read() | plan.ShareFragment():
                return [tiny.theta[order.fragment].copy()]
            case plan.Copy() | plan.Share():
                return [np.array([tiny.moments], I64)]
            case plan.Load():
                span = ((0, order.shape[0]),)
                tiny.moments = int(split([span], np.dtype(order.dtype), data)[span][0])
            case plan.Assemble():
                self.evaluated = 0.0
                return []
            case plan.Leave() | plan.Bye():
                self.spec = self.tiny = None
                self.anchors = OwnParts()
            case _:
                await self._evaluate(number, order)
        return None

    def _own(self, payload: bytes, lying: Lying) -> Sequence[Any]:
        return parts_of(payload, lying, self.part.index)

    def _given(
        self,
        number: int,
        order: plan.Contribute | plan.ShareFragment | plan.Share,
        lying: Lying,
        own: Sequence[Any],
    ) -> Sequence[Any]:
        """What process 0 is given of its parts: as by `hosts.hand`."""
        if self.part.index not in order.carriers:
            return own
        assert self.keep is not None
        of = KINDS[type(order)]
        share, answer = kept(lying, self.part.index, packed(own), order.chunk_bytes, of)
        self.keep(number, share)
        return answer

    async def _evaluate(self, number: int, order: plan.Order) -> None:
        match order:
            case plan.LetGo():
                self.evaluated = 0.0
            case plan.Assembled():
                self.evaluated += float(np.abs(self._anchor(number, order)).sum())
            case plan.Evaluate():
                await self.programs.meet(number, self.part.index, self.evaluated)

    def _rows(self, shape: Sequence[int]) -> list[Span]:
        return rows_of(shape, self.part.hosts)[self.part.index]

    def _spans(self, size: int) -> list[Span]:
        return spans_of(size, self.part.hosts)[self.part.index]

    def _anchor(self, number: int, order: plan.Adopt | plan.Assembled) -> Values:
        kept = self.anchors.of(order.key, order.fragment)
        found = kept[self.part.of(kept.size)]
        self.took(number, digest_of_part(found))
        return found
