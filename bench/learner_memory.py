"""What a learner's process holds in memory, in bytes per parameter, phase by phase, on the CPU.

    python bench/learner_memory.py [--params 20e6 80e6] [--optimizer adamw] [--json FILE]

One process per size lives through all phases, as a learner does. Before each it clears the peak
that the kernel keeps of it (/proc/PID/clear_refs), and reads it afterwards. What a process holds in
the same phase with the smallest such model is subtracted: interpreter, jax, compiled programs, and
what compiling them left behind. On a CPU "device" and "host" are one memory, so the budget of a
step is 4 (parameters) + 8 (moments) + 4 (gradients) + 4 (anchors), one transfer of an inner state
is 8 more, and an evaluation beside a step 4 more.

Activations are kept small: one sequence of 8 tokens.
"""

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

SEED = 17
PHASES = {
    "built": "parameters and optimizer state are made",
    "warm-up": "every program is compiled",
    "adopting": "every fragment is adopted",
    "steps": "four steps",
    "contributing": "a contribution of every fragment, one after the other",
    "giving": "a donation: the inner state as one buffer, and a step meanwhile",
    "receiving": "a donor's inner state: checked and loaded leaf by leaf",
    "evaluating": "a step, while the published parameters are evaluated",
    "checkpointing": "an own checkpoint is written to disk, and a step",
    "restoring": "an own checkpoint is read, checked and loaded",
}
# Budget on the CPU, bytes per parameter.
STEP, TRANSFER, EVALUATION = 20, 8, 4
# The model whose process is subtracted, in parameters: as many layers, as narrow as can be.
BASE = 1e5


def spec_of(params: float, optimizer: str) -> dict[str, Any]:
    """A transformer of about so many parameters, in 24 fragments."""
    layers = 12
    # Per layer: attention 3 D^2 (half as many key-value heads), MLP 8 D^2; embeddings 2 x 256 D.
    width = max(64, round(math.sqrt(params / (layers * 11)) / 64) * 64)
    return {
        "name": "memory",
        "seed": SEED,
        "algorithm": {"fragments": 24, "sync_every_steps": 24, "codec_up": "bf16"},
        "model": {
            "preset": "small",
            "context_tokens": 8,
            "overrides": {
                "width": width,
                "layers": layers,
                "heads": width // 64,
                "kv_heads": width // 64 if width % 128 else width // 128,
                "head_width": 64,
                "hidden": round(8 * width / 3 / 64) * 64,
            },
        },
        "inner": {"optimizer": optimizer, "batch_sequences": 1},
        "evaluation": {"sequences": 4},
        "budget": {"steps": 100},
    }


def status_kib(field: str) -> int:
    """One line of /proc/self/status, KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def begin() -> None:
    """Forget the peak so far."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def anonymous_mib() -> tuple[float, float]:
    """(peak since `begin`, now), MiB; what is mapped from files is not counted."""
    file = status_kib("RssFile") + status_kib("RssShmem")
    return (status_kib("VmHWM") - file) / 1024, status_kib("RssAnon") / 1024


def phases(params: float, optimizer: str, folder: str) -> Iterator[tuple[str, int]]:
    """In a child: lives through the phases; (phase, parameters) after each."""
    import numpy as np

    from diloco_learner.recovery.checkpoint_io import LocalCheckpoints
    from diloco_learner.training.trainer import Program, Trainer, assemble
    from diloco_shared.spec.run import RunSpec

    program = Program.build(RunSpec.model_validate(spec_of(params, optimizer)))
    count, tokens = sum(program.layout.sizes), np.zeros((1, 9), np.int32)
    checkpoints = LocalCheckpoints(Path(folder), 2)

    def step() -> None:
        float(trainer.step(tokens, 1e-3))

    trainer = Trainer(program)
    float(np.asarray(trainer.params["final_norm"]["scale_D"])[0])
    yield "built", count
    trainer.warm_up(1)
    yield "warm-up", count
    for p in range(len(program.layout.fragments)):
        trainer.adopt(p, trainer.fragment(p).copy(), 0.0)
    yield "adopting", count
    for _ in range(4):
        step()
    yield "steps", count
    for p in range(len(program.layout.fragments)):
        trainer.contribution(p, 0).fetch()
    yield "contributing", count
    data = trainer.inner_state()
    step()
    yield "giving", count
    trainer.check_inner_state(data)  # stands for the buffer that a state is received into
    trainer.load_inner_state(data)
    del data
    yield "receiving", count
    published = assemble(program, trainer.published())
    step()
    program.evaluate(published, np.zeros((4, 9), np.int32))
    del published
    yield "evaluating", count
    checkpoints.save(1, [trainer.inner_state()])
    step()
    yield "checkpointing", count
    found, faults = checkpoints.load(trainer.check_inner_state)
    assert found is not None, faults
    trainer.load_inner_state(found)
    del found
    yield "restoring", count


def measured(params: float, optimizer: str) -> None:
    """In a child: a line of JSON per phase."""
    with tempfile.TemporaryDirectory() as folder:
        begin()
        for phase, count in phases(params, optimizer, folder):
            peak, after = anonymous_mib()
            print(json.dumps({"phase": phase, "params": count, "peak": peak, "after": after}))
            begin()


def child(params: float, optimizer: str) -> dict[str, dict[str, Any]]:
    """`measured` in a process of its own, by phase."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", "--params", str(params), "--optimizer", optimizer],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    found = map(json.loads, done.stdout.splitlines())
    return {row["phase"]: row for row in found}


def table(args: argparse.Namespace) -> dict[str, Any]:
    """Every phase at every size, in bytes per parameter above the baseline of that phase."""
    rows, base = [], child(BASE, args.optimizer)
    for params in args.params:
        for phase, found in child(params, args.optimizer).items():
            extra = found["params"] - base[phase]["params"]
            per = {
                key: round((found[key] - base[phase][key]) * 2**20 / extra, 1)
                for key in ("peak", "after")
            }
            rows.append({"params": found["params"], "phase": phase} | per)
            size = f"{found['params'] / 1e6:6.1f}M"
            print(f"{size}  {phase:14} {per['peak']:6} {per['after']:6}  {PHASES[phase]}")
    return {
        "what": "bytes per parameter of a learner's process, above the smallest model's",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
        "jax": version("jax"),
        "seed": SEED,
        "optimizer": args.optimizer,
        "budget": {"step": STEP, "transfer": TRANSFER, "evaluation": EVALUATION},
        "baseline": {
            "params": base["steps"]["params"],
            "mib": {phase: round(row["peak"]) for phase, row in base.items()},
        },
        "phases": rows,
    }


def main() -> None:
    """Print the table; with --json also write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--params", type=float, nargs="+", default=[20e6, 80e6])
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measured(args.params[0], args.optimizer)
        return
    print("   size  phase            peak  after  bytes per parameter")
    found = table(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
