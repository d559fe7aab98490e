"""Charts of the announcement's kind, from our figures next to the published ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco_planner.goodput_model import SIZES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, PALE, BLUE, SKY = "#6b7280", "#d1d5db", "#1d4ed8", "#93c5fd"
DPI = 130
# The announcement's average over benchmarks, of data-parallel and of Decoupled, in per cent.
PUBLISHED_ACCURACY = (64.4, 64.1)


def bandwidth_chart(bars: list[tuple[str, float, float]], file: Path) -> None:
    """Bars of (name, published, ours) in Gbit/s on a logarithmic axis, written as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 4.2), layout="constrained")
    axes = figure.subplots()
    _pairs(axes, bars, "{:.3g}")
    axes.set_yscale("log")
    axes.set_ylim(0.1, 1000)
    axes.set_ylabel("Gbit/s per data center (log)")
    axes.set_title("Required bandwidth: 5B parameters, 8 data centers, 1 s steps", fontsize=10)
    _finish(figure, file)


def goodput_chart(cells: list[dict[str, Any]], file: Path) -> None:
    """The announcement's bars at 1.2 million chips, and all sizes beside them, written as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    at = {(c["method"], c["learners"], c["chips"]): c for c in cells}
    shown = (
        ("dp", 1, "data-parallel"),
        ("elastic", 1, "elastic\ndata-parallel"),
        ("decoupled", 8, "Decoupled\nM=8"),
    )
    bars = []
    for method, learners, name in shown:
        cell = at[method, learners, 1_200_000]
        bars.append((name, cell["published"], 100 * cell["goodput"]))
    _pairs(left, bars, "{:.0f}")
    left.set_ylim(0, 110)
    left.set_ylabel("goodput, %")
    left.set_title("1.2 million chips, each interrupted once a year", fontsize=10)
    _curves(right, cells)
    _finish(figure, file)


def quality_chart(losses: tuple[float, float], under: str, file: Path) -> None:
    """Published accuracies beside our test losses, as PNG.

    `losses` of data-parallel and of Decoupled, in nats per token; `under` says what was trained.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.2), layout="constrained")
    published, ours = figure.subplots(1, 2)
    names = ("data-parallel", "Decoupled")
    for axes, values, colors, form in (
        (published, PUBLISHED_ACCURACY, (PALE, SKY), "{:.1f}"),
        (ours, losses, (GREY, BLUE), "{:.3f}"),
    ):
        axes.bar(names, values, 0.6, color=colors)
        for i, value in enumerate(values):
            axes.annotate(
                form.format(value), (i, value), (0, 3), textcoords="offset points", ha="center"
            )
        axes.set_ylim(0, 1.15 * max(values))
    published.set_ylabel("average accuracy, % (higher is better)")
    published.set_title("published: Gemma 4 models, benchmarks", fontsize=10)
    ours.set_ylabel("test loss, nats per token (lower is better)")
    gap = losses[1] / losses[0] - 1
    ours.set_title(f"ours: {under}; {gap:+.1%}", fontsize=10)
    _finish(figure, file)


def gaps_chart(rows: list[dict[str, Any]], file: Path) -> None:
    """Loss relative to data-parallel over the number of learners, as PNG.

    Each row has `corpus`, `learners`, `gap`, `gap_spread` (None for one seed) and `published`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(dict.fromkeys(r["corpus"] for r in rows), (BLUE, GREY, SKY), strict=False))
    for corpus, color in colors.items():
        shown = [r for r in rows if r["corpus"] == corpus]
        learners, gaps = [r["learners"] for r in shown], [100 * r["gap"] for r in shown]
        spread = [100 * (r["gap_spread"] or 0.0) for r in shown]
        axes.errorbar(learners, gaps, spread, fmt="o-", color=color, capsize=3, label=corpus)
    known = {r["learners"]: 100 * r["published"] for r in rows if r["published"] is not None}
    axes.plot(list(known), list(known.values()), "o", mfc="white", mec="black", zorder=3)
    axes.set_title("circles: published, 35M parameters", fontsize=10)
    axes.axhline(0, color=PALE, zorder=0)
    axes.set_xscale("log", base=2)
    everyone = sorted({r["learners"] for r in rows})
    axes.set_xticks(everyone, [str(m) for m in everyone])
    axes.set_xlabel("learners")
    axes.set_ylabel("test loss above data-parallel's, %")
    axes.legend(fontsize=8)
    _finish(figure, file)


def _pairs(axes: "Axes", bars: list[tuple[str, float, float]], form: str) -> None:
    width = 0.38
    for i, (name, published, ours) in enumerate(bars):
        dark, light = (BLUE, SKY) if "Decoupled" in name else (GREY, PALE)
        for x, value, color in ((i - width / 2, published, light), (i + width / 2, ours, dark)):
            axes.bar(x, value, width * 0.95, color=color)
            label = form.format(value)
            axes.annotate(label, (x, value), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(bars)), [name for name, _, _ in bars])
    axes.set_xlabel("light: published, dark: ours", fontsize=8)


def _curves(axes: "Axes", cells: list[dict[str, Any]]) -> None:
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        rows.setdefault((cell["method"], cell["learners"]), []).append(cell)
    blues = {2: SKY, 4: "#60a5fa", 8: BLUE, 16: "#172554"}
    for (method, learners), row in rows.items():
        color = blues[learners] if method == "decoupled" else {"dp": "black"}.get(method, GREY)
        name = f"Decoupled M={learners}" if method == "decoupled" else f"data-parallel, {method}"
        label = name.replace(", dp", ", not elastic")
        millions = [cell["chips"] / 1e6 for cell in row]
        axes.plot(millions, [100 * cell["goodput"] for cell in row], color=color, label=label)
        known = [(c["chips"] / 1e6, c["published"]) for c in row if c["published"] is not None]
        axes.plot(
            [x for x, _ in known], [y for _, y in known], "o", mfc="white", mec=color, zorder=3
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks([size / 1e6 for size in SIZES], [f"{size / 1e6:g}" for size in SIZES])
    axes.set_xlabel("million chips")
    axes.set_ylim(0, 105)
    axes.set_title("lines: simulated, circles: published", fontsize=10)
    axes.legend(fontsize=8, loc="lower left")


def _finish(figure: Any, file: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI)
