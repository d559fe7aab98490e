"""One learner's state on its device, and everything done to it.

Synchronous, but never waiting: each method dispatches work and returns handles (device arrays);
whoever needs their values fetches them elsewhere. Deterministic: the same calls, the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from diloco_learner.encoding import Encoded, Parts, encode, feeds_back
from diloco_learner.evaluate import make_evaluate
from diloco_learner.feedback import Feedback
from diloco_learner.inner import Step, make_step, optimizer
from diloco_learner.model import ModelDef, build
from diloco_learner.model.named import from_named, tensor_specs, to_named
from diloco_shared.config import RunSpec
from diloco_shared.numerics.fragments import Layout, flatten, unflatten
from diloco_shared.numerics.pseudogradient import pseudogradient

Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Program:
    """What every learner of a run shares: compiled functions and the layout.

    Build one per process; several simulated learners use the same one.
    """

    spec: RunSpec
    model: ModelDef
    layout: Layout
    step: Step
    evaluate: Callable[[Any, NDArray[np.int32]], float]
    # Per fragment, jitted: (params) -> values_F; (params, anchor_F, alpha) -> params;
    # (params, anchor_F, residual_F or None) -> (encoded pseudo-gradient, its error or None).
    read: tuple[Callable[[Any], jax.Array], ...]
    adopt: tuple[Callable[[Any, Any, float], Any], ...]
    encode: tuple[Callable[[Any, Any, Any], tuple[Parts, jax.Array | None]], ...]

    @classmethod
    def build(cls, spec: RunSpec) -> "Program":
        """Trace nothing yet; ValueError for a model that cannot be cut into the fragments."""
        model = build(spec.model)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        layout = Layout.build(tensor_specs(shapes, model.is_embedding), spec.algorithm.fragments)
        fragments = range(spec.algorithm.fragments)
        name = spec.algorithm.codec_up
        return cls(
            spec,
            model,
            layout,
            make_step(model, spec.inner),
            make_evaluate(model),
            tuple(jax.jit(partial(_read, layout, p)) for p in fragments),
            # Donated: the old parameters are not needed, and untouched leaves are not copied.
            tuple(jax.jit(partial(_adopt, layout, p), donate_argnums=(0,)) for p in fragments),
            tuple(jax.jit(partial(_encode, layout, p, name)) for p in fragments),
        )

    def initial(self) -> Any:
        """Fresh parameters from the run's seed: equal on every learner."""
        return jax.jit(self.model.init)(jax.random.key(self.spec.seed))


def _read(layout: Layout, p: int, params: Any) -> jax.Array:
    values_F: jax.Array = flatten(layout, p, to_named(params), jnp)
    return values_F


def _adopt(layout: Layout, p: int, params: Any, anchor_F: jax.Array, alpha: float) -> Any:
    """theta <- alpha * theta + (1 - alpha) * anchor, for the pieces of fragment p."""
    named = to_named(params)
    for piece, new in unflatten(layout, p, anchor_F):
        old = named[piece.name]
        part = old if piece.whole else old[piece.start : piece.stop]
        mixed = jnp.where(alpha == 0, new, alpha * part + (1 - alpha) * new).astype(old.dtype)
        whole = piece.whole
        named[piece.name] = mixed if whole else old.at[piece.start : piece.stop].set(mixed)
    return from_named(params, named)


def _encode(
    layout: Layout, p: int, name: str, params: Any, anchor_F: jax.Array, residual_F: Any
) -> tuple[Parts, jax.Array | None]:
    delta_F: jax.Array = pseudogradient(anchor_F, _read(layout, p, params))
    if residual_F is None:
        return encode(name, delta_F)[0], None
    return encode(name, delta_F + residual_F)


