"""Figures in the sentences of pages are those that the page's own commands print."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from docs.shell import commands
from docs.shown import DOCS, ROOT, paragraphs, shown
from typer.testing import CliRunner

from diloco_cli.commands import whole_app
from diloco_shared.spec.shapes import SHAPES, active_parameters, tensors

HOW_TO = DOCS / "how-to"
BANDWIDTH = HOW_TO / "tuning.md"
DEVICES = HOW_TO / "many-devices.md"


def printed(*words: str) -> dict[str, Any]:
    """What a command of `diloco` says as JSON."""
    done = CliRunner().invoke(whole_app(), [*words, "--json"])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def command(page: Path, begins: tuple[str, ...]) -> tuple[str, ...]:
    """The one command of a page's blocks that begins so, without the program."""
    typed = [t.words[1:] for text in shown(page) if text.whole for t in commands(text.text)]
    (found,) = [words for words in typed if words[: len(begins)] == begins]
    return found


def sentences(page: Path, about: str) -> str:
    """The one paragraph of a page in which a text stands."""
    (found,) = [text for text in paragraphs(page) if about in text]
    return found


def two_digits(value: float) -> str:
    """As pages write a rate: 0.58, 1.1, 2.7."""
    return f"{value:.2g}" if value >= 1 else f"{value:.2f}"


# --------------------------------------------------------------------------------------------------
# Links.


def bandwidth(*words: str) -> dict[str, Any]:
    return printed(*command(BANDWIDTH, ("sim", "bandwidth")), *words)


def test_the_page_about_tuning_says_what_links_need() -> None:
    found = bandwidth()
    assert found["settings"]["fragments"] == 24
    said = sentences(BANDWIDTH, "You see the figure of the formula")
    for key, line in (
        ("average_up", "`Gbit/s average up` (NNN)"),
        ("average_down", "`Gbit/s average down` what a learner receives (NNN)"),
        ("shared_link", "`Gbit/s shared link` (NNN)"),
    ):
        assert line.replace("NNN", two_digits(found[f"gbit_per_s_{key}"])) in said


def test_the_page_about_tuning_says_what_fewer_fragments_need() -> None:
    said = sentences(BANDWIDTH, "Fewer fragments need a faster link")
    fewer = bandwidth("--fragments", "6")["gbit_per_s_shared_link"]
    slower = bandwidth("--fragments", "6", "--overlap-steps", "4")["gbit_per_s_shared_link"]
    assert f"shared link` says {two_digits(fewer)} here" in said
    assert f"besides it says {two_digits(slower)}." in said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("the default", ()),
        ('`keyframe_codec = "bf16"`', ("--keyframe-bits", "16")),
        ("`keyframe_every = 64`", ("--keyframe-every", "64")),
        ("both", ("--keyframe-bits", "16", "--keyframe-every", "64")),
    ],
)
def test_the_table_of_keyframes_is_computed(row: str, words: tuple[str, ...]) -> None:
    found = bandwidth(*words)
    cells = sentences(BANDWIDTH, f"| {row} |").split(" | ")
    given = found["settings"]
    newest = given["keyframe_bits"] + (given["keyframe_every"] - 1) * given["down_bits"]
    assert cells[1:] == [
        f"{two_digits(found['gbit_per_s_average_down'])} Gbit/s",
        f"{two_digits(found['gbit_per_s_shared_link'])} Gbit/s",
        f"{newest / 8 * given['params'] / 1e9:.0f} GB |",
    ]


def test_the_example_of_the_algorithm_is_computed() -> None:
    """A billion parameters in six fragments, with the overlap that suits its link and with 2."""
    said = sentences(DOCS / "explanation" / "algorithm.md", "two of the six publications")
    for steps, text in ((8, "due then need {} and {} Gbit/s"), (2, "they need {} and {} Gbit/s")):
        needs = [
            printed(
                *("sim", "bandwidth", "--params", "1e9", "--fragments", "6", "--up-bits", bits),
                *("--down-bits", bits, "--overlap-steps", str(steps)),
            )["gbit_per_s_shared_link"]
            for bits in ("16", "4.0625")
        ]
        assert text.format(*(f"{need:.2f}" for need in needs)) in said


def test_the_front_page_says_what_the_committed_output_says() -> None:
    figures = json.loads((DOCS / "results" / "bandwidth.json").read_text("utf-8"))["figures"]
    said = " ".join((ROOT / "README.md").read_text("utf-8").split())
    most = figures["shared_link_int4_keyframes_fp32"]
    hub = json.loads((DOCS / "results" / "bandwidth.json").read_text("utf-8"))["data_centers"][2]
    assert hub["data_centers"] == 8 and "in 24 fragments" in said
    assert f"receives {most:.2f} Gbit/s at most" in said
    assert f"needs {figures['dp_m8']:.0f}. The hub's own link carries" in said
    assert f"carries {hub['hub_of_a_run_int4']:.1f}. This is computed" in said


# --------------------------------------------------------------------------------------------------
# Memory of devices.


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--devices", "1"), "takes {} GB on one device"),
        (("--devices", "8"), "it takes {} GB on each of 8,"),
        (("--devices", "64"), "{} GB on each of 64, and"),
        (("--devices", "256"), "{} GB on each of 256"),
        (("--devices", "64", "--mesh", "fsdp=8,tensor=8"), "it is {} GB on each of 64"),
    ],
)
def test_the_page_about_devices_says_what_a_model_takes(words: tuple[str, ...], text: str) -> None:
    """The page's command, of so many devices."""
    found = printed(*command(DEVICES, ("model", "describe")), *words)
    said = sentences(DEVICES, "billion parameters with AdamW and 24 fragments")
    assert f"{found['parameters'] / 1e9:.1f} billion" in said
    assert re.search(
        r"(?<!\d)" + re.escape(text.format(f"{found['device_bytes']['bytes'] / 1e9:.0f}")), said
    )


# --------------------------------------------------------------------------------------------------
# Parameters of models.

_UNITS = {"million": 1e6, "billion": 1e9}


def parameters_of(names: list[str]) -> list[float]:
    """Of each preset; and of those with experts, what a token takes."""
    total = [sum(math.prod(t.shape) for t in tensors(SHAPES[name])) for name in names]
    return [*total, *(active_parameters(SHAPES[name]) for name in names if SHAPES[name].experts)]


def test_the_table_of_presets_has_all_with_their_parameters() -> None:
    text = (HOW_TO / "models.md").read_text("utf-8")
    table = text.partition("| preset | parameters |")[2].partition("\n\n")[0]
    found = list[str]()
    for row in table.splitlines()[2:]:
        presets, size = row.split("|")[1:3]
        names, told = re.findall(r"`([^`]+)`", presets), re.findall(r"\d+(?:\.\d+)?", size)
        (unit,) = (value for word, value in _UNITS.items() if word in size)
        assert {*names} <= {*SHAPES}, row
        for value, number in zip(parameters_of(names), told, strict=True):
            assert f"{value / unit:.{len(number.partition('.')[2])}f}" == number, row
        found += names
    assert sorted(found) == sorted(SHAPES), "a new preset has a row in docs/how-to/models.md"
