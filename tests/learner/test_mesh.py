"""One learner on eight simulated devices: the losses and the bytes of one device.

What needs the devices runs in `on_mesh.py`, a process of its own.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from diloco_learner.models import ModelDef, build
from diloco_learner.models.sharding import divided
from diloco_learner.settings import Settings
from diloco_learner.training.mesh import Placement, mesh_over
from diloco_shared.spec.codecs import NAMES
from diloco_shared.spec.mesh import AXES, MeshSizes, WrongMesh
from diloco_shared.spec.run import Model

ROOT = Path(__file__).parents[2]
# Twenty steps, in fp32: sums of other orders differ in the last bits.
CLOSE = 1e-5
SIZES = {"data": 2, "fsdp": 4, "expert": 1, "tensor": 2}


def on_devices(*arguments: str, by: str = "on_mesh.py") -> list[Any]:
    """What the process says."""
    script = Path(__file__).with_name(by)
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(
    found: dict[str, Any], state_parts: int, *, codecs: int = len(NAMES), steps: int = 20
) -> None:
    assert found["begins_equal"]
    assert all(found["exact"].values()), found["exact"]
    assert len(found["exact"]) == 2 + codecs * 2 * 2
    # Norms and counts lie on every device.
    assert 1 / state_parts <= found["share"] < 1.1 / state_parts
    assert found["largest"] <= 2 * 8 * 32 * 64 // state_parts
    np.testing.assert_allclose(*found["held"], atol=CLOSE)
    np.testing.assert_allclose(*found["losses"], atol=CLOSE)
    losses = found["losses"][0]
    assert len(losses) == steps and losses[0] != losses[-1]


@pytest.mark.whole
def test_three_axes_give_the_losses_and_bytes_of_one_device() -> None:
    """With experts, all else of whose model is that of every other one."""
    (found,) = on_devices("fsdp=2,expert=2,tensor=2", "--experts", "--few")
    check(found, 8, codecs=2)


def test_cudnn_is_given_heads_that_lie_alike_whatever_tensor_divides() -> None:
    """Else it compiles nothing: its queries, keys and values must be cut in one way."""
    meshes = {"fsdp=2,tensor=4": "8/2", "tensor=8": "8/4", "tensor=4": "6/3"}
    words = [word for both in meshes.items() for word in both]
    for found in on_devices(*words, by="heads_on_mesh.py"):
        lay = found["lay"]
        assert len(lay) == 4 and len({tuple(ways) for ways in lay.values()}) == 1, found
        (way,) = lay["q"]
        assert ("tensor" in way) == (meshes[found["mesh"]] != "6/3"), "heads are cut where they can"
        assert max(found["off"].values()) < 1e-6, "loss and gradients are those of one device"


@pytest.mark.long
def test_every_mesh_gives_them_and_moments_go_from_one_to_another() -> None:
    *meshes, moved = on_devices("fsdp=8", "data=2,fsdp=4", "fsdp=4,tensor=2", "--resharded")
    for found, parts in zip(meshes, (8, 4, 8), strict=True):
        check(found, parts)
    for other in moved["others"].values():
        assert other["equal"], "what is kept does not tell who kept it"
        np.testing.assert_allclose(other["losses"], moved["four"], atol=CLOSE)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_mixture_of_experts_gives_them_on_every_mesh() -> None:
    meshes = {"fsdp=8": 8, "data=2,fsdp=4": 4, "fsdp=4,tensor=2": 8, "fsdp=2,expert=4": 8}
    meshes["expert=4"] = 4
    for found, parts in zip(on_devices(*meshes, "--experts"), meshes.values(), strict=True):
        check(found, parts)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_device_holds_much_more_than_its_share_and_one_fragment(tmp_path: Path) -> None:
    """Models of 4 and 30 billion parameters, compiled and not computed; nor does the learner's step
    have an exchange between devices that the bare one has not."""
    models = ("5b", "30b-a3b, one axis", "30b-a3b, twice", "30b-a3b, pairs", "30b-a3b")
    found, script = tmp_path / "found.json", ROOT / "bench" / "learner_mesh.py"
    words = ["--parts", "memory", "collectives", "--models", *models, "--json", str(found)]
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(found.read_text())
    assert set(report["memory"]) == set(models)
    for name, phases in report["memory"].items():
        over = {n: phase["over"] for n, phase in phases.items() if isinstance(phase, dict)}
        assert len(over) == 7 and max(over.values()) <= 1.2, (name, over)
    assert all(not model["more_than_bare"] for model in report["collectives"].values())


# --------------------------------------------------------------------------------------------------
# How tensors are cut.


@pytest.mark.parametrize(
    ("shape", "wish", "first", "cut"),
    [
        ((2, 64, 96), None, 1, (None, None, "fsdp")),  # the largest that can be
        ((8, 64, 94), None, 1, (None, "fsdp")),  # the largest cannot be
        ((4000, 6, 6), None, 1, ()),  # layers are never cut, and the rest is small
        ((4, 4), None, 0, ()),  # not worth it
        ((63, 95), None, 0, ()),  # nothing can be
        ((64, 96), ("fsdp", "tensor"), 0, ("fsdp", "tensor")),
        ((64, 95), ("fsdp", "tensor"), 0, ("fsdp",)),
        ((62, 96), ("fsdp", None), 0, (None, "fsdp")),  # another dimension takes it
        ((64, 96), ("tensor",), 0, ("tensor",)),
        ((64, 96), (("fsdp", "tensor"),), 0, (("fsdp", "tensor"),)),
        ((64, 96), (), 0, ()),
    ],
)
def test_a_dimension_is_cut_where_it_is_wished_and_can_be(
    shape: tuple[int, ...], wish: Any, first: int, cut: tuple[Any, ...]
) -> None:
    assert divided("t", shape, wish, SIZES, first) == PartitionSpec(*cut)


@pytest.mark.parametrize(
    ("wish", "first", "words"),
    [
        (("rows",), 0, "no axis 'rows'; take data, fsdp, expert, tensor"),
        ((None, None, "fsdp"), 0, "has 2 dimensions"),
        (("fsdp", "fsdp"), 0, "one dimension"),
        (("data",), 0, "'data' is for sequences"),
        (("fsdp",), 1, "holds the layers"),
    ],
)
def test_a_wish_that_makes_no_sense_is_told(wish: Any, first: int, words: str) -> None:
    with pytest.raises(ValueError, match=r"sharding\('t', \(64, 96\)\) gave") as told:
        divided("t", (64, 96), wish, SIZES, first)
    assert words in str(told.value)


def placed(model: ModelDef, **sizes: int) -> Placement:
    whole = dict.fromkeys(AXES, 1) | sizes
    mesh: Any = AbstractMesh(tuple(whole.values()), tuple(whole))
    return Placement.of(mesh, model, jax.eval_shape(model.init, jax.random.key(0)))


def own(*shapes: tuple[int, ...]) -> ModelDef:
    """A model of one's own that says nothing of axes."""

    def init(key: jax.Array) -> Any:
        return {f"t{n}": jax.numpy.zeros(shape) for n, shape in enumerate(shapes)}

    return ModelDef(init, lambda params, tokens: params["t0"][0, 0], lambda name: False)


