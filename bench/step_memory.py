"""What a training step takes beside parameters and moments, and what `diloco budget` counts for it.

    python bench/step_memory.py [--before FILE] [--json FILE]

Each shape's step is compiled for the processor, and not run: the compiler says how many bytes it
will take for gradients, activations and logits together. Nothing is timed, so the figures are the
same on every machine with this compiler. `--before`: an earlier output, whose bytes are told beside
the new ones.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from stepping.sizes import SIZES, Size, spec_of

from diloco_learner.training.trainer import Program
from diloco_shared.budget.job import known
from diloco_shared.budget.memory import WIDTH_ON_CPU, activations
from diloco_shared.spec.shapes import shape_of

# Layers of the benchmark's model (width 384, six heads), batch, context, and what is otherwise.
CASES: tuple[tuple[int, int, int, dict[str, Any]], ...] = (
    (6, 4, 128, {}),
    (6, 1, 512, {}),
    (12, 4, 128, {}),
    (12, 4, 512, {}),
    (12, 4, 512, {"remat": "products"}),
    (12, 4, 512, {"remat": "layer"}),
    (12, 4, 512, {"qk_norm": True}),
    (12, 4, 256, {"experts": 4, "experts_per_token": 2}),
)


def taken(size: Size, layers: int) -> dict[str, Any]:
    """Bytes of one step."""
    spec = spec_of(size, layers=layers)
    job, program = known(spec), Program.build(spec)
    assert job is not None
    tokens = jax.ShapeDtypeStruct((size.batch, size.context + 1), np.int32)
    state = jax.eval_shape(program.init_state, program.shapes)
    program.step.compile(program.shapes, state, tokens, np.float32(0))
    (compiled,) = program.step.programs.values()
    counted = activations(shape_of(spec.model), size.batch, size.context, WIDTH_ON_CPU)
    return {
        "bytes": compiled.memory_analysis().temp_size_in_bytes,
        "budget_bytes": counted + 4 * job.parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="an earlier output of this script")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    before = json.loads(args.before.read_text(encoding="utf-8"))["steps"] if args.before else []
    known_before = {row["step"]: row["bytes"] for row in before}
    rows = []
    for layers, batch, context, more in CASES:
        base = SIZES["11m"]
        size = replace(base, batch=batch, context=context, overrides=base.overrides | more)
        words = ", ".join(f"{name} {value}" for name, value in more.items())
        name = f"{layers} layers, {batch} x {context} tokens" + (f", {words}" if words else "")
        row = {"step": name, **taken(size, layers)}
        if name in known_before:
            row["bytes_before"] = known_before[name]
        rows.append(row)
        told = (
            f"{row['bytes'] / 1e6:6.0f} MB  {row['bytes'] / row['budget_bytes']:.2f} of the budget"
        )
        if "bytes_before" in row:
            told += f"  {row['bytes'] / row['bytes_before']:.2f} of before"
        print(f"{name:<52} {told}", flush=True)
    keep(args.json, {"steps": rows, "seed": 0, **surroundings(__file__)})


if __name__ == "__main__":
    main()
