"""Attention's heads on a mesh with the axis `tensor`, as cuDNN is given them: see `lying_alike`.

On the devices themselves that is seen in test_mesh.py.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import attention
from diloco_learner.models.attention import attend, implementation
from diloco_learner.training.mesh import shape_of
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.shapes import Shape

SHAPE = Shape(vocabulary=60, width=16, layers=1, heads=12, kv_heads=2, head_width=4, hidden=24)
PLAIN = jax.nn.dot_product_attention


def arrays(shape: Shape) -> list[Any]:
    rng = np.random.default_rng(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    return [jnp.asarray(rng.standard_normal((4, 6, n, 4)), jnp.float32) for n in heads]


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: what it would get is computed by XLA."""

    def computed(*arrays: Any, **options: Any) -> Any:
        assert options["implementation"] == "cudnn"
        return PLAIN(*arrays, **options | {"implementation": "xla"})

    monkeypatch.setattr(attention, "implementation", lambda *_: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", computed)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "lay", "keys"),
    [
        (12, 4, 2, "tensor", 4),  # a part of the heads of each
        (12, 2, 4, "tensor", 4),  # two copies of each key
        (12, 3, 4, "tensor", 12),  # four
        (12, 1, 4, "tensor", 4),
        (6, 3, 4, None, 3),  # nothing is cut
        (6, 3, 1, None, 3),
    ],
)
def test_queries_keys_and_values_are_cut_alike(
    heads: int, kv_heads: int, tensor: int, lay: str | None, keys: int, cudnn: None
) -> None:
    """Else cuDNN's kernel compiles nothing. And what comes out lies as what went in: the compiler
    would cut heads that the devices do not divide, too."""
    shape = replace(SHAPE, heads=heads, kv_heads=kv_heads)
    mesh = shape_of(MeshSizes(fsdp=2, tensor=tensor))
    assert mesh is not None
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(lambda *each: attend(shape, *each, whole=True))(*arrays(shape))
    told = [each for each in traced.eqns if each.primitive.name == "sharding_constraint"]
    assert [each.invars[0].aval.shape[2] for each in told] == [heads, keys, keys, heads]
    specs = [(*each.params["sharding"].spec, None, None)[:3] for each in told]
    assert specs == [("fsdp", None, lay)] * 4
    assert traced.eqns[-1] is told[-1]


@pytest.mark.parametrize(("kv_heads", "parts"), [(2, 4), (3, 4), (3, 2), (6, 4), (1, 12)])
def test_each_query_meets_the_key_that_it_would_have_met(
    kv_heads: int, parts: int, cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(SHAPE, kv_heads=kv_heads)

    def summed(*each: Any) -> Any:
        mixed = attend(shape, *each, whole=True)
        return jnp.sum(jnp.sin(mixed)), mixed

    graded = jax.grad(summed, argnums=(0, 1, 2), has_aux=True)
    monkeypatch.setattr(attention, "parts_along", lambda axis: parts)
    found = graded(*arrays(shape))
    monkeypatch.setattr(attention, "implementation", implementation)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(graded(*arrays(shape))), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
