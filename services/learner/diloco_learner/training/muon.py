"""Muon's step of matrices that several devices share.

    (layers, D, F): of every matrix some rows  -->  of some layers the whole matrix
                                           orthogonalised one by one, and back

optax orthogonalises a leaf as it lies. Where each device has some rows of every matrix, each of the
five iterations would gather the matrices of all layers on all devices. So they are handed round
once before, and once after: a device has its share of the layers then, and is busy with one at a
time. A leaf that is one matrix, as the output's, is cut along its longer side by all devices: only
products of its shorter side are whole. All else, and the state, is optax's own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from optax.contrib._muon import MuonState, orthogonalize_via_newton_schulz

from diloco_learner.models import from_named, to_named
from diloco_learner.models.sharding import Axes, names_of
from diloco_learner.training.mesh import Placement

# As optax has them.
ITERATIONS, EPS = 5, 1e-8


def on_mesh(
    plain: optax.GradientTransformation,
    beta: float,
    scale: float,
    placement: Placement,
    steps: Callable[[str, Any], bool],
) -> optax.GradientTransformation:
    """`plain`, optax's Muon at rate 1, for leaves that lie as `placement` says.

    `beta` and `scale`: its momentum's, and its `consistent_rms`. `steps`: whether a leaf, by its
    name, is orthogonalised. Optax does so where no devices share a matrix,
    or not evenly.
    """

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Of these leaves its updates are used by nobody: the compiler leaves them out.
        updates, state = plain.update(grads, state, params)
        own: MuonState = state.inner_states["muon"].inner_state[0]
        found, given, momenta = to_named(updates), to_named(grads), to_named(own.mu)
        for name, grad in given.items():
            lies = placement.parameters[name]
            alone = _devices(_cut(grad, lies)) == 1  # nothing to hand around
            uneven = grad.ndim == 2 and not _shared_evenly(grad, lies)
            if alone or uneven or not steps(name, grad):
                continue
            ahead = _ahead(momenta[name], grad, beta, own.count)
            rate = -scale * math.sqrt(max(grad.shape[-2:]))
            orthogonal = _layers if grad.ndim > 2 else _one_matrix
            found[name] = rate * orthogonal(ahead, own.ns_coeffs, lies)
        return from_named(updates, found), state

    return optax.GradientTransformation(plain.init, update)


def _ahead(momentum: jax.Array, grad: jax.Array, beta: float, count: jax.Array) -> jax.Array:
    """Nesterov's momentum, as optax has it: without the bias of a beginning with zeros."""
    known, fresh = 1 - beta ** (count + 1), 1 - beta**count
    ahead: jax.Array = beta * (momentum / known) + (1 - beta) * (grad / fresh)
    return ahead


def _cut(x: jax.Array, lies: PartitionSpec) -> list[tuple[int, Axes]]:
    """The dimensions of x's matrices that are cut, and by which axes."""
    return [(d, axes) for d, axes in enumerate(lies) if axes is not None and d >= x.ndim - 2]


def _devices(cut: list[tuple[int, Axes]]) -> int:
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(int(sizes[a]) for _, axes in cut for a in names_of(axes))


def _layers(x: jax.Array, coefficients: jax.Array, lies: PartitionSpec) -> jax.Array:
    """Of x (layers, ..., D, F) each matrix in the last two dimensions, orthogonalised."""
    cut = _cut(x, lies)
    devices, each = _devices(cut), partial(orthogonalize_via_newton_schulz, ns_coeffs=coefficients)

    def own(part: jax.Array) -> jax.Array:
        # Matrices of zeros fill up the layers that devices do not share evenly, and stay zeros.
        whole = jnp.pad(part, [(0, -len(part) % devices)] + [(0, 0)] * (part.ndim - 1))
        for d, axes in cut:
            whole = jax.lax.all_to_all(whole, axes, split_axis=0, concat_axis=d, tiled=True)
        flat = whole.reshape(-1, *whole.shape[-2:])
        found: jax.Array = jax.lax.map(each, flat)
        whole = found.reshape(whole.shape)
        for d, axes in reversed(cut):
            whole = jax.lax.all_to_all(whole, axes, split_axis=d, concat_axis=0, tiled=True)
        return whole[: len(part)]

    # With collectives of its own: where two dimensions are cut, the compiler's way from one lying
    # to the other is to gather all of it.
    found: jax.Array = jax.shard_map(own, in_specs=lies, out_specs=lies, check_vma=False)(x)
    return found


def _shared_evenly(x: jax.Array, lies: PartitionSpec) -> bool:
    """Whether the longer side of a matrix can be cut by all devices that share it."""
    return max(x.shape) % _devices(_cut(x, lies)) == 0


def _one_matrix(x: jax.Array, coefficients: jax.Array, lies: PartitionSpec) -> jax.Array:
    """A matrix x (D, F), orthogonalised as by optax."""
    cut = dict(_cut(x, lies))
    axes = tuple(a for cuts in cut.values() for a in names_of(cuts))
    long = int(x.shape[1] >= x.shape[0])
    moved = cut.get(1 - long)

    def own(part: jax.Array) -> jax.Array:
        if moved is not None:
            part = jax.lax.all_to_all(
                part, moved, split_axis=long, concat_axis=1 - long, tiled=True
            )
        found = _newton_schulz(part if long else part.T, coefficients, axes)
        part = found if long else found.T
        if moved is not None:
            part = jax.lax.all_to_all(
                part, moved, split_axis=1 - long, concat_axis=long, tiled=True
            )
        return part

    found: jax.Array = jax.shard_map(own, in_specs=lies, out_specs=lies, check_vma=False)(x)
    return found


def _newton_schulz(part: jax.Array, coefficients: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Some columns of a matrix, whose others the devices along these axes have, orthogonalised."""

    def added(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, axes) if axes else x

    c = coefficients.astype(part.dtype)
    part = part / (jnp.sqrt(added(jnp.sum(jnp.square(part)))) + EPS)
    for _ in range(ITERATIONS):
        squared = added(part @ part.T)
        part = c[0] * part + (c[1] * squared + c[2] * squared @ squared) @ part
    return part
