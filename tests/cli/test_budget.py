"""`diloco budget`: the same figures as streams get, and as docs/how-to/budget.md derives."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.__main__ import main
from diloco_cli.commands.budget import bits_per_s
from diloco_cli.words import INVALID, CliError
from diloco_shared.spec.algorithm import MEMBERS_MAX

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "budget.md"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["diloco", "budget", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def in_page() -> str:
    """The specification that the page works out."""
    found = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert found is not None
    return found[1]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(in_page(), encoding="utf-8")
    return file


def test_the_page_shows_what_the_command_prints(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(large), "--rate", "2Gbit") == 0
    text = capsys.readouterr().out
    rows = [
        line.split("|") for line in PAGE.read_text("utf-8").splitlines() if line.count("|") == 4
    ]
    printed = [cells[3].strip() for cells in rows if re.search(r"[GM]B$", cells[3].strip())]
    assert len(printed) > 15
    for figure in printed:
        assert re.search(rf"\b{re.escape(figure)}\b", text), figure


def test_what_is_derived_by_hand_is_within_a_percent(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(large), "--rate", "5Gbit", "--step-s", "5", "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    n, f, four_bits = 11.765e9, 491.5e6, 0.5 + 2 / 256
    by_hand = {
        "UP": 8 * n + 4 * four_bits * n + 2 * 4 * 2 * four_bits * f,
        "DN": 4 * n + 15 * four_bits * n + 4 * 4 * f,
        "STATE": 4 * 8 * n + 2 * 16 * f,
    }
    assert found["parameters"] == pytest.approx(n, rel=0.001)
    for kind, size in by_hand.items():
        assert found["streams"][kind]["bytes"] == pytest.approx(size, rel=0.01)
    syncer = 12 * n + 2 * 4 * four_bits * f + 2 * 16 * f + 2 * 12 * f + 4 * f
    assert found["memory"]["syncer"]["bytes"] == pytest.approx(syncer, rel=0.01)
    seconds = {t["name"]: t["seconds"] for t in found["transfers"]}
    assert seconds["initial parameters"] == pytest.approx(75.3, rel=0.01)
    assert seconds["a newcomer's moments"] == pytest.approx(151, rel=0.01)
    assert seconds["a standby's snapshot"] == pytest.approx(301, rel=0.01)
    assert found["bits_per_s"]["learner_up"] == pytest.approx(0.4e9, rel=0.01)
    assert found["bits_per_s"]["hub_out"] == pytest.approx(5.46e9, rel=0.01)
    assert found["disk"]["syncer"]["bytes"] == pytest.approx(3 * 16 * n + 4 * n + 16 * n, rel=0.01)
    # Every 24 rounds, of a step each, a snapshot and an anchor of every fragment.
    written = found["disk_bytes_per_s"]["syncer"]
    assert written == pytest.approx((16 + 4) * n / (24 * 5), rel=0.01)


@pytest.mark.parametrize(("every", "shards"), [(24, 1), (240, 1), (6, 1), (24, 3)])
def test_what_snapshots_write(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    every: int,
    shards: int,
) -> None:
    """A snapshot writes what rounds have changed: at most every fragment once."""
    file = tmp_path / "run.toml"
    file.write_text(
        in_page().replace("fragments = 24", f"fragments = 24\nshards = {shards}")
        + f"[keeping]\nsnapshot_every_rounds = {every}\n"
    )
    assert run(monkeypatch, str(file), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["disk_bytes_per_s"] is None
    fragment = found["parameters"] / 24
    steps = every * shards  # a shard opens a round every so many of 24 steps
    changed = min(every, 24 // shards)
    by_hand = (16 * changed + 4 * every) * fragment / steps
    assert found["disk_bytes_per_step"]["syncer"] == pytest.approx(by_hand, rel=0.01)


def test_the_disk_of_a_syncer_is_shown_as_a_rate(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(large), "--step-s", "5") == 0
    shown = capsys.readouterr().out.partition("Written to disks, on average per second")[2]
    assert re.search(r"syncer +1\.961 GB/s", shown)


def test_every_term_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "r"\n[budget]\nsteps = 100\n')
    assert run(monkeypatch, str(file), "--learners", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["learners"] == 3
    needs = [n for part in ("streams", "memory", "disk") for n in found[part].values()]
    for need in needs:
        assert need["bytes"] == sum(t["bytes"] for t in need["terms"])
        assert all(t["name"] and t["how"] for t in need["terms"])


def test_exports_lie_on_the_disk_of_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    text = 'name = "r"\n[budget]\nsteps = 100\n[keeping]\nexports = 5\n'

    def disk() -> list[tuple[str, float]]:
        assert run(monkeypatch, str(file), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        need, n = found["disk"]["coordinator"], found["parameters"]
        return [(t["name"], t["bytes"] / n) for t in need["terms"]]

    file.write_text(text)
    assert disk() == [("an export being made", 8.0)]
    file.write_text(text + "export_every_rounds = 10\n")
    assert disk() == [("exports", 20.0), ("an export being made", 8.0)]


def test_what_lies_where_checkpoints_are_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of it goes by itself."""
    file = tmp_path / "run.toml"

    def terms(steps: int) -> dict[str, int]:
        file.write_text(f'name = "r"\n[budget]\nsteps = {steps}\n[algorithm]\nshards = 2\n')
        assert run(monkeypatch, str(file), "--learners", "3", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        need, n = found["disk"]["checkpoints"], found["parameters"]
        told = {t["name"]: t["bytes"] for t in need["terms"]}
        of_learners = found["disk"]["learner"]["bytes"] / 3  # two are kept, and one is written
        assert told.pop("run-wide checkpoints") == pytest.approx(4 * (16 * n + 3 * of_learners))
        return told

    assert terms(100) == {}
    few, many = terms(1_000_000), terms(2_000_000)
    assert [*few] == ["archived tape"]
    in_stream = 2 * 2048 * (1200 + 3 * 640)
    assert many["archived tape"] + in_stream == pytest.approx(
        2 * (few["archived tape"] + in_stream), rel=0.001
    )


def test_faults_of_the_file_and_a_size_that_nobody_knows_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('name = "r"\n[budget]\nsteps = 100\n[model]\npreset = "gpt4"\n')
    assert run(monkeypatch, str(file)) == INVALID
    assert "model.preset" in capsys.readouterr().err
    own = 'name = "r"\n[budget]\nsteps = 100\n[model]\nfactory = "m:make"\n'
    file.write_text(own)
    assert run(monkeypatch, str(file)) == INVALID
    assert "model.parameters" in capsys.readouterr().err
    file.write_text(own + "parameters = 1_000_000_000\n")
    assert run(monkeypatch, str(file)) == 0
    assert "N, the number of parameters, is 1,000,000,000." in capsys.readouterr().out
    assert run(monkeypatch, str(file), "--rate", "fast") == INVALID
    assert run(monkeypatch, str(file), "--learners", str(MEMBERS_MAX)) == 0
    assert run(monkeypatch, str(file), "--learners", str(MEMBERS_MAX + 1)) == 2


@pytest.mark.parametrize(
    ("rate", "bits"), [("5Gbit", 5e9), ("20 Mbit/s", 2e7), ("100MB", 8e8), ("1.5kbit", 1500)]
)
def test_rates(rate: str, bits: float) -> None:
    assert bits_per_s(rate) == bits


@pytest.mark.parametrize("rate", ["", "5", "0Gbit", "-1Gbit", "1.2.3Gbit", "5 parsec"])
def test_what_is_no_rate(rate: str) -> None:
    with pytest.raises(CliError, match="--rate"):
        bits_per_s(rate)


def test_devices_that_would_idle_are_told_and_not_counted(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = large.read_text("utf-8")
    sequences = int(re.findall(r"batch_sequences = (\d+)", text)[0])
    for devices, used in ((sequences, sequences), (8 * sequences, sequences)):
        assert run(monkeypatch, str(large), "--devices", str(devices), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["mesh"] == f"fsdp={used}" and bool(found["idle"]) == (devices > used)
    assert run(monkeypatch, str(large), "--devices", str(8 * sequences)) == 0
    assert f"{7 * sequences} of {8 * sequences} devices idle" in capsys.readouterr().out
    assert run(monkeypatch, str(large), "--mesh", "fsdp=1", "--json") == 0
    alone = json.loads(capsys.readouterr().out)["memory"]["learner device"]["bytes"]
    assert alone > found["memory"]["learner device"]["bytes"]


def test_each_host_of_a_learner_has_its_part_of_the_anchors(
    large: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def memory(*options: str) -> dict[str, dict[str, int]]:
        assert run(monkeypatch, str(large), "--mesh", "fsdp=4", "--json", *options) == 0
        found = json.loads(capsys.readouterr().out)["memory"]
        return {
            name: {term["name"]: term["bytes"] for term in need["terms"]}
            for name, need in found.items()
        }

    one, four = memory(), memory("--hosts", "4")
    assert "learner, other hosts" not in one
    for name in ("learner", "learner, other hosts"):
        # And a first evaluation holds its part of what was adopted before, while hosts compile.
        assert four[name]["anchors"] == -(-2 * one["learner"]["anchors"] // 4)
    assert four["learner, other hosts"]["a transfer"] < one["learner"]["a transfer"]
    assert run(monkeypatch, str(large), "--mesh", "fsdp=4", "--hosts", "2") == 0
    assert "share its work as fsdp=4, on 2 hosts" in capsys.readouterr().out
    assert run(monkeypatch, str(large), "--mesh", "fsdp=4", "--hosts", "5") == INVALID