def test_every_matrix_of_the_presets_is_cut() -> None:
    for preset in ("nano", "150m"):
        found = placed(build(Model.model_validate({"preset": preset})), fsdp=4, tensor=2)
        assert not found.warning and found.whole_share < 0.01
        matrices = [name for name, shape in found.shapes.items() if "norm" not in name]
        assert all(found.parameters[name] != PartitionSpec() for name in matrices)


def test_experts_lie_on_an_axis_of_their_own_and_all_else_on_it_too() -> None:
    model = build(Model.model_validate({"preset": "nano-moe"}))
    found = placed(model, fsdp=2, expert=4).parameters
    assert found["layers/mlp/gate_ExDxF"] == PartitionSpec(None, "expert", "fsdp")
    assert found["layers/attention/query_DxHK"] == PartitionSpec(None, ("fsdp", "expert"))
    with pytest.raises(WrongMesh, match="expert=3 does not divide the experts of this model"):
        placed(model, fsdp=2, expert=3)
    with pytest.raises(WrongMesh, match="expert=2 is for models with a mixture of experts"):
        placed(build(Model.model_validate({"preset": "nano"})), expert=2)


def test_what_cannot_be_cut_is_told() -> None:
    text = placed(own((64, 64), (63, 95)), fsdp=4).warning
    assert "59% of the model's values lie whole" in text and "t1 of shape (63, 95)" in text
    assert not placed(own((64, 64), (3, 5)), fsdp=4).warning
    with pytest.raises(WrongMesh, match="fsdp=4 cuts no tensor of this model"):
        placed(own((63, 95)), fsdp=4)
    with pytest.raises(WrongMesh, match=r"give it sharding\(name, shape\)"):
        placed(own((64, 64)), tensor=2)


def test_one_device_has_no_mesh() -> None:
    assert mesh_over(MeshSizes(), jax.devices()) is None


def test_the_setting_names_every_axis_that_it_takes() -> None:
    said = Settings.model_fields["mesh"].description or ""
    axes = said.partition("axes are ")[2].partition(".")[0]
    assert re.split(r", | and ", axes) == [*AXES]
