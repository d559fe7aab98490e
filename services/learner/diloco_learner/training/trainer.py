"""One learner's state on its device, and everything done to it.

Synchronous, but seldom waiting: most methods dispatch work and return handles (device arrays);
whoever needs their values fetches them elsewhere. Deterministic: the same calls, the same bits.

On the device, or spread over those of a mesh, lie parameters, optimizer state, the residuals of
codecs that have some, in turn one step's gradients or one fragment's work, and the published
parameters while they are evaluated. On the host lie the adopted anchors, shared with whoever holds
them, or this host's parts of them; and nothing else for long.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import Encoded, Feedback, feeds_back
from diloco_learner.models import (
    LeafPlace,
    Lying,
    ModelDef,
    build,
    filled,
    from_named,
    places,
    put,
    tensor_specs,
    to_named,
    zeros,
)
from diloco_learner.recovery import moments
from diloco_learner.recovery.moments import Buffer, State
from diloco_learner.training.evaluate import HeldOut, HeldOutLoss, Losses, always
from diloco_learner.training.fragment_ops import FragmentOps
from diloco_learner.training.fragments_on_mesh import MeshFragmentOps
from diloco_learner.training.inner import make_step, optimizer
from diloco_learner.training.mesh import Placement
from diloco_learner.training.programs import Ahead, compiler_options
from diloco_shared.budget.overhead import (
    MESSAGE_BYTES_MAX,
    largest_with_layout,
    layout_bytes,
)
from diloco_shared.numerics import codec
from diloco_shared.protocol.chunks import Headed
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec

Values = NDArray[np.float32]


class InitialWeights(Protocol):
    """Parameters to begin from: a folder's, or a run-wide checkpoint's."""

    def read(self, name: str) -> Values:
        """A tensor by our name, fp32 in its own shape. Raises ValueError."""


class Unread:
    """In the place of weights that nobody needs any more, since the run has made others of them.

    Their files may be gone. Parameters are zeros until anchors come.
    """

    def read(self, name: str) -> Values:
        raise ValueError(f"{name} is not read: the run is further than the weights it began from")


@dataclass(frozen=True, slots=True)
class Program:
    """What every learner of a run shares: compiled functions and the layout.

    Build one per process; several simulated learners use the same one.
    """

    spec: RunSpec
    model: ModelDef
    layout: Layout
    shapes: Any  # the tree of the parameters, without values
    init: Callable[[jax.Array], Any]  # key -> params
    init_state: Callable[[Any], Any]  # params -> opt_state
    step: Ahead
    poisoned: Ahead  # the step of a fault: its gradients are not numbers
    evaluate: HeldOutLoss
    cuts: FragmentOps
    weights: InitialWeights | None = None  # what to begin from, instead of fresh parameters
    placement: Placement | None = None  # on several devices; None: on one

    @classmethod
    def build(
        cls,
        spec: RunSpec,
        weights: InitialWeights | None = None,
        separator: int | None = None,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> "Program":
        """Compile nothing yet; ValueError for a model whose parameters are not fp32, that cannot be
        cut into the fragments, or has more tensors than a message can name.

        `weights`: of the model's own shape (`hf.resolving`, `checkpoints.parameters_io`).
        `separator`: the token between documents, where the run keeps them apart
        (`data.corpus.separator_of`). `mesh`: the devices, where there are several (`mesh_over`);
        of those of other hosts the shape will do, to trace with (`shape_of`). Raises WrongMesh
        where they cannot share this model.
        """
        assert (separator is None) == (spec.data.documents == "packed")
        model = build(spec.model, separator)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        _check_types(shapes)
        specs = tensor_specs(shapes, model.is_embedding, model.stacked)
        _check_told(specs, spec)
        layout = Layout.build(specs, spec.algorithm.fragments)
        chosen = optimizer(spec.inner, model.is_embedding, model.stacked, model.matrices)
        placement = None if mesh is None else Placement.of(mesh, model, shapes)
        lying: tuple[Any, Any] = (None, None)
        if placement is not None:
            state = jax.eval_shape(chosen.init, shapes)
            lying = placement.tree(shapes), placement.tree(state)
        options, codec = compiler_options(), spec.algorithm.codec_up
        return cls(
            spec,
            model,
            layout,
            shapes,
            jax.jit(model.init, compiler_options=options, out_shardings=lying[0]),
            jax.jit(chosen.init, compiler_options=options, out_shardings=lying[1]),
            make_step(model, spec.inner, shapes, placement),
            make_step(model, spec.inner, shapes, placement, poisoned=True),
            HeldOutLoss(model, spec.inner.batch_sequences, placement),
            FragmentOps(layout, shapes, codec, model.stacked)
            if placement is None
            else MeshFragmentOps(layout, shapes, codec, model.stacked, placement),
            weights,
            placement,
        )

    def check_loss(self) -> None:
        """Trace the loss and its gradient from shapes alone: nothing is compiled or computed.

        Raises ValueError unless it is one number, and whatever a model of one's own raises.
        """

        def loss_of(params: Any, tokens_BxL1: jax.Array) -> jax.Array:
            loss = self.model.loss(params, tokens_BxL1)
            shape, kind = getattr(loss, "shape", None), getattr(loss, "dtype", None)
            if shape != () or kind is None or not jnp.issubdtype(kind, jnp.floating):
                what = type(loss).__name__ if shape is None else f"{kind} of shape {shape}"
                raise ValueError(
                    "the model's loss() must return one number, the mean over all tokens, in "
                    f"floating point; it returns {what}"
                )
            return loss

        tokens = (self.spec.inner.batch_sequences, self.spec.model.context_tokens + 1)
        shape = jax.ShapeDtypeStruct(tokens, np.int32)
        with self.scope():
            jax.eval_shape(jax.value_and_grad(loss_of), self.shapes, shape)

    def initial(self) -> Any:
        """Those to begin from, or fresh ones from the run's seed: equal on every learner. Zeros
        where those to begin from were not read."""
        if self.unread:
            return empty(self)
        if self.weights is not None:
            lying = self.lying(self.shapes)
            return filled(self.shapes, self.model.stacked, self.weights.read, lying)
        return self.init(jax.random.key(self.spec.seed))

    @property
    def unread(self) -> bool:
        """Whether what the run began from was not read: nobody may be given these parameters."""
        return isinstance(self.weights, Unread)

    @property
    def warning(self) -> str:
        """What is not well about how the model lies on several devices, or ""."""
        return "" if self.placement is None else self.placement.warning

    def scope(self) -> AbstractContextManager[Any]:
        """In which the model's functions are traced."""
        return nullcontext() if self.placement is None else self.placement.scope()

    def lying(self, tree: Any) -> Lying:
        """How each leaf of parameters or moments lies on several devices."""
        return None if self.placement is None else self.placement.lying(tree)

    @property
    def with_error(self) -> bool:
        """Whether learners keep what quantisation withheld."""
        algorithm = self.spec.algorithm
        return algorithm.error_feedback and feeds_back(algorithm.codec_up)

    def compile(self, batch: int) -> None:
        """Everything that training needs, from shapes alone: no second state is made for it."""
        tokens = (batch, self.spec.model.context_tokens + 1)
        self.step.compile(
            self.shapes,
            jax.eval_shape(self.init_state, self.shapes),
            jax.ShapeDtypeStruct(tokens, np.int32),
            np.float32(0),
        )
        self.cuts.compile(residuals=self.with_error)


