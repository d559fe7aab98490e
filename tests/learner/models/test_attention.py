"""What computes attention: cuDNN where it can, and never where a learner would die of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from diloco_learner.models.attention import implementation
from diloco_shared.spec.shapes import SHAPES

OF_64 = replace(SHAPES["nano"], head_width=64)


def card(capability: str | None = "9.0", platform: str = "gpu", version: str = "cuda 13000") -> Any:
    """A device as jax tells of it."""
    tells = {} if capability is None else {"compute_capability": capability}
    return SimpleNamespace(
        platform=platform,
        client=SimpleNamespace(platform_version=f"PJRT C API\n{version}"),
        **tells,
    )


@pytest.mark.parametrize(
    ("device", "used"),
    [
        (card("8.0"), "cudnn"),
        (card("8.9"), "cudnn"),
        (card("12.1"), "cudnn"),
        (card("7.5"), "xla"),  # Turing
        (card("7.0"), "xla"),  # Volta
        (card("gfx942", version="rocm 70000"), "xla"),
        (card("9.0", version="rocm 70000"), "xla"),
        (card(None), "xla"),
        (card("unknown"), "xla"),
        (card(None, platform="tpu", version="libtpu"), "xla"),
        (card(platform="cpu"), "xla"),
    ],
)
def test_cudnn_is_asked_of_cards_that_have_it(device: Any, used: str) -> None:
    assert implementation([device], jnp.bfloat16, OF_64) == used


def test_cudnn_is_asked_only_where_every_card_has_it() -> None:
    assert implementation([card("9.0"), card("8.0")], jnp.bfloat16, OF_64) == "cudnn"
    assert implementation([card("9.0"), card("7.5")], jnp.bfloat16, OF_64) == "xla"


@pytest.mark.parametrize(
    ("dtype", "heads", "used"),
    [
        (jnp.bfloat16, {"head_width": 128}, "cudnn"),
        (jnp.float16, {"head_width": 8}, "cudnn"),
        (jnp.float32, {}, "xla"),
        (jnp.bfloat16, {"head_width": 136}, "xla"),
        (jnp.bfloat16, {"head_width": 100}, "xla"),
        (jnp.bfloat16, {"attention_cap": 50.0}, "xla"),
    ],
)
def test_cudnn_gets_numbers_and_heads_that_it_takes(
    dtype: Any, heads: dict[str, Any], used: str
) -> None:
    assert implementation([card()], dtype, replace(OF_64, **heads)) == used


def test_the_devices_of_this_machine_are_asked_as_jax_has_them() -> None:
    assert implementation(jax.local_devices(), jnp.bfloat16, OF_64) == "xla", (
        "tests run on processors"
    )
