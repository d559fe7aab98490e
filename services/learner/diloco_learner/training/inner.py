"""The inner optimizer and the train step (paper section 2).

The learning rate is an argument of the step, not part of the optimizer: schedules are functions
of the run's progress, which only the caller knows.

A bad batch costs its step and nothing else: where the loss or the gradients' norm is not a finite
number, parameters, moments and counts stay what they were, to the bit.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from diloco_learner.models import ModelDef, from_named, places, to_named
from diloco_learner.models.sharding import BATCH, spread
from diloco_learner.training import muon
from diloco_learner.training.mesh import Placement
from diloco_learner.training.programs import Ahead
from diloco_shared.spec.run import Inner

# Root mean square of Muon's updates: about that of AdamW's, so that rates for one suit the other
# (Liu et al. 2025, arXiv 2502.16982).
MUON_RMS = 0.2


def optimizer(
    inner: Inner,
    is_embedding: Callable[[str], bool],
    stacked: str | None = None,
    matrices_in: Collection[str] = (),
) -> optax.GradientTransformation:
    """Clipping, then the optimizer at rate 1; the step scales its update by the rate."""
    after = _clipped(inner, is_embedding, stacked, matrices_in)
    return optax.chain(optax.clip_by_global_norm(inner.clip_norm), after)


def _clipped(
    inner: Inner,
    is_embedding: Callable[[str], bool],
    stacked: str | None,
    matrices_in: Collection[str],
    placement: Placement | None = None,
) -> optax.GradientTransformation:
    """What follows clipping.

    `stacked`: the part of the tree whose leaves hold a tensor of each layer, `matrices_in`: the
    tensors that hold many matrices (`ModelDef`).

    AdamW and Muon decay matrices only: norms and biases have no scale to lose. Muon steps
    matrices but embeddings along their orthogonalised momentum, all else by NAdam. The others come
    with their own defaults; see `_by_name`.
    """

    def dimensions(name: str, leaf: Any) -> int:
        """Of one tensor: a leaf of all layers has one more."""
        return int(leaf.ndim) - (stacked is not None and stacked in name.split("/"))

    def matrices(params: Any) -> Any:
        named = to_named(params)
        return from_named(params, {n: dimensions(n, leaf) > 1 for n, leaf in named.items()})

    if inner.optimizer == "adamw":
        chosen = optax.adamw(
            1.0,
            b1=inner.b1,
            b2=inner.b2,
            weight_decay=inner.weight_decay,
            mask=matrices,
        )
    elif inner.optimizer == "muon":

        def steps(name: str, leaf: Any) -> bool:
            many = name.rpartition("/")[2] in matrices_in
            return dimensions(name, leaf) == 2 + many and not is_embedding(name)

        def orthogonal(params: Any) -> Any:
            # The last two axes: those of every layer's and expert's matrix are taken one by one.
            axes = {
                name: contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)
                if steps(name, leaf)
                else None
                for name, leaf in to_named(params).items()
            }
            return from_named(params, axes)

        undecayed = contrib.muon(
            1.0,
            beta=inner.b1,
            consistent_rms=MUON_RMS,
            adam_b1=inner.b1,
            adam_b2=inner.b2,
            muon_weight_dimension_numbers=orthogonal,
        )
        if placement is not None:
            undecayed = muon.on_mesh(undecayed, inner.b1, MUON_RMS, placement, steps)
        chosen = _decayed(undecayed, inner.weight_decay, matrices)
    else:
        chosen = _by_name(inner.optimizer, stacked)
    return chosen


def _decayed(
    chosen: optax.GradientTransformation, rate: float, decays: Callable[[Any], Any]
) -> optax.GradientTransformation:
    """With decay of the leaves that `decays` names: the NAdam within optax's Muon would decay all
    that it steps. The state is that of `chosen`."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = chosen.update(grads, state, params)
        wanted = decays(params)
        return jax.tree.map(
            lambda u, p, its: u - rate * p if its else u, updates, params, wanted
        ), state

    return optax.GradientTransformation(chosen.init, update)


