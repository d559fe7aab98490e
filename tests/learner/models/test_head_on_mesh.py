"""The loss of a head and its gradients are the same on a mesh, whatever goes around there.

What needs the devices runs in `head_on_devices.py`, a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_learner.models.head_on_mesh import Meeting
from diloco_shared.budget.memory import gathered
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.shapes import Shape


def check(*arguments: str, tokens_go: list[bool]) -> None:
    """Sums of a hundred tokens and columns, in fp32, in another order."""
    script = Path(__file__).with_name("head_on_devices.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [case["tokens_go"] for case in found] == tokens_go
    for case in found:
        assert case["counted"] and case["loss"] < 1e-3 and case["gradients"] < 1e-5, case


def test_tokens_or_the_matrix_go_around_and_the_loss_is_the_plain_one() -> None:
    check("--few", tokens_go=[True, False, True])


@pytest.mark.long
def test_so_it_is_on_every_mesh_and_where_nothing_can_be_shared_evenly() -> None:
    even = [True, False, True, True, True, False, False, True, False, False]
    check(tokens_go=[*even, False, True, False])


@pytest.mark.parametrize(
    ("tokens", "width", "vocabulary", "goes"),
    [
        (256, 64, 256, True),  # as many as the vocabulary
        (257, 64, 256, False),
        (256, 63, 256, False),  # rows cannot be cut
        (256, 64, 257, False),  # columns cannot be
    ],
)
def test_tokens_go_around_where_they_are_fewer_than_the_vocabulary(
    tokens: int, width: int, vocabulary: int, goes: bool
) -> None:
    sizes = {"data": 1, "fsdp": 4, "expert": 2, "tensor": 1}
    assert Meeting.on(sizes, tokens, width, vocabulary).tokens_go == goes
    # Along `data` each group of devices has a state, and its own tokens.
    assert Meeting.on(sizes | {"data": 2}, 2 * tokens, width, vocabulary).tokens_go == goes


def test_alone_is_who_shares_neither_tokens_nor_columns() -> None:
    one = {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert Meeting.on(one, 8, 8, 8).alone and Meeting().alone
    for axis in one:
        assert not Meeting.on(one | {axis: 2}, 8, 8, 8).alone


def test_no_device_is_planned_to_have_the_matrix_whole_where_tokens_go_around() -> None:
    shape = Shape(
        vocabulary=128_000, width=64, layers=1, heads=1, kv_heads=1, head_width=64, hidden=64
    )
    whole = (2 + 4) * 128_000 * 64
    eight = MeshSizes(fsdp=8)
    assert gathered(shape, 128_001, mesh=eight) == whole
    assert gathered(shape, 128_000, mesh=eight) == whole // 4  # as given, and turned
    assert gathered(shape, 128_001, mesh=MeshSizes(fsdp=4, tensor=2)) == whole // 2
    assert gathered(shape, 128_000, mesh=MeshSizes(fsdp=4, tensor=2)) == whole // 4
