"""Draws README's picture from a real run: python site/pictures.py [REPORT] (make pictures).

REPORT is what `diloco demo` or `diloco report --json` wrote; the committed one of the demo if none
is named. Writes docs/images/run.svg, the same bytes every time from one report.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from figures import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, STYLE
from matplotlib.axes import Axes
from matplotlib.patches import Patch

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "results" / "demo.json"
PICTURE = ROOT / "docs" / "images" / "run.svg"
# What a learner was doing, as `diloco_cli.lanes` names it, and as the picture does.
ACTIVITIES = {
    "stepping": (GREEN, "trains"),
    "paused": (PALE, "is paused"),
    "joining": (GREY, "starts"),
    "recovering": (ORANGE, "recovers"),
    "hung": (BLUE, "stands still"),
    "down": (RED, "is dead"),
}


def lanes(ax: Axes, story: dict[str, Any]) -> None:
    """A bar for each learner, and a tick for each merge below them."""
    names = sorted(story["lanes"])
    seen = []
    for row, name in enumerate(names):
        for activity, began, ended in story["lanes"][name]:
            colour, _ = ACTIVITIES[activity]
            ax.barh(row, ended - began, left=began, height=0.55, color=colour)
            seen.append(activity)
    ax.plot(story["commits"], [len(names) - 0.1] * len(story["commits"]), "|", color=INK, ms=7)
    ax.set_yticks([*range(len(names)), len(names) - 0.1], [*names, "merges"])
    ax.set_ylim(len(names) + 0.3, -0.6)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("seconds since the first learner joined")
    handles = [Patch(color=c, label=text) for a, (c, text) in ACTIVITIES.items() if a in seen]
    ax.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.3))


def loss(ax: Axes, story: dict[str, Any]) -> None:
    """Of the merged model, on text that nobody trained on."""
    at, values = zip(*story["losses"], strict=True)
    ax.plot(at, values, "o-", color=INK, ms=4, lw=1.5)
    ax.set_ylabel("validation loss")
    ax.set_ylim(bottom=0)
    ax.tick_params(axis="x", labelbottom=False)


def draw(story: dict[str, Any]) -> None:
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(9.6, 5.2), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        loss(above, story)
        lanes(below, story)
        for at, kind, target in story["faults"]:
            for ax in (above, below):
                ax.axvline(at, color=RED, lw=1, ls=":")
            above.annotate(f" {kind} {target}", (at, above.get_ylim()[1]), color=RED, va="top")
        figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", nargs="?", type=Path, default=REPORT)
    draw(json.loads(parser.parse_args().report.read_text("utf-8"))["story"])


if __name__ == "__main__":
    main()
