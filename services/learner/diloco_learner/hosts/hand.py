"""What a process that follows does on its devices with what process 0 tells: see `trainer`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

import jax
import numpy as np
from jax.sharding import NamedSharding

from diloco_learner.exchange.encoding import Encoded
from diloco_learner.hosts import plan
from diloco_learner.hosts.held_anchors import OwnParts
from diloco_learner.hosts.parts import Buffer, Parts, held, split
from diloco_learner.hosts.sharded import Promised, ShardsHere, anew, looked, restored
from diloco_learner.hosts.shares import CONTRIBUTION, FRAGMENT, MOMENTS, KeptPayload, Lying, kept
from diloco_learner.hosts.state_shares import laid_out, own_share, warm_rows
from diloco_learner.hosts.trainer import (
    GivenArrays,
    anchor_spans,
    batch_lies,
    compile_evaluation,
    fragment_as_sent,
    lasting_parts,
    lies_in,
    tensor_lies,
)
from diloco_learner.models import LeafPlace, scattered, to_named
from diloco_learner.training.trainer import Program, Trainer, empty
from diloco_shared.protocol.chunks import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class GivenShare:
    """A payload of which this process keeps its share: also fetched by another thread."""

    lying: Lying
    own: Callable[[], Iterable[Buffer]]
    chunk_bytes: int
    of: str

    def fetch(self) -> tuple[KeptPayload, list[memoryview]]:
        """(what it keeps, what process 0 wants)."""
        return kept(self.lying, jax.process_index(), self.own(), self.chunk_bytes, self.of)


@dataclass(frozen=True, slots=True)
class Beside:
    """Work that a thread of its own does while orders go on: no other process waits in it. Nothing
    is given once it is done, or why it failed."""

    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class NoGift:
    """In place of what was asked for: why there is none, which is no reason to end."""

    why: str


Gift = GivenArrays | GivenShare | Promised | Beside | NoGift | Sequence[Any]


class Hand:
    """Carries out, on a process that follows, what process 0 tells."""

    def __init__(
        self, build: Callable[[plan.Prepare], Program], shards: ShardsHere | None = None
    ) -> None:
        """`build` makes a run's programs, and checks what this host must before; see `programs`.
        `shards`: its part of checkpoints that all hosts write."""
        self.build = build
        self.shards = shards
        self.program: Program | None = None
        self.trainer: Trainer | None = None
        self.anchors = OwnParts()
        self.evaluated: Any = None  # parameters
        self.found: dict[str, LeafPlace] = {}  # of the moments' tensors

    def carry_out(self, order: plan.Order, data: Buffer) -> Gift | None:
        """What is to be given to process 0, or None. Raises whatever goes wrong."""
        if isinstance(order, plan.Prepare):
            self._let_go()
            self.program = self.build(order)
            return []
        if isinstance(order, plan.Leave | plan.Bye):
            self._let_go()
            return None
        assert self.program is not None, "an order before a run was prepared"
        if isinstance(order, plan.Begin):
            self.trainer = Trainer(self.program)
            self.found = self.trainer.places()
            return None
        assert self.trainer is not None, "an order before the trainer was begun"
        return self._train(order, data, self.program, self.trainer)

    def _let_go(self) -> None:
        self.program = self.trainer = self.evaluated = None
        self.anchors = OwnParts()

    def _train(
        self, order: plan.Order, data: Buffer, program: Program, trainer: Trainer
    ) -> Gift | None:
        match order:
            case plan.WarmUp():
                trainer.warm_up(order.sequences)
                return []
            case plan.WarmRows():
                warm_rows(trainer.stored(), program, CHUNK_BYTES)
                return []
            case plan.Step():
                lies = batch_lies(program, order.shape[0])
                trainer.step(_given(order, lies, data), order.rate, poisoned=order.poisoned)
            case plan.Hold():
                spans = anchor_spans(program, order.fragment).get(jax.process_index(), [])
                self.anchors.take(order, program.layout.sizes[order.fragment], spans, data)
            case plan.Gather():
                return self.anchors.given(order.key)
            case plan.Adopt():
                anchor: Any = self.anchors.of(order.key, order.fragment)
                trainer.adopt(order.fragment, anchor, order.alpha)
            case plan.Contribute():
                encoded = trainer.contribution(order.fragment, order.round)
                return _given_encoded(encoded, order, CONTRIBUTION)
            case plan.Decided():
                trainer.decided(order.fragment, order.round, merged=order.merged)
            case plan.Read():
                return GivenArrays((program.cuts.read(order.fragment, trainer.params),)).fetch()
            case plan.ShareFragment():
                read = fragment_as_sent(program, order.fragment, trainer.params)
                return _given_encoded(read, order, FRAGMENT)
            case plan.Share():
                return _given_state(trainer, order)
            case plan.Copy():
                place = self.found[order.tensor]
                leaf = to_named(trainer.opt_state)[place.leaf]
                return GivenArrays((leaf,), place.layer).fetch()
            case plan.Load():
                place = self.found[order.tensor]
                lies = tensor_lies(program, trainer.opt_state, place)
                trainer.load_tensor(order.tensor, place, _parts(order, lies, data))
            case plan.Look() | plan.Keep() | plan.Restore() | plan.Anew():
                return self._checkpoint(order, trainer)
            case plan.Compile():
                return Beside(partial(compile_evaluation, program, order))
            case plan.Assemble():
                self.evaluated = None  # else two sets of them, where an evaluation was broken off
                self.evaluated = empty(program)
                return []
            case plan.Assembled() | plan.Evaluate() | plan.LetGo():
                self._evaluate(order, data, program)
            case plan.Prepare() | plan.Begin() | plan.Leave() | plan.Bye():
                raise AssertionError("carried out above")
            case _:
                assert_never(order)
        return None

    def _checkpoint(
        self, order: plan.Look | plan.Keep | plan.Restore | plan.Anew, trainer: Trainer
    ) -> Gift | None:
        assert self.shards is not None, "an order of checkpoints for one who keeps none"
        match order:
            case plan.Look():
                return Promised(partial(looked, self.shards, order))
            case plan.Keep():
                moments = to_named(trainer.opt_state)
                return Promised(self.shards.keep(int(order.sequence), moments).told)
            case plan.Restore():
                told = restored(trainer, self.shards, int(order.sequence))
                return Promised(lambda: told)
            case plan.Anew():
                anew(trainer)
                return None

    def _evaluate(
        self,
        order: plan.Assembled | plan.Evaluate | plan.LetGo,
        data: Buffer,
        program: Program,
    ) -> None:
        match order:
            case plan.Assembled():
                anchor: Any = self.anchors.of(order.key, order.fragment)
                new = program.cuts.adopt(order.fragment, self.evaluated, anchor, 0.0)
                self.evaluated = jax.block_until_ready(new)
            case plan.Evaluate():
                assert program.placement is not None
                parts = _parts(order, program.placement.batch(order.shape[0]), data)
                float(program.evaluate.batch(self.evaluated, parts))
            case plan.LetGo():
                self.evaluated = None


def _given_encoded(encoded: Encoded, order: plan.Contribute | plan.ShareFragment, of: str) -> Gift:
    if jax.process_index() in order.carriers:
        return GivenShare(lies_in(encoded), lasting_parts(encoded), order.chunk_bytes, of)
    return GivenArrays(encoded.parts, lasting=True)


def _given_state(trainer: Trainer, order: plan.Share) -> Gift:
    """Copied before this returns: the next order may be a step."""
    tensors, placement = trainer.stored(), trainer.program.placement
    assert placement is not None, "several processes have several devices"
    laid, me = laid_out(tensors, placement, order.chunk_bytes), jax.process_index()
    own = own_share(laid, tensors, me)
    return (
        GivenShare(laid.lying, lambda: own, order.chunk_bytes, MOMENTS)
        if me in order.carriers
        else own
    )


def _parts(order: plan.Step | plan.Load | plan.Evaluate, lies: NamedSharding, data: Buffer) -> Any:
    """What this process has of the array that follows an order."""
    spans, dtype = held(lies, order.shape).get(jax.process_index(), []), np.dtype(order.dtype)
    return Parts(order.shape, dtype, split(spans, dtype, data))


def _given(order: plan.Step, lies: NamedSharding, data: Buffer) -> jax.Array:
    """That array, on the devices."""
    parts = _parts(order, lies, data)
    return scattered(parts, parts.dtype, lies)
