"""Draws the figures of docs/explanation/algorithm.md: python site/figures.py [--png FOLDER].

Writes docs/images/algorithm-*.svg, the same bytes every time on one version of matplotlib. With
--png it also writes a picture of each into FOLDER, to be looked at.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

IMAGES = Path(__file__).parent.parent / "docs" / "images"

# Colours that remain apart for people who do not tell red from green (Okabe and Ito).
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
INK, GREY, PALE = "#222222", "#767676", "#dddddd"

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "decoupled-diloco",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 12,
    "axes.titlesize": 13,
    "axes.linewidth": 0.8,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}

Vector = NDArray[np.float64]


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1.8
) -> None:
    """From `start` to `end`, in the units of the axes."""
    style = {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=end, xytext=start, arrowprops=style | {"mutation_scale": 14})


def bars(ax: Axes, row: float, spans: list[tuple[float, float]], colour: str) -> None:
    """Bars of (begin, length) in one row."""
    ax.broken_barh(spans, (row - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.6)


# --- why data-parallel training does not work over the internet -----------------------------------


def traffic() -> Figure:
    """Who computes when: a billion parameters, 4 islands, 1 Gbit/s each way, steps of 1 s."""
    seconds = 100.0
    ring_s = 2 * (1 - 1 / 4) * 2e9 * 8 / 1e9  # bf16 gradients once around
    fragment_s = 2e9 / 6 * 8 / 1e9
    figure, ax = plt.subplots(figsize=(8.6, 4.3))
    rows = [7.0, 6.0, 4.5, 3.5, 2.0, 1.0, 0.0]
    names = ["computes", "link", "computes", "link", "computes", "link, up", "link, down"]
    step, turn = 1 + ring_s, 24 + ring_s
    bars(ax, rows[0], [(t, 1.0) for t in np.arange(0, seconds, step)], GREEN)
    bars(ax, rows[1], [(t + 1, ring_s) for t in np.arange(0, seconds, step)], ORANGE)
    bars(ax, rows[2], [(t, 24.0) for t in np.arange(0, seconds, turn)], GREEN)
    bars(ax, rows[3], [(t + 24, ring_s) for t in np.arange(0, seconds, turn)], ORANGE)
    bars(ax, rows[4], [(0.0, seconds)], GREEN)
    due = np.arange(4, seconds, 4)
    bars(ax, rows[5], [(t, fragment_s) for t in due], ORANGE)
    bars(ax, rows[6], [(t + fragment_s, fragment_s) for t in due], BLUE)
    heads = (
        (7.62, "Data-parallel: exchange in every step"),
        (5.12, "DiLoCo: exchange every 24 steps, all at once"),
        (2.62, "Decoupled: a sixth of the model every 4 steps, while training goes on"),
    )
    for y, text in heads:
        ax.text(0, y, text, weight="bold", va="center", fontsize=12)
    for y, text in ((6.5, "computes\n4 %"), (4.0, "computes\n50 %"), (1.0, "computes\n100 %")):
        ax.text(seconds * 1.02, y, text, va="center", fontsize=12)
    ax.set(xlim=(0, seconds), ylim=(-0.6, 8.0), xlabel="seconds")
    ax.set_yticks(rows, names)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return figure


# --- local steps and the outer optimizer ----------------------------------------------------------


def walk(start: Vector, goal: Vector, seed: int, steps: int = 14) -> Vector:
    """Noisy gradient steps towards a learner's own optimum: shape (steps + 1, 2)."""
    noise, bend = np.random.default_rng(seed), np.array([[1.0, 0.25], [0.25, 0.55]])
    path = [start]
    for _ in range(steps):
        gradient = bend @ (path[-1] - goal) + noise.normal(0, 0.75, 2)
        path.append(path[-1] - 0.1 * gradient)
    return np.array(path)


def momentum(gradients: list[float], rate: float, mu: float) -> Vector:
    """Length of each outer step: b <- mu b + g, step = rate (g + mu b)."""
    trace, steps = 0.0, []
    for gradient in gradients:
        trace = mu * trace + gradient
        steps.append(rate * (gradient + mu * trace))
    return np.array(steps)


