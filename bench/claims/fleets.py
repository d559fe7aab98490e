"""What the claims about fleets have in common: the run, and how its experiments are looked up.

The nano model on the standard library's source, with a budget in tokens, so that a fleet that loses
time does not lose tokens, and inner schedules follow what was trained.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runs import results_of

from diloco_shared.spec.run import RunSpec
from diloco_simulator.commands import spec_of
from diloco_simulator.experiments.bulk import Experiment
from diloco_simulator.fleets.goodput import student

# Sequences of one pass of a learner; what is more is accumulated.
PASS = 8
# Held-out sequences of an evaluation: half a per mille of the loss is noise below this many.
SEQUENCES = 1024


def options(parser: argparse.ArgumentParser) -> None:
    """What every such script understands."""
    parser.add_argument("--steps", type=int, default=1000, help="per learner, without failures")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="trained; or none")
    parser.add_argument("--sequences", type=int, default=PASS, help="of a learner's step")
    parser.add_argument("--rate", type=float, default=8e-3, help="peak inner rate")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--any-sources", action="store_true", help="take what older code found")
    parser.add_argument("--json", type=Path)


def spec(args: argparse.Namespace, seed: int, tokens: int, **algorithm: Any) -> RunSpec:
    """Of `tokens` processed by all learners."""
    body = spec_of("long", 1, seed, args.rate, SEQUENCES).model_dump(mode="json")
    body["algorithm"] |= algorithm
    body["inner"] |= batch(args)
    body["budget"] = {"tokens": tokens}
    return RunSpec.model_validate(body)


def reference(
    args: argparse.Namespace, seed: int, rate: float, steps: int, learners: int
) -> Experiment:
    """Data-parallel over `learners` batches, `steps` optimizer steps."""
    body = spec_of("long", steps, seed, rate, SEQUENCES).model_dump(mode="json")
    body["inner"] |= batch(args)
    return Experiment(RunSpec.model_validate(body), learners, "data-parallel")


def batch(args: argparse.Namespace) -> dict[str, int]:
    """What a learner takes in a step, as settings of its inner optimizer."""
    passes, rest = divmod(args.sequences, PASS)
    if rest or not passes:
        raise SystemExit(f"--sequences {args.sequences}: a multiple of {PASS} is needed")
    return {"batch_sequences": PASS, "accumulation": passes}


def tokens_of(args: argparse.Namespace, steps: int, learners: int) -> int:
    """What `learners` take in as many steps."""
    context = spec_of("long", 1, 0, args.rate).model.context_tokens
    tokens: int = steps * learners * args.sequences * context
    return tokens


def found(args: argparse.Namespace, *experiments: Experiment) -> list[dict[str, Any]]:
    """Their results in this order, computed where they are not known."""
    results = results_of(experiments, args.workers, any_sources=args.any_sources)
    return [results[e.key()] for e in experiments]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean with half its 95 % interval (None for a single value), and the values, if any."""
    half = None
    if len(values) > 1:
        half = student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values) if values else None
    return {"mean": mean, "half_ci95": half, "values": list(values)}


def shown(values: dict[str, Any], digits: int = 4, factor: float = 1.0) -> str:
    """A `spread` in a table; a dash for nothing."""
    if values["mean"] is None:
        return "-"
    half = values["half_ci95"]
    text = f"{factor * values['mean']:.{digits}f}"
    return text if half is None else f"{text} ± {factor * half:.{digits}f}"


def provenance(args: argparse.Namespace) -> dict[str, Any]:
    """Beside what `written.write` says of every claim."""
    return {
        "seeds": args.seeds,
        "steps": args.steps,
        "sequences": args.sequences,
        "rate": args.rate,
        "any_sources": args.any_sources,
    }
