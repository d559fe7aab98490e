"""GPUs of a machine: which there are, and that no two learners get the same one without need."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.gpus import VISIBLE, gpus_here, shared_out, unused, visible


def test_what_cuda_is_told_counts_and_nothing_else() -> None:
    assert gpus_here({VISIBLE: "2,5"}) == ("2", "5")
    assert gpus_here({VISIBLE: ""}) == () == gpus_here({VISIBLE: "-1"})
    assert visible("0, GPU-8f3a,-1,3") == ("0", "GPU-8f3a"), "what is behind a bad one is hidden"


def test_the_drivers_tool_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\necho 'GPU 1: NVIDIA H100'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpus_here({}) == ("0", "1")
    tool.write_text("#!/bin/sh\necho no driver\nexit 9\n")
    assert gpus_here({}) == ()


def test_a_machine_without_the_tool_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus_here({}) == ()


@given(st.integers(1, 16), st.integers(1, 16))
def test_nobody_gets_what_another_has_where_there_are_enough(count: int, learners: int) -> None:
    gpus = [str(n) for n in range(count)]
    shares = shared_out(gpus, learners)
    assert len(shares) == learners
    assert len({len(share) for share in shares}) == 1, "all alike"
    given_out = [gpu for share in shares for gpu in share]
    if learners <= count:
        assert len(set(given_out)) == len(given_out) == learners * (count // learners)
    else:
        assert set(given_out) == set(gpus), "none is idle"


def test_so_many_as_asked_or_a_clear_word() -> None:
    assert shared_out(["0", "1", "2", "3"], 2, 2) == [("0", "1"), ("2", "3")]
    assert shared_out(["0", "1", "2", "3"], 2, 1) == [("0",), ("1",)]
    with pytest.raises(ValueError, match="2 learners of 4 need 8 GPUs, and this machine has 4"):
        shared_out(["0", "1", "2", "3"], 2, 4)
    assert shared_out([], 3) == [(), (), ()]


def test_gpus_that_jax_does_not_use_are_told() -> None:
    assert unused((), "cpu") == unused(("0",), "gpu") == ""
    assert unused(("0", "1"), "cpu").startswith("this machine has 2 GPUs, and JAX uses none")
