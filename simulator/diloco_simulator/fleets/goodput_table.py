"""Goodput of one setting, or of the published table's cells, as JSON-ready rows."""

from collections.abc import Callable
from typing import Any

from diloco_planner.goodput_model import PUBLISHED, SIZES, Failures, Method
from diloco_simulator.fleets.goodput import HORIZON_S, Cell, named, simulate
from diloco_simulator.fleets.goodput_rounds import Coupling, lockstep, simulate_rounds

TABLE_LEARNERS = (2, 4, 8, 16)
# Columns of a name, and of a figure.
NAME, FIGURE = 15, 13


def one(
    cell: Cell, failures: Failures, coupling: Coupling, *, seed: int = 0, seeds: int = 16
) -> dict[str, Any]:
    """Goodput and uptime with their 95 % intervals; how many learners a round merges.

    Uptime is None for quorums above 1: it has no meaning where all wait for all.
    """
    ((goodput, uptime),) = simulate([cell], failures, seed=seed, seeds=seeds)
    found = named(goodput, uptime)
    unequal = len(set(coupling.speeds)) > 1 or coupling.jitter > 0
    if cell.method != "decoupled":
        share = lockstep(coupling, cell.learners, seed=seed) if unequal else 1.0
        found["goodput"] *= share
        found["goodput_ci"] = [share * bound for bound in found["goodput_ci"]]
        return found
    if unequal or not coupling.apart:
        coupled = simulate_rounds(cell, failures, coupling, seed=seed, seeds=seeds)
        found["learners_merged_per_round"] = coupled.merged
        if not coupling.apart:
            found["goodput"] = coupled.goodput.mean
            found["goodput_ci"] = [coupled.goodput.low, coupled.goodput.high]
            found["uptime"] = found["uptime_ci"] = None
    return found


def table(
    failures: Failures, *, seed: int = 0, seeds: int = 16, horizon_s: float = HORIZON_S
) -> list[dict[str, Any]]:
    """Both data-parallel rows and Decoupled with 2, 4, 8 and 16 learners, at five sizes.

    `published` in per cent where there is a figure; `fitted` where it was used to set a parameter.
    """
    cells = [
        Cell(method, chips, learners)
        for method, learners in rows()
        for chips in SIZES
    ]  # fmt: skip
    estimates = simulate(cells, failures, seed=seed, seeds=seeds, horizon_s=horizon_s)
    return [
        {
            "method": cell.method,
            "learners": cell.learners,
            "chips": cell.chips,
            **named(goodput, uptime),
            "published": PUBLISHED.get((cell.method, cell.learners, cell.chips)),
            "fitted": cell.method != "decoupled"
            and (cell.method, cell.learners, cell.chips) in PUBLISHED,
        }
        for cell, (goodput, uptime) in zip(cells, estimates, strict=True)
    ]


def rows() -> list[tuple[Method, int]]:
    """Rows of the table: method and learners."""
    synchronous: list[tuple[Method, int]] = [("dp", 1), ("elastic", 1)]
    return synchronous + [("decoupled", learners) for learners in TABLE_LEARNERS]


def lines(cells: list[dict[str, Any]]) -> list[str]:
    """The tables as text, in per cent, by method, number of learners (M) and number of chips."""
    parts: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("Goodput in %, and half its 95 % interval", _cell),
        ("Published goodput in %", _published),
        ("Uptime in %", lambda c: f"{100 * c['uptime']:.2f}"),
    )
    out = []
    for title, figure in parts:
        out += [title, f"{'chips':<{NAME}}" + "".join(f"{size:>{FIGURE},}" for size in SIZES)]
        for method, learners in rows():
            row = [c for c in cells if (c["method"], c["learners"]) == (method, learners)]
            name = method if method != "decoupled" else f"decoupled M={learners}"
            out.append(f"{name:<{NAME}}" + "".join(f"{figure(c):>{FIGURE}}" for c in row))
    return out


def _published(cell: dict[str, Any]) -> str:
    return "" if cell["published"] is None else f"{cell['published']:.0f}"


def _cell(cell: dict[str, Any]) -> str:
    low, high = cell["goodput_ci"]
    return f"{100 * cell['goodput']:.1f} ±{50 * (high - low):.1f}"
