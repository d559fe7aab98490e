"""A learner's state on the devices of several hosts: what process 0 does, and what all do with it.

Process 0 has a `HostsTrainer`. It does what any trainer does, and tells each piece of it to the
others first, as an order. They have a `Hand` each, which carries orders out. A program that
computes on all devices needs all processes, and waits for them: so all must come to their programs
in one order. Process 0 holds the `turn` from telling an order to having handed over its own part.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import Encoded, sizes_of
from diloco_learner.hosts import plan
from diloco_learner.hosts.held_anchors import Holder
from diloco_learner.hosts.parts import (
    Buffer,
    Span,
    clipped,
    cut,
    held,
    own_parts,
    packed,
    put_together,
    size_of,
    split,
    told,
)
from diloco_learner.hosts.shares import (
    CONTRIBUTION,
    FRAGMENT,
    MOMENTS,
    Composed,
    Lying,
    compose,
)
from diloco_learner.hosts.state_shares import laid_out, own_share, warm_rows
from diloco_learner.hosts.whole import HostLost
from diloco_learner.models import LeafPlace, scattered
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import Layer, fetched
from diloco_learner.training.evaluate import HeldOut, Losses, always
from diloco_learner.training.fragments_on_mesh import MeshFragmentOps
from diloco_learner.training.mesh import Placement
from diloco_learner.training.trainer import (
    Program,
    Published,
    Trainer,
    Values,
    empty,
    shapes_lying,
)
from diloco_shared.numerics import codec
from diloco_shared.protocol.chunks import CHUNK_BYTES

# Of each process: the bytes that an order is carried out with there.
ForEach = Callable[[int], Sequence[memoryview]]


class Link(Protocol):
    """What process 0 needs of its connections to the others."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Held while an order is told and carried out; the thread that has it may take it again."""

    def tell(self, order: plan.Order, parts: ForEach | None = None) -> int:
        """Tell all; the order's number. Raises HostLost, an OSError, where one is gone."""

    def answers(self, number: int) -> Mapping[int, Buffer]:
        """What each process gave for that order; waits for it. Raises HostLost."""

    def lose(self, why: str) -> None:
        """The island ends: its processes are not in step any more."""

    def ready(self) -> tuple[int, ...]:
        """Processes that carry their share of a contribution to the hub themselves."""

    def upload_of(self, shared: "SharedPayload") -> Any:
        """A handle of a payload of which some do so: see `carrying_io`, `giving_io`."""