# Of a name in `optimizers.OPTIMIZERS` that measure a tensor as a whole, by a norm, a mean or a
# maximum. What holds a tensor of each layer they would take for one tensor.
MEASURE_TENSORS = ("adafactor", "fromage", "lamb", "lars", "novograd", "sm3")
FROMAGE = "fromage"
# Of its norms: what optax's own has.
FROMAGE_NORM_MIN = 1e-6


def _by_name(name: str, stacked: str | None) -> optax.GradientTransformation:
    """One of optax with its own defaults, at rate 1.

    Of Fromage it is the step before parameters are made shorter: see `_added`.
    """
    if name == FROMAGE:
        chosen = optax.chain(optax.scale_by_trust_ratio(FROMAGE_NORM_MIN), optax.scale(-1.0))
    else:
        chosen = getattr(optax, name)(1.0)
    return _layer_by_layer(chosen, stacked) if name in MEASURE_TENSORS and stacked else chosen


def _added(name: str, params: Any, updates: Any, rate: Any) -> Any:
    """Parameters after a step. Fromage (Bernstein et al. 2020, arXiv 2002.03432) keeps them from
    growing by it: it makes them shorter, and how much is no multiple of the rate."""
    new = jax.tree.map(lambda p, u: p + rate * u, params, updates)
    if name != FROMAGE:
        return new
    share = 1 / jnp.sqrt(1 + jnp.square(rate))
    return jax.tree.map(lambda p: share * p, new)


