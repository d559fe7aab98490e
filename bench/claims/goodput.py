"""Goodput next to the published table: python bench/claims/goodput.py [--seeds 64] [--json FILE]

Simulated. The elastic row and the one cell without elasticity were fitted (goodput_model.py says
which parameters); every cell of Decoupled is a prediction. One process, one thread.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from written import write

from diloco_planner.goodput_model import Failures
from diloco_simulator.fleets.goodput import Cell
from diloco_simulator.fleets.goodput_rounds import Coupling, simulate_rounds
from diloco_simulator.fleets.goodput_table import lines, table

# Table 5: four learners of each of two generations, 18 % apart, with 10 % of injected variance.
GENERATIONS = (1.0, 0.82)
JITTER = 0.1
NEVER_S = 1e15


def main() -> None:
    """Print the table; write figures and cells as JSON, and the charts as PNG."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    began = time.process_time()
    cells = table(Failures(), seed=args.seed, seeds=args.seeds)
    seconds = time.process_time() - began
    print("\n".join(lines(cells)))
    print(f"In brackets: published. {args.seeds} seeds, {seconds:.1f} s of one core.\n")
    figures = figures_of(cells) | {"table_cpu_seconds": round(seconds, 1)} | generations(args.seed)
    for name, value in figures.items():
        print(f"{name:<44}{value:>8.2f}")
    if args.json:
        write(args.json, figures, args.seed, seeds=args.seeds, cells=cells)
    if args.png:
        from diloco_simulator.experiments.plots import goodput_chart

        goodput_chart(cells, args.png)


def figures_of(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Goodput in per cent, deviations from the published cells in points."""
    figures: dict[str, float] = {}
    off: dict[str, list[float]] = {"dp": [], "elastic": [], "decoupled": []}
    for cell in cells:
        if cell["published"] is not None:
            name = f"{cell['method']}_m{cell['learners']}_{cell['chips']}"
            figures[name] = 100 * cell["goodput"]
            off[cell["method"]].append(abs(100 * cell["goodput"] - cell["published"]))
    for method, points in off.items():
        figures[f"{method}_points_off_max"] = max(points)
    for learners in (4, 8, 16):
        of_them = [c["uptime"] for c in cells if c["learners"] == learners]
        figures[f"uptime_m{learners}_min"] = 100 * min(of_them)
    return figures


def generations(seed: int) -> dict[str, float]:
    """Table 5 without failures. Published: 84 for K = 8, 100 for K = 1; nothing was fitted to it.

    Whether learners of K = 8 may run tau steps ahead of a round is not published: both are told.
    """
    cell, calm = Cell("decoupled", 8, 8), Failures(mtbi_s=NEVER_S)
    found = {}
    for name, quorum, overlap in (
        ("two_generations_k8_no_overlap", 8, 0),
        ("two_generations_k8_tau2", 8, 2),
        ("two_generations_k1_grace", 1, 2),
    ):
        coupling = Coupling(quorum, overlap_steps=overlap, speeds=GENERATIONS, jitter=JITTER)
        coupled = simulate_rounds(cell, calm, coupling, seed=seed, rounds=1000)
        found[name] = 100 * coupled.goodput.mean
        found[f"{name}_merged_of_8"] = coupled.merged
    return found


if __name__ == "__main__":
    main()