class HostsTrainer(Trainer):
    """Of process 0. Different threads may call it."""

    def __init__(self, program: Program, link: Link) -> None:
        assert program.placement is not None, "several processes have several devices"
        self.link = link
        self.chunk_bytes = CHUNK_BYTES
        self.placement: Placement = program.placement
        self.holder = Holder(link, partial(anchor_spans, program))
        with self._telling(plan.Begin()):
            super().__init__(program)
        self._prepare()

    @contextmanager
    def _telling(self, order: plan.Order, parts: ForEach | None = None) -> Iterator[int]:
        with self.link.turn:
            yield self.link.tell(order, parts)

    # --- steps ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Compile everywhere what training needs, and let all processes meet in a program.

        Not beside something else, as on one host: whoever compiles keeps the others waiting, and
        what carries programs between processes has limits of its own, of half a minute where they
        meet for the first time. So nothing is computed before all have compiled, however long the
        slowest one takes.
        """
        inner = self.program.spec.inner
        number = self.link.tell(plan.WarmUp(inner.batch_sequences * inner.accumulation))
        super().warm_up(inner.batch_sequences * inner.accumulation)
        self.link.answers(number)
        number = self.link.tell(plan.WarmRows())
        warm_rows(self.stored(), self.program, self.chunk_bytes)
        self.link.answers(number)
        self.fragment(0)

    def warm_up(self, batch: int) -> None:
        """Done at the beginning."""

    def step(self, tokens_BxL1: Any, rate: float, *, poisoned: bool = False) -> jax.Array:
        """As `Trainer.step`, by all processes together. `tokens_BxL1`: of the whole island.

        Each process is told the rows that its devices need.
        """
        lies = batch_lies(self.program, len(tokens_BxL1))
        shape, dtype = tuple(tokens_BxL1.shape), str(tokens_BxL1.dtype)
        order = plan.Step(float(rate), poisoned, shape, dtype)
        with self._telling(order, self._cut(tokens_BxL1, lies)):
            tokens = scattered(tokens_BxL1, tokens_BxL1.dtype, lies)
            return super().step(tokens, rate, poisoned=poisoned)

    def hold(self, p: int, anchor_F: Values) -> Values:
        """Its handle, of which each process keeps its part. Raises HostLost."""
        # Without the turn: no program is part of it, and steps are told meanwhile.
        held: Values = self.holder.hold(p, anchor_F)
        return held

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        held: Any = self.hold(p, anchor_F)
        with self._telling(plan.Adopt(p, float(alpha), held.key)):
            super().adopt(p, held, alpha)

    def contribution(self, p: int, round_: int) -> Any:
        """Handle of it: Encoded, or what `Link.upload_of` gives where others carry a share."""
        carriers = self.link.ready()
        with self._telling(plan.Contribute(p, round_, self.chunk_bytes, carriers)) as number:
            here = super().contribution(p, round_)
        if carriers:
            return self._upload_of(
                number, lies_in(here), header_of(here), lasting_parts(here), carriers
            )
        answer = _Answer(self.link, number, here.parts, lasting=True)
        parts: Any = tuple(answer.part(n) for n in range(len(here.parts)))
        return Encoded(here.codec, here.values, parts)

    def _upload_of(
        self,
        number: int,
        lying: Lying,
        header: bytes,
        own: Callable[[], Iterable[Buffer]],
        carriers: tuple[int, ...],
        of: str = CONTRIBUTION,
    ) -> Any:
        shared = SharedPayload(
            self.link, number, lying, header, own, carriers, self.chunk_bytes, of
        )
        return self.link.upload_of(shared)

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        if self.feedback[p] is not None:
            with self._telling(plan.Decided(p, round_, merged)):
                super().decided(p, round_, merged=merged)

    def fragment(self, p: int) -> Values:
        with self._telling(plan.Read(p)) as number:
            values_F = self.program.cuts.read(p, self.params)
        whole: Values = np.asarray(_Answer(self.link, number, (values_F,)).part(0))
        return whole[: self.program.layout.sizes[p]]

    def initial_fragment(self, p: int) -> Any:
        """Handle of it, of which every process that can carries its share."""
        carriers = self.link.ready()
        with self._telling(plan.ShareFragment(p, self.chunk_bytes, carriers)) as number:
            here = fragment_as_sent(self.program, p, self.params)
        lying, header, own = lies_in(here), header_of(here), lasting_parts(here)
        return self._upload_of(number, lying, header, own, carriers, FRAGMENT)

    # --- evaluation ----------------------------------------------------------------------------

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        """As `Trainer.evaluate`, by all processes: each first assembles its own parameters."""
        program = self.program
        try:
            params = self._begun(held)
            for p, anchor_F in enumerate(published):
                held_F: Any = self.hold(p, anchor_F)
                with self._in_step(), self._telling(plan.Assembled(p, held_F.key)):
                    new = program.cuts.adopt(p, params, held_F, 0.0)
                    params = jax.block_until_ready(new)
            return program.evaluate.losses(params, held, wanted, self._evaluate)
        finally:
            self.link.tell(plan.LetGo())

    def _begun(self, held: HeldOut) -> Any:
        """Parameters to be filled and evaluated, once every process is ready for that.

        What an evaluation mostly fails for, it fails for here: memory for another set of
        parameters, or the model. Raises RuntimeError where another process did.
        """
        shapes = self.program.evaluate.shapes(held)
        order = plan.Compile(held.sequences_SxL1.shape[1], tuple(n for n, _ in shapes))
        # Without the turn, and in a thread of its own on each host: a large model's first
        # evaluation takes minutes to compile, and steps go on meanwhile.
        number = self.link.tell(order)
        compile_evaluation(self.program, order)
        self._all_did(number)
        with self._telling(plan.Assemble()) as number:
            params = empty(self.program)
        self._all_did(number)
        return params

    def _all_did(self, number: int) -> None:
        """What each could do by itself. Raises RuntimeError where another process could not."""
        answers = self.link.answers(number).values()
        if faults := [bytes(fault).decode() for fault in answers if len(fault)]:
            raise RuntimeError("; ".join(faults))

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Around what all processes compute together. Where it fails here the others wait in it,
        and would take the next step's values for its own: the island ends. Raises HostLost."""
        try:
            yield
        except OSError:  # another one is lost, or the work is over
            raise
        except Exception as error:
            why = f"process 0 failed in an evaluation: {type(error).__name__}: {error}"[:500]
            self.link.lose(why)
            raise HostLost(why) from None

    def _evaluate(self, params: Any, part_SxL1: Any) -> float:
        lies, shape = self.placement.batch(len(part_SxL1)), tuple(part_SxL1.shape)
        order = plan.Evaluate(shape, str(part_SxL1.dtype))
        with self._in_step(), self._telling(order, self._cut(part_SxL1, lies)):
            # Read here: a step that another thread tells next must come after it everywhere.
            return float(self.program.evaluate.batch(params, part_SxL1))

    # --- inner state ---------------------------------------------------------------------------

    def inner_state(self) -> memoryview:
        return moments.pack(self._everywhere())

    def inner_state_pieces(self) -> Iterator[moments.Buffer]:
        return moments.pieces(self._everywhere())

    def given_state(self) -> Any:
        """Handle of a copy as of now, of which every process keeps its share in its own memory."""
        carriers, tensors = self.link.ready(), self.stored()
        laid = laid_out(tensors, self.placement, self.chunk_bytes)
        with self._telling(plan.Share(self.chunk_bytes, carriers)) as number:
            own = own_share(laid, tensors, jax.process_index())
        return self._upload_of(number, laid.lying, laid.header, lambda: own, carriers, MOMENTS)

    def load_tensor(self, name: str, place: LeafPlace, values: Any) -> None:
        lies, shape = self._lies(place), tuple(values.shape)
        order = plan.Load(name, shape, str(values.dtype))
        with self._telling(order, self._cut(values, lies)):
            super().load_tensor(name, place, values)

    def _everywhere(self) -> dict[str, Any]:
        """Every tensor, to be fetched from all processes when it is asked for."""
        return {name: _Tensor(self, name, leaf) for name, leaf in self.stored().items()}

    def copied(self, name: str, leaf: Any) -> NDArray[Any]:
        """A tensor of the moments as it is now."""
        with self._telling(plan.Copy(name)) as number:
            whole, layer = (leaf.leaf, leaf.layer) if isinstance(leaf, Layer) else (leaf, None)
            return _Answer(self.link, number, (whole,), layer).whole(0)

    def _lies(self, place: LeafPlace) -> NamedSharding:
        return tensor_lies(self.program, self.opt_state, place)

    # --- what the others need ------------------------------------------------------------------

    def _cut(self, array: NDArray[Any], lies: NamedSharding) -> ForEach:
        spans = held(lies, tuple(array.shape))
        return lambda process: cut(array, spans.get(process, []))