def _layer_by_layer(
    chosen: optax.GradientTransformation, stacked: str
) -> optax.GradientTransformation:
    """`chosen`, for leaves that hold a tensor of each layer as if each layer had leaves of its own.

    Its state is a pair: of the leaves without layers, and of those with them.
    """

    def parted(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        named = to_named(tree)
        layered = {p.leaf for p in places(named, stacked).values() if p.layer is not None}
        inside = {name: leaf for name, leaf in named.items() if name in layered}
        return {n: leaf for n, leaf in named.items() if n not in layered}, inside

    def each(function: Callable[..., Any], leaves: Any, *more: Any) -> Any:
        """Of all layers at once; as it is, where no leaf has any."""
        return (jax.vmap(function) if leaves else function)(leaves, *more)

    def init(params: Any) -> Any:
        outside, inside = parted(params)
        return chosen.init(outside), each(chosen.init, inside)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        (outside, inside), (own, of_layers) = parted(grads), state
        theirs, layers = parted(params)
        first, own = chosen.update(outside, own, theirs)
        rest, of_layers = each(chosen.update, inside, of_layers, layers)
        return from_named(grads, {**first, **rest}), (own, of_layers)

    return optax.GradientTransformation(init, update)


def _moved(
    inner: Inner, model: ModelDef, placement: Placement | None
) -> Callable[[Any, Any, Any, jax.Array, Any], tuple[Any, Any]]:
    """(params, opt_state, (grads, their norm), sound, rate) -> what they are after the step.

    They are what they were, where the gradients are not `sound`.
    """
    after = _clipped(inner, model.is_embedding, model.stacked, model.matrices, placement)

    def update(
        params: Any, opt_state: Any, given: tuple[Any, jax.Array], rate: Any
    ) -> tuple[Any, Any]:
        grads, norm = given
        # Here, where it becomes a part of the update: before the branch that a CPU takes, another
        # set of gradients would be written and read.
        grads = jax.tree.map(partial(_shortened, inner.clip_norm, norm), grads)
        updates, rest = after.update(grads, opt_state[1], params)
        return _added(inner.optimizer, params, updates, rate), (opt_state[0], rest)

    def move(
        params: Any, opt_state: Any, given: tuple[Any, jax.Array], sound: jax.Array, rate: Any
    ) -> tuple[Any, Any]:
        if jax.default_backend() == "cpu":
            # Where values were chosen one by one, its compiler would keep the old moments beside
            # the new ones: 11 bytes a parameter. An accelerator would wait for its host instead.
            moved: tuple[Any, Any] = jax.lax.cond(
                sound, update, lambda *old: (old[0], old[1]), params, opt_state, given, rate
            )
            return moved

        def chosen(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(sound, new, old)

        # Chosen value by value, within the update of each leaf: no copy of anything is kept.
        new, state = update(params, opt_state, given, rate)
        return jax.tree.map(chosen, new, params), jax.tree.map(chosen, state, opt_state)

    return move


def _shortened(norm_max: float, norm: jax.Array, grads: jax.Array) -> jax.Array:
    """What `optax.clip_by_global_norm` makes of it, with the norm that is known already: on several
    devices they would add it up twice."""
    return jnp.where(norm < norm_max, grads, (grads / norm.astype(grads.dtype)) * norm_max)


def make_step(
    model: ModelDef,
    inner: Inner,
    shapes: Any = None,
    placement: Placement | None = None,
    *,
    poisoned: bool = False,
) -> Ahead:
    """The inner step: (params, opt_state, tokens_BxL1, rate) -> (params, opt_state, loss).

    Parameters and optimizer state are donated: use what it returns. Tokens have shape
    (accumulation * B, L + 1); gradients are averaged over the parts, each counting as many times as
    it has tokens to be predicted. Without any of those loss and gradients are 0. The loss is NaN
    exactly where the step was skipped. `poisoned`: a fault, no loss and no gradient of it is a
    number. With a `placement`, `shapes` are those of the parameters, which lie as it says.
    """
    move, of_part = _moved(inner, model, placement), _gradients(model, poisoned=poisoned)

    def gradients(params: Any, tokens_BxL1: jax.Array) -> tuple[jax.Array, Any]:
        if inner.accumulation == 1:
            return of_part(params, tokens_BxL1)
        parts = tokens_BxL1.reshape(inner.accumulation, -1, tokens_BxL1.shape[-1])
        parts = spread(parts, None, BATCH)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            tokens, weight = part
            found = of_part(params, tokens)
            return jax.tree.map(lambda t, x: t + weight * x, total, found), None

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(add, zero, (parts, weights(parts)))
        loss, grads = jax.tree.map(lambda x: x / inner.accumulation, total)
        return loss, grads

    def weights(parts_AxBxL1: jax.Array) -> jax.Array:
        """What makes a mean over all targets of the parts' means: exactly 1 where no part has more
        of them than another. A model that knows no signs has as many in all parts."""
        if not model.masked_tokens:
            return jnp.ones(inner.accumulation)
        counts_A = jnp.sum(parts_AxBxL1[..., 1:] >= 0, axis=(1, 2))
        return counts_A * inner.accumulation / jnp.maximum(jnp.sum(counts_A), 1)

    def step(
        params: Any, opt_state: Any, tokens_BxL1: jax.Array, rate: float
    ) -> tuple[Any, Any, jax.Array]:
        loss, grads = gradients(params, tokens_BxL1)
        norm = optax.tree.norm(grads)
        sound = jnp.isfinite(loss) & jnp.isfinite(norm)
        params, opt_state = move(params, opt_state, (grads, norm), sound, rate)
        return params, opt_state, jnp.where(sound, loss, jnp.nan)

    if placement is None:
        return Ahead(step, _shape, donate=(0, 1))
    chosen = optimizer(inner, model.is_embedding, model.stacked, model.matrices)
    state = jax.eval_shape(chosen.init, shapes)
    leaves, moments, one = placement.tree(shapes), placement.tree(state), placement.replicated
    # Of several parts every device gets all tokens, a few bytes each: it takes its own of each.
    tokens = placement.batch(inner.batch_sequences) if inner.accumulation == 1 else one
    lying = ((leaves, moments, tokens, one), (leaves, moments, one))
    scope, turn = placement.scope, placement.turn
    return Ahead(step, _shape, donate=(0, 1), scope=scope, turn=turn, lying=lying)


def _gradients(
    model: ModelDef, *, poisoned: bool
) -> Callable[[Any, jax.Array], tuple[jax.Array, Any]]:
    """(params, tokens_BxL1) -> (the loss, the gradient of what is minimised)."""

    def minimised(params: Any, tokens_BxL1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """And the loss, which is all of it for most models."""
        if model.objective is None:
            loss = model.loss(params, tokens_BxL1)
            whole = loss
        else:
            whole, loss = model.objective(params, tokens_BxL1)
        return (whole * jnp.nan, loss * jnp.nan) if poisoned else (whole, loss)

    def gradients(params: Any, tokens_BxL1: jax.Array) -> tuple[jax.Array, Any]:
        (_, loss), grads = jax.value_and_grad(minimised, has_aux=True)(params, tokens_BxL1)
        return loss, grads

    return gradients


def _shape(params: Any, opt_state: Any, tokens_BxL1: Any, rate: Any) -> tuple[int, ...]:
    """What tells one step's program from another's."""
    shape: tuple[int, ...] = tokens_BxL1.shape
    return shape


# --------------------------------------------------------------------------------------------------
# Inner steps that were skipped because their loss or gradient was not a finite number.
#
# A skipped step counts as a step with its tokens: its data is consumed, and the intervals that
# contributions tell must meet without a gap. It changes neither parameters nor moments.

# Skipped steps in a row that end a learner, or H where that is more: in so many, every fragment is
# adopted anew where rounds keep up, which mends parameters that have overflowed. Where they take
# longer, the process that is started again adopts them, so nothing is gained by skipping on. Bad
# data never comes in such rows; a rate too high does.
SKIPS_MAX = 20
# Between two events that tell of skipped steps, in seconds.
TELL_S = 60.0


class Diverged(Exception):
    """No step has brought a finite number for a long while, whatever was adopted meanwhile."""


@dataclass(slots=True)
class Skips:
    """Of one incarnation. `every_steps`: H, in which every fragment is adopted anew where rounds
    keep up."""

    every_steps: int
    fragments: int
    total: int = 0
    in_a_row: int = 0
    untold: int = 0
    told_at: float = -math.inf
    adopted: set[int] = field(default_factory=set)  # fragments, since the last sound step

    @property
    def in_a_row_max(self) -> int:
        """So many are still borne."""
        return max(SKIPS_MAX, self.every_steps)

    def stepped(self, loss: float) -> bool:
        """A step's loss is known; whether that step was skipped. Raises Diverged."""
        if math.isfinite(loss):
            self.in_a_row = 0
            self.adopted.clear()
            return False
        self.total += 1
        self.in_a_row += 1
        self.untold += 1
        if self.in_a_row > self.in_a_row_max:
            raise Diverged(
                f"{self.in_a_row} steps in a row were skipped: their loss or their gradient is "
                f"not a finite number. {len(self.adopted)} of {self.fragments} fragments were "
                "adopted anew meanwhile. If all learners end like this, lower inner.learning_rate "
                "or inner.clip_norm. If this one alone does, look at its data and its device: it "
                "starts again with what is published and a healthy learner's moments"
            )
        return True

    def tell(self, step: int, now: float) -> str:
        """What to tell of steps up to `step`, or "": at most one text in TELL_S seconds."""
        if not self.untold or now < self.told_at + TELL_S:
            return ""
        many = "one step was" if self.untold == 1 else f"{self.untold} steps were"
        self.untold, self.told_at = 0, now
        return (
            f"{many} skipped, the last of them step {step}: the loss or the gradient is not a "
            f"finite number. Parameters and moments are as before; {self.total} skipped so far, "
            f"more than {self.in_a_row_max} in a row would end this learner"
        )
