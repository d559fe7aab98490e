"""How tokens and the output matrix meet where a mesh of devices shares both.

The tokens of a batch are spread over devices, and each device keeps some rows of the output matrix
(D, V). One of both must go around:

- **The matrix**, where there are more tokens than the vocabulary has. Each device gathers it once,
  computes the logits of its own tokens, and hands the gradient of the rest on after all of them.
- **The tokens**, where there are fewer. The matrix is turned once, so that each device has whole
  columns, which are the tokens V that it scores. Devices then score all tokens, a part at a time,
  and put together what they found. No device ever has more of the matrix than its share. This is
  the parallel cross-entropy of Megatron-LM (arXiv 1909.08053, section 3), over all devices that
  share a state and not along `tensor` alone.

The two cost the same where tokens and vocabulary are as many (`tokens_go_around`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco_learner.models.sharding import BATCH, STATE, fitting
from diloco_shared.budget.memory import tokens_go_around

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Which axes of the mesh cut what; all methods are for use within `jax.shard_map`.

    Without a mesh no axis is named, and everything is as it was given.
    """

    batch: Names = ()  # tokens
    rows: Names = ()  # the rows D of the matrix
    columns: Names = ()  # its columns V
    tokens_go: bool = False

    @classmethod
    def of(cls, tokens: int, width: int, vocabulary: int) -> "Meeting":
        """In the mesh in which this is traced, of so many tokens of a batch."""
        mesh = jax.sharding.get_abstract_mesh()
        return cls() if mesh.empty else cls.on(dict(mesh.shape), tokens, width, vocabulary)

    @classmethod
    def on(cls, sizes: Mapping[str, int], tokens: int, width: int, vocabulary: int) -> "Meeting":
        """`sizes`: devices by axis."""
        batch, state = (tuple(a for a in axes if sizes[a] > 1) for axes in (BATCH, STATE))
        rows, columns = _fitting(width, STATE, sizes), _fitting(vocabulary, ("tensor",), sizes)
        others = math.prod(sizes[a] for a in batch if a not in state)
        parts = math.prod(sizes[a] for a in (*columns, *state))
        able = bool(state) and rows == state and vocabulary % parts == 0
        return cls(
            batch, rows, columns, able and tokens_go_around(-(-tokens // others), vocabulary)
        )

    @property
    def alone(self) -> bool:
        """Nothing is shared: there is one device, or one has all that it needs."""
        return not (self.batch or self.columns)

    @property
    def tokens(self) -> PartitionSpec:
        """How (T, ...) lie."""
        return PartitionSpec(self.batch or None)

    def matrix(self, by_rows: bool) -> PartitionSpec:
        """How the given matrix lies: (V, D) where `by_rows`, else (D, V)."""
        rows, columns = self.rows or None, self.columns or None
        return PartitionSpec(columns, rows) if by_rows else PartitionSpec(rows, columns)

    @property
    def scorers(self) -> Names:
        """Axes whose devices score different columns."""
        return (*self.columns, *self.rows) if self.tokens_go else self.columns

    def met(self, own_DxV: jax.Array) -> jax.Array:
        """All rows D of what a device scores, from its own part of the matrix."""
        if not self.rows:
            return own_DxV
        found: jax.Array
        if self.tokens_go:
            found = jax.lax.all_to_all(own_DxV, self.rows, 1, 0, tiled=True)
        else:
            found = jax.lax.all_gather(own_DxV, self.rows, axis=0, tiled=True)
        return found

    def own(self, gradient_DxV: jax.Array) -> jax.Array:
        """The sum over all tokens of gradients of what `met` gave: a device keeps its own of it.

        It is said as that one instruction. A compiler that is told only how the sum is to lie may
        make the whole of it on every device.
        """
        found = gradient_DxV
        if self.tokens_go:
            found = jax.lax.all_to_all(found, self.rows, 0, 1, tiled=True)
        elif self.rows:
            found = jax.lax.psum_scatter(found, self.rows, scatter_dimension=0, tiled=True)
        return _sum(found, tuple(a for a in self.batch if a not in self.rows))

    def gathered(self, own_C: jax.Array) -> jax.Array:
        """The tokens (C, ...) that a device scores, from its own."""
        return jax.lax.all_gather(own_C, self.rows, tiled=True) if self.tokens_go else own_C

    def given_back(self, slope_CxD: jax.Array) -> jax.Array:
        """Of gradients of what `gathered` gave: the sum over all columns, for the own tokens."""
        if self.tokens_go:
            slope_CxD = jax.lax.psum_scatter(slope_CxD, self.rows, tiled=True)
        return _sum(slope_CxD, self.columns)

    def first_column(self, columns: int) -> jax.Array | int:
        """Of a device that scores so many columns: which is its first one."""
        return jax.lax.axis_index(self.scorers) * columns if self.scorers else 0

    def largest(self, found_C: jax.Array) -> jax.Array:
        """Over all columns."""
        return jax.lax.pmax(found_C, self.scorers) if self.scorers else found_C

    def over_columns(self, found: jax.Array) -> jax.Array:
        """The sum of what each device found in its columns."""
        return _sum(found, self.scorers)

    def over_tokens(self, found: jax.Array) -> jax.Array:
        """The sum of what was found of the tokens that a device scores: that of all."""
        done = self.rows if self.tokens_go else ()
        return _sum(found, tuple(a for a in self.batch if a not in done))


def _fitting(size: int, wished: Names, sizes: Mapping[str, int]) -> Names:
    kept = fitting(size, wished, sizes)
    return (kept,) if isinstance(kept, str) else kept or ()


def _sum(x: jax.Array, axes: Names) -> jax.Array:
    found: jax.Array = jax.lax.psum(x, axes) if axes else jnp.asarray(x)
    return found