def _check_types(shapes: Any) -> None:
    """Raises ValueError for parameters that are not fp32: those that are merged and adopted are, so
    that a step would be given other numbers than it was compiled for, and the learner end."""
    for name, leaf in to_named(shapes).items():
        if leaf.dtype != np.float32:
            raise ValueError(
                f"the model's init() makes {name} of type {leaf.dtype}, and parameters must be "
                "float32: let init() make float32; loss() may compute in another type"
            )


def _check_told(specs: tuple[TensorSpec, ...], spec: RunSpec) -> None:
    """Raises ValueError for a model of so many tensors that no message holds their names."""
    fragments, learners = spec.algorithm.fragments, spec.membership.learners_max
    size = largest_with_layout(layout_bytes(specs), fragments, learners)
    if size > MESSAGE_BYTES_MAX:
        raise ValueError(
            f"the model has {len(specs)} tensors: a message with the name and the shape of each "
            f"takes {size} bytes, and one holds {MESSAGE_BYTES_MAX}. Let what is of one kind be "
            "one tensor, as the weights of all experts of a layer"
        )


class Published:
    """The anchors of one moment: references, since nobody writes to an anchor.

    Each is let go as it is taken, so that no second set of them lies on the host for long.
    """

    def __init__(self, anchors: Iterable[Values]) -> None:
        self.anchors = deque(anchors)

    def __iter__(self) -> Iterator[Values]:
        while self.anchors:
            yield self.anchors.popleft()


