"""The table of docs/results/learner.md, from what bench/learner_step.py found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- end -->"
# As the page calls the loops.
LOOPS = {
    "learner": "the learner",
    "bare": "the bare step",
    "plain jax": "plain JAX",
    "torch": "PyTorch",
}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: what was measured, what it is to be, and the loops beside one another."""
    found, model = result["figures"], result["model"]
    best = LOOPS[found["best"]]
    rows = [
        ("steps a second of the learner over the bare step", "step_rate_over_bare", "0.97 or more"),
        ("the method's own share of the steps' time", "method_share", ""),
        ("waiting in 99 of 100 steps, at most, in seconds", "blocked_s_per_step_p99", "0.001"),
        (f"tokens a second of the learner over the best loop's ({best})", "over_best", "0.9"),
        ("most memory over what is computed beforehand", "peak_memory_over_budget", "1.1 at most"),
        (
            "compilation of 48 layers over that of one",
            "first_step_s_48_layers_over_1",
            "1.5 at most",
        ),
    ]
    lines = [
        f"The model has {model['parameters'] / 1e6:.1f} million parameters in {model['layers']} "
        f"layers, and a step has {model['tokens_per_step']} tokens. The bare step takes "
        f"{found['step_s']:.2f} s. The learner adopted {found['adopted_per_step']:.2f} fragments a "
        f"step. Machine: {result['machine']}; seed {result['seed']}.",
        "",
        "| | measured | wanted |",
        "|---|---|---|",
        *(
            f"| {text} | {found[name]:.3g} | {wanted} |"
            for text, name, wanted in rows
            if name in found
        ),
        "",
        "| the loop | tokens a second |",
        "|---|---|",
        *(f"| {LOOPS[who]} | {rate:,.0f} |" for who, rate in found["tokens_per_s"].items()),
    ]
    return "\n".join(lines)


def put(page: Path, text: str) -> None:
    """Between the two marks of the page. Raises ValueError if it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN} and {END} for the figures to stand between")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