def compile_evaluation(program: Program, order: plan.Compile) -> None:
    """From the shapes of parameters: nothing is computed, and no memory taken for them."""
    params = shapes_lying(program)
    for sequences in order.sequences:
        program.evaluate.compile(params, sequences, order.tokens)


def batch_lies(program: Program, sequences: int) -> NamedSharding:
    """How a step's batch lies on the devices: as its program was compiled for."""
    assert program.placement is not None
    whole = program.spec.inner.accumulation > 1
    return program.placement.replicated if whole else program.placement.batch(sequences)


def anchor_spans(program: Program, p: int) -> dict[int, list[Span]]:
    """By process: the parts of fragment p, without what fills it up, that its devices hold."""
    assert program.placement is not None
    size = program.layout.sizes[p]
    assert isinstance(program.cuts, MeshFragmentOps)
    padded = program.cuts.views[p].padded
    return {n: clipped(s, size) for n, s in held(program.placement.flat, (padded,)).items()}


def tensor_lies(program: Program, opt_state: Any, place: LeafPlace) -> NamedSharding:
    """How a tensor of the moments lies when it is put there: see `models.put`."""
    lying = program.lying(opt_state)
    assert lying is not None
    lies = lying[place.leaf]
    if place.layer is None:
        return lies
    return NamedSharding(lies.mesh, jax.sharding.PartitionSpec(*lies.spec[1:]))


# --------------------------------------------------------------------------------------------------
# What every process has a part of, put together in process 0.