class Trainer:
    """Parameters, inner optimizer state, adopted anchors and residuals of one learner.

    Residuals exist for codecs below 16 bits only: 4 bytes per parameter on the device, and 8 more
    per value of a contribution that is pending.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.params = program.initial()
        self.opt_state = program.init_state(self.params)
        # On the host, shared with whoever gave them: nobody writes to an anchor.
        self.anchors: list[Values | None] = [None] * len(program.layout.fragments)
        self.feedback = self.residuals(program)

    @staticmethod
    def residuals(program: Program) -> list[Feedback | None]:
        """Of every fragment, owing nothing yet; None where nothing is withheld."""
        fragments = range(len(program.layout.sizes))
        if not program.with_error:
            return [None for _ in fragments]
        return [Feedback(program.cuts.zeros(p)) for p in fragments]

    def fragment(self, p: int) -> Values:
        """Fragment p of the parameters as they are, fp32 of shape (F,)."""
        return self.program.cuts.values(p, self.params)

    def initial_fragment(self, p: int) -> Any:
        """Its payload, as a run begins with it; or a handle, where several hosts carry it."""
        return Headed(*codec.frame(self.fragment(p)))

    def initial_fragments(self) -> list[Values]:
        """Every fragment of the parameters as they are, fp32 of shape (F,)."""
        return [self.fragment(p) for p in range(len(self.anchors))]

    def step(self, tokens_BxL1: Any, rate: float, *, poisoned: bool = False) -> jax.Array:
        """One inner step; the loss as a handle: NaN if the step was skipped, as a bad one is."""
        program = self.program.poisoned if poisoned else self.program.step
        loss: jax.Array
        self.params, self.opt_state, loss = program(
            self.params, self.opt_state, tokens_BxL1, np.float32(rate)
        )
        return loss

    def hold(self, p: int, anchor_F: Values) -> Values:
        """Take in an anchor of fragment p, which nobody writes to from now on: itself, or a handle
        where the hosts of an island keep their parts of it. In any thread."""
        return anchor_F

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        """Overwrite (alpha 0) or mix fragment p; moments stay. The anchor becomes its base."""
        self.anchors[p] = anchor_F
        self.params = self.program.cuts.adopt(p, self.params, anchor_F, alpha)

    def contribution(self, p: int, round_: int) -> Encoded:
        """Handle of the encoded pseudo-gradient of fragment p as of now, for that round.

        It includes the residual; its own error is pending until `decided`.
        """
        anchor_F, feedback = self.anchors[p], self.feedback[p]
        assert anchor_F is not None, f"fragment {p} was never adopted"
        residual = None if feedback is None else feedback.residual
        parts, error = self.program.cuts.encode(p, self.params, anchor_F, residual)
        if feedback is not None and error is not None:
            feedback.sent(round_, error)
        return Encoded(self.program.spec.algorithm.codec_up, anchor_F.size, parts)

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        """A publication told what became of the contribution of fragment p to that round."""
        feedback = self.feedback[p]
        if feedback is not None:
            feedback.decided(round_, merged)

    def published(self, *, alone: bool = False) -> Published:
        """The adopted anchors (not this learner's own parameters) as they are now.

        `alone`: no step follows until they are evaluated, and the last one is over: the memory of
        its gradients is what that is done in.
        """
        anchors = [anchor_F for anchor_F in self.anchors if anchor_F is not None]
        assert len(anchors) == len(self.anchors), "a fragment was never adopted"
        if alone:
            jax.block_until_ready(self.params)
        return Published(anchors)

    def evaluate(
        self, published: Published, held: HeldOut, wanted: Callable[[], bool] = always
    ) -> Losses:
        """Their losses, in any thread: this learner's own state is neither read nor changed.

        Raises Unwanted once `wanted` says so, and whatever the model or the device raises.
        """
        return self.program.evaluate.losses(assemble(self.program, published), held, wanted)

    def warm_up(self, batch: int) -> None:
        """Compile what training needs without touching any state."""
        self.program.compile(batch)

    # --- inner state ---------------------------------------------------------------------------

    def inner_state(self) -> memoryview:
        """Moments and counts as of now, copied leaf by leaf into one buffer on the host.

        Waits for the step that is under way: the originals are donated to the next one.
        """
        return moments.pack(self.stored())

    def given_state(self) -> Any:
        """The same for a newcomer; a handle of it, where every host of an island keeps a share."""
        return self.inner_state()

    def inner_state_pieces(self) -> Iterator[Buffer]:
        """The bytes of `inner_state`, each tensor when it is asked for: take no step meanwhile."""
        return moments.pieces(self.stored())

    @property
    def inner_state_bytes(self) -> int:
        """Size of the moments and counts."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.opt_state))

    def check_inner_state(self, data: State) -> None:
        """ValueError when `data` is not a sound inner state of this model; changes nothing."""
        moments.check(moments.views(data), self.stored())

    def load_inner_state(self, data: State) -> None:
        """Take over moments and counts; ValueError, as of `check_inner_state`, and no change.

        Tensor by tensor: each takes the place of the old one before the next is on the device.
        Given arrays are used up.
        """
        given = moments.views(data)
        moments.check(given, self.stored())
        for name, place in self.places().items():
            self.load_tensor(name, place, given.pop(name))

    def places(self) -> dict[str, LeafPlace]:
        """Where each tensor of the moments and counts lies."""
        return places(to_named(self.opt_state), self.program.model.stacked)

    def load_tensor(self, name: str, place: LeafPlace, values: Any) -> None:
        """Take over one tensor of them, which is there once this returns."""
        leaves, lying = to_named(self.opt_state), self.program.lying(self.opt_state)
        leaf = leaves[place.leaf]
        if place.layer is None:
            leaf.delete()
        leaves[place.leaf] = put(leaves, place, values, leaf.dtype, lying)
        self.opt_state = from_named(self.opt_state, leaves)

    def stored(self) -> dict[str, Any]:
        """The tensors of the moments and counts by name, as they lie."""
        return moments.by_tensor(to_named(self.opt_state), self.program.model.stacked)


def assemble(program: Program, anchors: Iterable[Values]) -> Any:
    """Parameters made of one anchor per fragment, fragment by fragment.

    One after the other: neither does the device hold several anchors, nor do steps wait behind all.
    """
    params = empty(program)
    for p, anchor_F in enumerate(anchors):
        params = jax.block_until_ready(program.cuts.adopt(p, params, anchor_F, 0.0))
    return params


def shapes_lying(program: Program) -> Any:
    """The shapes of the parameters, lying as they do on several devices: to compile for them."""
    lying = program.lying(program.shapes)
    assert lying is not None, "one device's programs are compiled for the shapes alone"
    told = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lying[name])
        for name, leaf in to_named(program.shapes).items()
    }
    return from_named(program.shapes, told)


def empty(program: Program) -> Any:
    """Parameters that are all zero, lying as the program's do."""
    named, lying = to_named(program.shapes), program.lying(program.shapes)
    none = {n: zeros(leaf, None if lying is None else lying[n]) for n, leaf in named.items()}
    return from_named(program.shapes, none)


def evaluate_anchors(program: Program, anchors: Iterable[Values], held: HeldOut) -> float:
    """Mean nats per token of the published parameters."""
    return program.evaluate.losses(assemble(program, anchors), held).overall