def outer() -> Figure:
    """Left: two learners and the outer step. Right: what momentum makes of pseudo-gradients."""
    figure, (ax, beside) = plt.subplots(
        1, 2, figsize=(9.4, 4.4), gridspec_kw={"width_ratios": [1.2, 1]}
    )
    start = np.array([-3.2, 2.3])
    ends = []
    x, y = np.meshgrid(np.linspace(-4.4, 1.6, 80), np.linspace(-1.4, 3.2, 80))
    bowl = 0.5 * (x**2 + 0.5 * x * y + 0.55 * y**2)
    ax.contour(x, y, bowl, levels=[0.15, 0.6, 1.4, 2.6, 4.2, 6.4], colors=PALE, linewidths=1)
    for goal, seed, colour in (((0.4, 0.9), 3, BLUE), ((0.1, -1.1), 8, ORANGE)):
        path = walk(start, np.array(goal), seed)
        ax.plot(*path.T, "-o", color=colour, lw=1.2, ms=3.5)
        ends.append(path[-1])
    mean = (ends[0] + ends[1]) / 2
    new = start + 1.26 * (mean - start)
    ax.plot(*start, "o", color=INK, ms=8)
    ax.plot(*mean, "o", mfc="white", mec=GREEN, ms=7, zorder=5)
    arrow(ax, (start[0], start[1]), (new[0], new[1]), GREEN, 2.0)
    for end, colour in zip(ends, (BLUE, ORANGE), strict=True):
        ax.plot(*end, "o", color=colour, ms=7)
    ax.text(start[0] - 0.9, start[1] + 0.5, "Θ, where all begin", fontsize=12)
    ax.text(ends[0][0] + 0.1, ends[0][1] + 0.16, "θ₁", color=BLUE, fontsize=14)
    ax.text(ends[1][0] - 0.15, ends[1][1] - 0.42, "θ₂", color=ORANGE, fontsize=14)
    ax.text(mean[0] + 0.1, mean[1] + 0.12, "mean", color=GREEN, fontsize=12)
    ax.text(new[0] + 0.1, new[1] - 0.1, "new Θ", color=GREEN, fontsize=12)
    ax.text(0.0, -0.12, "optimum", color=GREY, fontsize=11, ha="center", va="top")
    ax.plot(0, 0, "+", color=GREY, ms=9)
    ax.set(xlim=(-4.4, 1.6), ylim=(-1.4, 3.2), xticks=[], yticks=[])
    ax.set_title("14 local steps of each learner, one outer step")
    for spine in ax.spines.values():
        spine.set_visible(False)

    rounds = np.arange(1, 13)
    steady = momentum([1.0] * 12, 0.7, 0.8)
    opposed = np.abs(momentum([(-1.0) ** n for n in range(12)], 0.7, 0.8))
    beside.axhline(1, color=GREY, lw=1, ls=":")
    beside.plot(rounds, steady, "-o", color=GREEN, lw=1.6, ms=4.5)
    beside.plot(rounds, opposed, "-s", color=RED, lw=1.6, ms=4.5)
    beside.text(5.2, 2.12, "rounds agree", color=GREEN, fontsize=12)
    beside.text(4.4, 0.55, "rounds contradict each other", color=RED, fontsize=12)
    beside.text(12.2, 1.2, "plain average", color=GREY, fontsize=11, ha="right")
    beside.set(ylim=(0, 3.6), xlim=(0.5, 12.5), xlabel="round")
    beside.set_xticks(range(2, 13, 2))
    beside.set_title("length of the outer step, η = 0.7, μ = 0.8")
    return figure


# --- rounds ---------------------------------------------------------------------------------------