@dataclass(slots=True)
class _Answer:
    """Arrays that an order made on all devices. One answer of each process holds its parts of all
    of them, one array after the other. For one thread. `lasting`: see `_fetched`."""

    link: Link
    number: int
    arrays: tuple[jax.Array, ...]
    layer: int | None = None
    lasting: bool = False
    came: Mapping[int, Buffer] | None = None

    def part(self, n: int) -> "_Whole":
        return _Whole(self, n)

    def whole(self, n: int) -> NDArray[Any]:
        """Waits for the other processes. Raises HostLost."""
        array, parts = self.arrays[n], dict[Span, NDArray[Any]]()
        if self.came is None:
            self.came = self.link.answers(self.number)
        shape = array.shape if self.layer is None else array.shape[1:]
        for process, spans in _told(array, self.layer).items():
            if process == jax.process_index():
                parts |= _fetched(array, spans, self.layer, lasting=self.lasting)
            else:
                parts |= split(spans, array.dtype, self._of(self.came[process], process, n))
        return put_together(shape, array.dtype, parts)

    def _of(self, answer: Buffer, process: int, n: int) -> Buffer:
        """Of the answer of a process, what belongs to array n."""
        sizes = [
            size_of(_told(array, self.layer).get(process, []), array.dtype)
            for array in self.arrays[: n + 1]
        ]
        return memoryview(answer)[sum(sizes[:n]) : sum(sizes)]


@dataclass(frozen=True, slots=True)
class _Whole:
    """One of them, for numpy to ask for."""

    answer: _Answer
    n: int

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.answer.whole(self.n)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the moments, for numpy to ask for: then it is copied, as it is then."""

    trainer: HostsTrainer
    name: str
    leaf: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.leaf.shape)

    @property
    def dtype(self) -> Any:
        return self.leaf.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.trainer.copied(self.name, self.leaf)


def _told(array: jax.Array, layer: int | None) -> dict[int, list[Span]]:
    """By process: what it tells of an array, or of one layer of it."""
    found = told(array.sharding, tuple(array.shape))
    return {n: [s if layer is None else s[1:] for s in spans] for n, spans in found.items()}


def _fetched(
    array: jax.Array, spans: Sequence[Span], layer: int | None, *, lasting: bool
) -> dict[Span, Any]:
    """Of this process's own devices. `lasting`: no program is ever given that array's memory.

    Such an array is asked itself. A copy would be the work of the devices' own threads: where that
    is one thread, as of a CPU that others share, steps would always come before it.
    """
    parts = own_parts(array, spans, layer)
    if lasting:
        return {span: np.asarray(part) for span, part in parts.items()}
    return {s: fetched(x if layer is None else Layer(x, layer)) for s, x in parts.items()}


@dataclass(frozen=True, slots=True)
class GivenArrays:
    """Arrays on the devices of which process 0 wants this one's parts: fetched by another thread
    where they are `lasting` (see `_fetched`), and else before the next step overwrites them."""

    arrays: tuple[Any, ...]
    layer: int | None = None
    lasting: bool = False

    def fetch(self) -> list[Any]:
        """In the order in which process 0 expects them."""
        found: list[Any] = []
        for array in self.arrays:
            spans = _told(array, self.layer).get(jax.process_index(), [])
            parts = _fetched(array, spans, self.layer, lasting=self.lasting)
            found += [parts[span] for span in spans]
        return found


# --------------------------------------------------------------------------------------------------
# Payloads that several processes carry to the hub.


def header_of(encoded: Encoded) -> bytes:
    """What its payload begins with."""
    return bytes(codec.header(encoded.codec, encoded.values))


def lies_in(encoded: Encoded) -> Lying:
    """How the parts of an encoded fragment lie in its payload."""
    return Lying(
        len(header_of(encoded)),
        sizes_of(encoded.codec, encoded.values),
        tuple(array.dtype.itemsize for array in encoded.parts),
        tuple(_told(array, None) for array in encoded.parts),
    )


def fragment_as_sent(program: Program, p: int, params: Any) -> Encoded:
    """Fragment p of the parameters as they are: fp32 behind a header."""
    return Encoded("fp32", program.layout.sizes[p], (program.cuts.read(p, params),))


def lasting_parts(encoded: Encoded) -> Callable[[], Iterable[Buffer]]:
    """This process's parts of it, to be fetched in any thread."""
    return lambda: packed(GivenArrays(encoded.parts, lasting=True).fetch())


@dataclass(frozen=True, slots=True)
class SharedPayload:
    """One of which `carriers` keep their shares. `number`: of the order that made it; `own`: the
    parts of process 0; `of`: see `shares`."""

    link: Link
    number: int
    lying: Lying
    header: bytes
    own: Callable[[], Iterable[Buffer]]
    carriers: tuple[int, ...]
    chunk_bytes: int
    of: str

    def compose(self, subject: str) -> Composed:
        """What process 0 has of it, in any thread: waits for the others. Raises HostLost."""
        return compose(
            subject,
            self.lying,
            self.header,
            (jax.process_index(), self.own()),
            self.link.answers(self.number),
            self.carriers,
            self.chunk_bytes,
        )
