"""Where the environment names a device alone, the host is there besides, and computes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from diloco_learner.training import platforms

# Sets up JAX as a learner does, and looks for what it would compute on.
PROCESS = """
import sys
import diloco_learner.__main__ as learner
from diloco_learner.settings import Settings

learner._set_up_jax(Settings(cache=sys.argv[1]))
import jax
from diloco_learner.training import platforms

print(jax.config.jax_platforms)
try:
    platforms.check()
    print(jax.default_backend())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("named", "looked_for"),
    [("", ""), ("cuda", "cuda,cpu"), ("cuda,cpu", "cuda,cpu"), ("cpu", "cpu"), ("tpu", "tpu,cpu")],
)
def test_the_host_stands_behind_what_is_named(named: str, looked_for: str) -> None:
    assert platforms.with_host(named) == looked_for


def test_the_host_is_not_taken_for_a_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms.check()
    monkeypatch.setattr(platforms, "_alone", ["tpu"])
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    platforms.check()
    monkeypatch.setattr(jax, "default_backend", lambda: platforms.HOST)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS is tpu, and jax finds no such device"):
        platforms.check()


@pytest.mark.whole
@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("cpu", ["cpu", "cpu"]),
        ("cuda", ["cuda,cpu", "JAX_PLATFORMS is cuda, and jax finds no such device here: "]),
        ("cuda,cpu", ["cuda,cpu", "cpu"]),
    ],
)
def test_a_learner_finds_the_host_beside_a_device_and_never_takes_it_for_one(
    named: str, found: list[str], tmp_path: Path
) -> None:
    """No device of CUDA is visible to it."""
    environment = os.environ | {"JAX_PLATFORMS": named, "CUDA_VISIBLE_DEVICES": ""}
    given = [sys.executable, "-c", PROCESS, str(tmp_path)]
    told = subprocess.run(given, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()[-2:]
    assert [line[: len(start)] for line, start in zip(lines, found, strict=True)] == found
