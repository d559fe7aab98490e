"""What a step takes of each of eight simulated devices, and where Muon's steps lead there.

What needs the devices runs in `muon_on_mesh.py`, a process of its own.
"""

from dataclasses import replace

import pytest
from learner.test_mesh import on_devices

from diloco_shared.budget.memory import ORTHOGONALISED, orthogonalised
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.shapes import SHAPES

# A step's rate is 0.01, and each of two steps moves a value of a matrix by about a fifth of that.
# NAdam's first steps, of embeddings, are about as long however small a gradient is: there the last
# bits of a gradient may show.
CLOSE, CLOSE_BY_NADAM = 1e-6, 1e-4


@pytest.mark.whole
def test_muon_steps_as_on_one_device_whatever_dimensions_are_cut() -> None:
    """There it is optax's own. Layers, experts and the output matrix are moved differently."""
    found = on_devices("--steps", by="muon_on_mesh.py")
    assert ["output/head_DxV" in one["off"] for one in found] == [True, False]
    for one in found:
        assert max(one["off"].values()) < CLOSE_BY_NADAM, one
        assert max(v for k, v in one["off"].items() if "embedding" not in k) < CLOSE, one


@pytest.mark.whole
def test_a_step_takes_no_more_of_a_device_than_the_budget_says() -> None:
    """Of few layers too, with gradients added up; and with Muon, of two dimensions that are cut."""
    accumulated, muon = on_devices("--memory", by="muon_on_mesh.py")
    assert accumulated["bytes"] <= accumulated["budget"] * 1.02, accumulated
    assert 0.8 * muon["budget"] <= muon["bytes"] <= muon["budget"], muon


def test_a_device_orthogonalises_its_share_of_the_layers_and_of_the_output() -> None:
    shape = replace(SHAPES["1b"], tied=True)
    matrix = 4 * ORTHOGONALISED * shape.width * shape.hidden
    found = [orthogonalised(shape, MeshSizes(fsdp=n)) for n in (2, 4 * shape.layers)]
    assert found == [matrix * -(-shape.layers // 2), matrix], "one layer at least"
    untied = replace(shape, tied=False, layers=1, vocabulary=1 << 20)
    own = shape.width * (1 << 20) // 8
    expected = 4 * (ORTHOGONALISED * own + 3 * shape.width**2)
    assert orthogonalised(untied, MeshSizes(fsdp=4, tensor=2)) == expected
    odd = replace(untied, vocabulary=(1 << 20) + 1)
    assert orthogonalised(odd, MeshSizes(fsdp=4, tensor=2)) > 7 * expected, "optax's own, whole"
    experts = SHAPES["30b-a3b"]
    both = [orthogonalised(experts, m) for m in (MeshSizes(fsdp=8), MeshSizes(fsdp=2, expert=4))]
    assert both[0] == both[1]