def rounds() -> Figure:
    """Six fragments in turn: P = 6, H = 24, so a round opens every 4 steps."""
    figure, ax = plt.subplots(figsize=(8.6, 3.9))
    colours = (BLUE, ORANGE, GREEN, RED, "#CC79A7", GREY)
    for n in range(13):
        p, opens = n % 6, 4 + 4 * n
        bars(ax, p, [(opens, 2.0)], colours[p])
        ax.text(opens + 2.25, p, f"round {n}", va="center", fontsize=10.5)
    ax.annotate(
        "", xy=(28, -0.72), xytext=(4, -0.72), arrowprops={"arrowstyle": "<->", "color": INK}
    )
    ax.text(
        16,
        -1.0,
        "H = 24 steps: fragment 0 comes round again",
        ha="center",
        fontsize=11.5,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    for x in range(4, 57, 4):
        ax.axvline(x, color=PALE, lw=0.8, zorder=0)
    ax.set(xlim=(0, 58), ylim=(5.6, -1.7), xlabel="steps of the fastest learner")
    ax.set_xticks(range(0, 57, 4))
    ax.set_yticks(range(6), [f"fragment {p}" for p in range(6)])
    ax.tick_params(axis="y", length=0)
    return figure


def one_round() -> Figure:
    """One round of one fragment: K = 2, three learners of different speed, one behind a slow link.

    The unit is a step of the fastest learner.
    """
    figure, ax = plt.subplots(figsize=(9.4, 5.0))
    lanes = {"syncer": 3.2, "learner 1": 2.0, "learner 2": 1.0, "learner 3": 0.0}
    due, quorum, pull, closed, published = 4.0, 4.72, 5.2, 7.8, 8.5
    phases = (
        (due, quorum, PALE, "1"),
        (quorum, pull, ORANGE, "2"),
        (pull, closed, BLUE, "3"),
        (closed, published, GREEN, "4"),
    )
    for begin, end, colour, number in phases:
        bars(ax, lanes["syncer"], [(begin, end - begin)], colour)
        ink = INK if colour in (PALE, ORANGE) else "white"
        middle = (begin + end) / 2
        ax.text(middle, lanes["syncer"], number, ha="center", va="center", color=ink, weight="bold")
    # (lane, seconds a step, sent for so long, what came of it, adopts at)
    learners = (
        ("learner 1", 1.0, 0.5, True, 9.0),
        ("learner 2", 1.18, 0.5, True, 9.44),
        ("learner 3", 1.3, 3.2, False, 9.1),
    )
    for name, step, upload, merged, adopts in learners:
        y = lanes[name]
        boundaries = np.arange(0, 11.2, step)
        answer = float(boundaries[boundaries >= pull - 1e-9][0])
        ax.plot([0, 11], [y, y], color=GREY, lw=1)
        ax.plot([answer, adopts], [y, y], color=RED, lw=6, solid_capstyle="butt", alpha=0.75)
        if not merged:
            ax.plot([0, answer], [y, y], color=RED, lw=6, solid_capstyle="butt", alpha=0.75)
        inside = boundaries[boundaries <= 11]
        ax.plot(inside, np.full(len(inside), y), "|", color=INK, ms=11, mew=1.2)
        colour = BLUE if merged else RED
        ax.plot([answer, answer + upload], [y + 0.3, y + 0.3], color=colour, lw=2.6)
        label = "sends" if merged else "sends, too late"
        ax.text(answer + 0.02, y + 0.39, label, color=colour, fontsize=10.5, va="bottom")
        ax.plot(adopts, y, "v", color=GREEN, ms=11, zorder=5)
    ax.text(0.05, -0.16, "since it last adopted this fragment", color=RED, fontsize=10.5, va="top")
    for x, text in ((due, "due"), (pull, "pull"), (closed, "closed")):
        ax.axvline(x, color=GREY, lw=0.8, ls=":", zorder=0)
        ax.text(x, 4.0, text, ha="center", fontsize=11)
    ax.text(published, 3.68, "published", ha="center", fontsize=11)
    ax.text(
        0.05,
        3.22,
        "1  waits for K = 2 learners\n2  grace\n3  answers come in\n4  merge, commit, publish",
        fontsize=10.5,
        va="center",
        linespacing=1.35,
    )
    handles = [
        Line2D([], [], marker="|", ls="", color=INK, ms=11, mew=1.2, label="a step ends"),
        Line2D([], [], marker="v", ls="", color=GREEN, ms=9, label="adopts the result"),
        Line2D([], [], color=RED, lw=6, alpha=0.75, label="work that adoption overwrites"),
    ]
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    ax.set(xlim=(0, 11), ylim=(-0.55, 4.25), xlabel="time, in steps of the fastest learner")
    ax.set_xticks(range(0, 12))
    ax.set_yticks(list(lanes.values()), list(lanes))
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return figure


# --- merging --------------------------------------------------------------------------------------


def radial(deltas: Vector) -> Vector:
    """Radial-directional average of equal weights, of shape (M, 2)."""
    lengths = np.linalg.norm(deltas, axis=1)
    direction = (deltas / lengths[:, None]).mean(axis=0)
    averaged: Vector = lengths.mean() * direction / np.linalg.norm(direction)
    return averaged


def merge() -> Figure:
    """Left: the mean and RDA of two pseudo-gradients. Right: lengths as learners are added."""
    figure, (ax, beside) = plt.subplots(
        1, 2, figsize=(9.4, 4.4), gridspec_kw={"width_ratios": [1.15, 1]}
    )
    deltas = np.array([[8.0, 0.0], [0.0, 6.0]])
    mean, averaged = deltas.mean(axis=0), radial(deltas)
    angles = np.linspace(0, np.pi / 2, 60)
    for length, colour in ((5, RED), (7, GREEN)):
        ax.plot(length * np.cos(angles), length * np.sin(angles), ":", color=colour, lw=1)
    for end in deltas:
        arrow(ax, (0, 0), (end[0], end[1]), BLUE)
    arrow(ax, (0, 0), (mean[0], mean[1]), RED, 2.2)
    arrow(ax, (0, 0), (averaged[0], averaged[1]), GREEN, 2.2)
    ax.text(4.2, -0.3, "δ₁, length 8", color=BLUE, ha="center", va="top")
    ax.text(0.2, 5.4, "δ₂, length 6", color=BLUE)
    ax.text(4.75, 2.35, "mean\nlength 5", color=RED, va="center")
    ax.text(5.4, 5.1, "RDA\nlength 7", color=GREEN, va="center")
    ax.set(xlim=(-0.4, 8.8), ylim=(-1.0, 7.4), aspect="equal")
    ax.set_yticks(range(8))
    ax.set_title("two learners, equal weights")

    learners = np.arange(1, 17)
    beside.plot(learners, np.ones(16), "-o", color=GREEN, lw=1.6, ms=4.5)
    beside.plot(learners, 1 / np.sqrt(learners), "-s", color=RED, lw=1.6, ms=4.5)
    beside.text(9, 1.05, "RDA", color=GREEN)
    beside.text(8.2, 0.41, "mean: 1 / √M", color=RED)
    beside.set(ylim=(0, 1.2), xlabel="learners M")
    beside.set_xticks([1, 2, 4, 8, 12, 16])
    beside.set_title("length, if all are at right angles")
    return figure


# --- adoption -------------------------------------------------------------------------------------


def adoption() -> Figure:
    """One parameter of one learner over two turns of its fragment."""
    period, late = 24, 3
    noise = np.random.default_rng(4)
    figure, ax = plt.subplots(figsize=(8.8, 4.3))
    anchors = (1.0, 0.60, 0.42)
    for turn, anchor in enumerate(anchors[:2]):
        moves = noise.normal(-0.0105, 0.014, period)
        value = anchor + np.concatenate([[0.0], np.cumsum(moves)])
        steps = np.arange(turn * period, (turn + 1) * period + 1)
        asked = period - late
        ax.axvspan(steps[asked], steps[-1], color=RED, alpha=0.10, lw=0)
        ax.plot(steps[: asked + 1], value[: asked + 1], color=BLUE, lw=1.8)
        ax.plot(steps[asked:], value[asked:], color=RED, lw=2.4)
        ax.plot(steps[asked], value[asked], "o", color=BLUE, ms=8)
        ax.plot([steps[-1]] * 2, [value[-1], anchors[turn + 1]], ":", color=GREEN, lw=1.6)
        ax.plot(steps[-1], value[-1], "x", color=RED, ms=9, mew=2)
        if turn == 0:
            ax.annotate(
                "a copy is taken\nfor the round",
                xy=(steps[asked] - 0.3, value[asked] - 0.01),
                xytext=(13.5, 0.62),
                ha="center",
                arrowprops={"arrowstyle": "-", "color": GREY, "lw": 0.8},
            )
    for turn, anchor in enumerate(anchors):
        ax.plot(turn * period, anchor, "s", color=GREEN, ms=9, zorder=5)
        name = rf"$\hat{{\Theta}}$, version {7 + turn}"
        x, side = (48.9, "right") if turn == 2 else (turn * period + 0.8, "left")
        ax.text(x, anchor + 0.03, name, color=GREEN, ha=side)
    ax.text(24.6, 0.98, "3 steps that\nadoption overwrites", color=RED, va="top")
    ax.set(xlim=(-1, 50), ylim=(0.24, 1.1))
    ax.set(xlabel="steps of the learner", ylabel="one parameter, θ")
    ax.set_xticks([0, 21, 24, 45, 48])
    ax.set_yticks([])
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "traffic": traffic,
    "outer": outer,
    "rounds": rounds,
    "round": one_round,
    "merge": merge,
    "adoption": adoption,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="folder for pictures to look at")
    png = parser.parse_args().png
    for name, draw in FIGURES.items():
        with matplotlib.rc_context(STYLE):
            figure = draw()
            figure.tight_layout()
            nothing = {"Date": None, "Creator": None}
            figure.savefig(IMAGES / f"algorithm-{name}.svg", metadata=nothing)
            if png is not None:
                figure.savefig(png / f"algorithm-{name}.png", dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    main()
