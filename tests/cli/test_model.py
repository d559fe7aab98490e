"""`diloco model describe`: what a preset, a run or a checkpoint is made of."""

import json
import sys
from pathlib import Path

import pytest

from diloco_cli.__main__ import main
from diloco_cli.words import INVALID
from diloco_shared.hf.weights import digest_of, open_weights
from diloco_shared.spec.shapes import SHAPES

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"
RUN = """
name = "own"
[algorithm]
fragments = 3
[model]
preset = "micro"
context_tokens = 32
[budget]
steps = 10
"""


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", "model", "describe", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # As their makers count them.
    [("150m", 134_515_008), ("500m", 494_032_768), ("1b", 1_235_814_400), ("5b", 4_022_468_096)],
)
def test_a_preset_is_as_large_as_its_model_says(
    preset: str,
    parameters: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, preset, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == parameters == sum(found["fragments"])
    assert found["every_value_once"]
    assert found["tensors_in_one_fragment"] + found["tensors_cut_by_rows"] == found["tensors"]


def test_lines_say_what_the_figures_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "35m", "--fragments", "24") == 0
    text = capsys.readouterr().out
    assert text.startswith("35m: 35,")
    assert "family       llama: it can be exported for transformers" in text
    assert "every value is in exactly one fragment" in text
    # The embedding is cut where it would be larger than two fragments.
    assert "1 are cut by rows" in text


@pytest.mark.parametrize(
    ("words", "gigabytes", "sequences", "mesh"),
    [
        (("--devices", "8"), 38, 8, "fsdp=8"),
        (("--devices", "64"), 11, 64, "fsdp=64"),
        (("--devices", "256"), 13, 256, "fsdp=256"),
        (("--mesh", "fsdp=8,tensor=8"), 10, 8, "fsdp=8,tensor=8"),
    ],
)
def test_a_large_model_takes_less_of_each_device_the_more_there_are(
    words: tuple[str, ...],
    gigabytes: int,
    sequences: int,
    mesh: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As docs/how-to/many-devices.md says; no device is without a sequence."""
    assert run(monkeypatch, "12b", "--fragments", "24", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["device_bytes"]["bytes"] / 1e9) == gigabytes
    assert (found["mesh"], found["batch_sequences"], found["idle"]) == (mesh, sequences, "")


def test_devices_for_which_a_run_has_no_sequences_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(RUN)  # of 8 sequences
    assert run(monkeypatch, str(tmp_path / "run.toml"), "--devices", "64") == 0
    text = capsys.readouterr().out
    assert "56 of 64 devices idle, since the mesh is fsdp=8" in text
    assert "on each of 8 (fsdp=8)" in text and "/ 8 devices" in text
    assert run(monkeypatch, str(tmp_path / "run.toml"), "--mesh", "fsdp=64") == INVALID
    assert "cannot be spread evenly over 64 devices" in capsys.readouterr().err


def test_devices_share_the_state_and_not_a_fragments_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terms = {}
    for devices in (1, 8):
        assert run(monkeypatch, "1b", "--devices", str(devices), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        terms[devices] = {t["name"]: t["bytes"] for t in found["device_bytes"]["terms"]}
    n = found["parameters"]
    for name, bytes_each in (("parameters", 4), ("gradients", 4), ("optimizer state", 8)):
        assert terms[1][name] == pytest.approx(bytes_each * n, rel=1e-3)
        assert terms[8][name] == pytest.approx(bytes_each * n / 8, rel=1e-3)
    largest = max(found["fragments"])
    assert terms[8]["one fragment's work"] >= 4 * largest
    # The embeddings of this model are its output matrix. A step has fewer tokens than the
    # vocabulary, so that no device has it whole: in bf16, with its gradient, and turned.
    head = found["shape"]["vocabulary"] * found["shape"]["width"]
    assert (2 + 4) * head / 8 < terms[8]["gathered"] < (2 + 4) * head
    assert "gathered" not in terms[1]
    assert run(monkeypatch, "1b", "--devices", "8") == 0
    assert "on each of 8 (fsdp=8), with adamw" in capsys.readouterr().out


def test_of_a_run_its_own_settings_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    assert run(monkeypatch, str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["fragments"]), found["context_tokens"]) == (3, 32)
    assert found["shape"]["width"] == SHAPES["micro"].width


def test_of_a_checkpoint_the_digest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(GOLDEN / "gemma3")) == 0
    text = capsys.readouterr().out
    assert digest_of(open_weights(GOLDEN / "gemma3")) in text and "gemma3_text" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("smal",), "is no preset (nano, micro"),
        ((".",), "config.json: No such file"),
        (("nano", "--fragments", "99999"), "algorithm.fragments (99999) is too high"),
    ],
)
def test_what_cannot_be_described_is_said(
    words: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *words) == INVALID
    assert says in capsys.readouterr().err