class Trainer:
    """Parameters, inner optimizer state, adopted anchors and residuals of one learner.

    Residuals exist for codecs below 16 bits only: 4 bytes per parameter on the device, and 8 more
    per value of a contribution that is pending.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.params = program.initial()
        chosen = optimizer(program.spec.inner, program.model.is_embedding)
        self.opt_state = jax.jit(chosen.init)(self.params)
        self.anchors: list[jax.Array | None] = [None] * len(program.layout.fragments)
        algorithm = program.spec.algorithm
        with_error = algorithm.error_feedback and feeds_back(algorithm.codec_up)
        self.feedback = [
            Feedback(jnp.zeros(size, jnp.float32)) if with_error else None
            for size in program.layout.sizes
        ]

    def initial_fragments(self) -> list[Values]:
        """Every fragment of the parameters as they are, fp32 of shape (F,)."""
        return [np.asarray(read(self.params)) for read in self.program.read]

    def step(self, tokens_BxL1: Any, rate: float) -> jax.Array:
        """One inner step; the loss as a handle."""
        self.params, self.opt_state, loss = self.program.step(
            self.params, self.opt_state, tokens_BxL1, rate
        )
        return loss

    def adopt(self, p: int, anchor_F: Values, alpha: float) -> None:
        """Overwrite (alpha 0) or mix fragment p; moments stay. The anchor becomes its base."""
        anchor = jnp.asarray(anchor_F)
        self.anchors[p] = anchor
        self.params = self.program.adopt[p](self.params, anchor, alpha)

    def contribution(self, p: int, round_: int) -> Encoded:
        """Handle of the encoded pseudo-gradient of fragment p as of now, for that round.

        It includes the residual; its own error is pending until `decided`.
        """
        anchor, feedback = self.anchors[p], self.feedback[p]
        assert anchor is not None, f"fragment {p} was never adopted"
        residual = None if feedback is None else feedback.residual
        parts, error = self.program.encode[p](self.params, anchor, residual)
        if feedback is not None and error is not None:
            feedback.sent(round_, error)
        return Encoded(self.program.spec.algorithm.codec_up, anchor.size, parts)

    def decided(self, p: int, round_: int, *, merged: bool) -> None:
        """A publication told what became of the contribution of fragment p to that round."""
        feedback = self.feedback[p]
        if feedback is not None:
            feedback.decided(round_, merged)

    def evaluate(self, sequences_SxL1: NDArray[np.int32]) -> float:
        """Loss of the adopted anchors (not of this learner's own parameters)."""
        return evaluate_anchors(self.program, [np.asarray(a) for a in self.anchors], sequences_SxL1)

    def warm_up(self, batch: int) -> None:
        """Compile step, adoption and encoding without changing any state."""
        scratch = Trainer(self.program)
        scratch.step(np.zeros((batch, self.program.spec.model.context_tokens + 1), np.int32), 0.0)
        for p, size in enumerate(self.program.layout.sizes):
            scratch.adopt(p, np.zeros(size, np.float32), self.program.spec.algorithm.alpha)
            scratch.contribution(p, 0).fetch()

    # --- inner state ---------------------------------------------------------------------------

    def inner_state(self) -> Any:
        """Handle of moments and counts as of now: copies, since the originals are donated."""
        return jax.tree.map(jnp.copy, self.opt_state)

    @property
    def inner_state_bytes(self) -> int:
        """Size of the moments and counts."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.opt_state))

    def load_inner_state(self, data: bytes) -> None:
        """Take over moments and counts; ValueError, as of `check_inner_state`, and no change."""
        self.opt_state = jax.tree.map(jnp.asarray, from_named(self.opt_state, self._parse(data)))

    def check_inner_state(self, data: bytes) -> None:
        """ValueError when `data` is not a sound inner state of this model; changes nothing."""
        self._parse(data)

    def _parse(self, data: bytes) -> dict[str, NDArray[Any]]:
        named = to_named(self.opt_state)
        try:
            given: dict[str, NDArray[Any]] = load(data)
        except SafetensorError as error:
            raise ValueError(f"not an inner state: {error}") from None
        wrong = [
            name
            for name in sorted(named.keys() | given.keys())
            if name not in named
            or name not in given
            or given[name].shape != named[name].shape
            or given[name].dtype != named[name].dtype
        ]
        if wrong:
            raise ValueError(f"an inner state of another model: {', '.join(wrong[:5])}")
        # A donor may have diverged: its moments would poison every step of the newcomer.
        diverged = [name for name, array in given.items() if not jnp.isfinite(array).all()]
        if diverged:
            raise ValueError(f"an inner state that is not finite: {', '.join(diverged[:5])}")
        return given


def state_bytes(state: Any) -> bytes:
    """Serialise an `inner_state` handle (fetches it: call it off the train thread)."""
    arrays = {name: np.asarray(leaf) for name, leaf in to_named(state).items()}
    return save({name: np.array(array, order="C") for name, array in arrays.items()})


def assemble(program: Program, anchors: Sequence[Values]) -> Any:
    """Parameters made of one anchor per fragment."""
    params = program.initial()
    for p, anchor_F in enumerate(anchors):
        params = program.adopt[p](params, jnp.asarray(anchor_F), 0.0)
    return params


def evaluate_anchors(
    program: Program, anchors: Sequence[Values], sequences_SxL1: NDArray[np.int32]
) -> float:
    """Mean nats per token of the published parameters."""
    return program.evaluate(assemble(program, anchors), sequences_SxL1)
