"""Bytes at the learners' sockets in a real run, against what must be sent and data-parallel.

    python bench/bytes.py [--json FILE]

Three learners as real processes train a transformer of 6.4M parameters, four bits both ways, once
at H = 24 with the default keyframes and once at H = 48 with rare bf16 keyframes. Steps are tiny (16
tokens): bytes do not depend on that. The losses that go with the second setting come from simulated
runs of the nano model (M = 3, three seeds, inner rate by validation on the first seed, equal
tokens), relative to bf16 at H = 24.

What is compared
- *measured*: bytes sent and received at the learners' sockets of the data plane, protocol,
  acknowledgements, manifests and repeats included, from the start to the end of the run.
- *analytic*: encoded sizes of what a run must move: initial parameters up once, version 0 down to
  everyone, one contribution up per learner and round (those that came too late included), every
  publication down to everyone, keyframes as such.
- *data-parallel*: ring all-reduce of bf16 gradients at every step of the schedule (rounds * H / P
  per learner): each learner sends and receives 2 (M - 1) / M * N * 2 bytes.
- *reduction*: data-parallel over (measured minus the analytic start: initial parameters and version
  0), both directions on both sides, over a whole number of keyframe periods.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runs import keep, results_of, surroundings

from diloco_cli.api import answers, connect
from diloco_cli.cluster import Where
from diloco_cli.report import data_parallel_bytes, socket_bytes
from diloco_cli.seen import Seen
from diloco_cli.up.stack import EachLearner, Stack, started
from diloco_client import ApiError, Unreachable
from diloco_learner.training.trainer import Program
from diloco_shared.numerics import codec
from diloco_shared.spec.run import RunSpec
from diloco_simulator.commands import spec_of as spec_for
from diloco_simulator.experiments.bulk import Experiment

LEARNERS = 3
FOUR_BITS = {"codec_up": "int4", "codec_down": "int4", "quorum": LEARNERS, "overlap_steps": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "h24": {**FOUR_BITS, "sync_every_steps": 24},
    "best": {
        **FOUR_BITS,
        "sync_every_steps": 48,
        "keyframe_every": 64,
        "keyframe_codec": "bf16",
    },
}
MODEL = {
    "preset": "small",
    "context_tokens": 8,
    "overrides": {"width": 256, "layers": 6, "kv_heads": 8, "head_width": 32, "hidden": 1024},
}
# Of the settings above, what only matters where processes compete for two cores.
PACE = ("quorum", "overlap_steps")
SEEDS = (0, 1, 2)
RATES = (4e-3, 8e-3)
# A run that does not end is a fault: five times what it takes on two cores.
LIMIT_S = 1800.0


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=3024, help="of the runs that give losses")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--any-sources", action="store_true", help="losses other code found count")
    parser.add_argument("--only-losses", action="store_true", help="train, keep, measure nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    losses = losses_of(["best", "bf16"], args)
    gaps = {"best": gap(losses["best"], losses["bf16"])}
    if args.only_losses:
        print(json.dumps(losses, indent=2))
        return
    rows = {name: measure(name) for name in args.settings}
    result = {
        "figures": {
            "bytes_over_analytic": max(r["measured"] / r["analytic"] for r in rows.values()),
            **{f"reduction_{name}": r["reduction"] for name, r in rows.items()},
            **{f"loss_gap_at_{name}": x for name, x in gaps.items()},
        },
        "settings": {name: SETTINGS[name] for name in rows},
        "runs": rows,
        "val_loss": losses,
        "seeds": list(SEEDS),
        **surroundings(__file__),
    }
    _table(rows, gaps)
    keep(args.json, result)


def spec_of(name: str) -> RunSpec:
    """One keyframe period of every fragment."""
    algorithm = {"fragments": 6, **SETTINGS[name]}
    period = algorithm.get("keyframe_every", 16) * algorithm["sync_every_steps"]
    return RunSpec.model_validate(
        {
            "name": f"bytes-{name}",
            "algorithm": algorithm,
            "model": MODEL,
            "inner": {"batch_sequences": 2},
            "membership": {"learners_min": LEARNERS},
            # Checkpoints and evaluations would only take time.
            "keeping": {"checkpoint_every_steps": 10**9},
            "evaluation": {"every_steps": 10**9, "sequences": 8},
            "budget": {"steps": period},
        }
    )


def losses_of(names: Sequence[str], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Per setting: the rate chosen on the first seed, and the validation loss of every seed."""

    def ran(runs: Iterable[Experiment]) -> dict[str, dict[str, Any]]:
        return results_of(list(runs), args.workers, any_sources=args.any_sources)

    steps = args.steps
    tried = {(n, rate): trained(n, SEEDS[0], rate, steps) for n in names for rate in RATES}
    found = ran(tried.values())
    first = {where: found[e.key()]["val_loss"] for where, e in tried.items()}
    rates = {n: min(RATES, key=lambda rate: first[n, rate]) for n in names}
    chosen = {(n, s): trained(n, s, rates[n], steps) for n in names for s in SEEDS}
    found = ran(chosen.values())
    return {
        n: {
            "inner_rate": rates[n],
            "by_rate": {str(rate): first[n, rate] for rate in RATES},
            "per_seed": [found[chosen[n, s].key()]["val_loss"] for s in SEEDS],
        }
        for n in names
    }


def trained(name: str, seed: int, rate: float, steps: int) -> Experiment:
    """The simulated run that gives a setting's loss."""
    body = spec_for("long", steps, seed, rate).model_dump(mode="json")
    # Without losses of messages or speed differences every learner is in time: K has no effect.
    body["algorithm"] |= {k: v for k, v in SETTINGS.get(name, {}).items() if k not in PACE}
    return Experiment(RunSpec.model_validate(body), LEARNERS)


def gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Mean over seeds of the relative difference."""
    pairs = zip(ours["per_seed"], theirs["per_seed"], strict=True)
    return statistics.fmean(a / b - 1 for a, b in pairs)


def measure(name: str) -> dict[str, Any]:
    """Run it and add up; sizes in bytes over all learners."""
    spec = spec_of(name)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        seen = asyncio.run(_run(spec, Path(folder)))
    sockets = socket_bytes(seen.status)
    wire = analytic(spec, seen)
    # What the schedule says: a learner that stepped on while rounds were late sends no more.
    steps = LEARNERS * len(seen.rounds) * spec.algorithm.steps_per_round
    sent = data_parallel_bytes(steps, LEARNERS, seen.status["parameters"])
    measured = sockets["data_up"] + sockets["data_down"]
    return {
        "parameters": seen.status["parameters"],
        "learner_steps": steps,
        "rounds": len(seen.rounds),
        "measured": measured,
        "measured_by_plane": sockets,
        "analytic": sum(wire.values()),
        "analytic_by_kind": wire,
        "data_parallel": 2 * sent,
        "reduction": 2 * sent / (measured - wire["start"]),
        "reduction_with_start": 2 * sent / measured,
        "seconds": round(time.monotonic() - began),
    }


def analytic(spec: RunSpec, seen: Seen) -> dict[str, int]:
    """Encoded bytes that this run had to move, by kind, both directions at the learners."""
    a, sizes_P = spec.algorithm, Program.build(spec).layout.sizes
    up = [codec.bytes_of(a.codec_up, n) for n in sizes_P]
    total = {
        "start": (1 + LEARNERS) * sum(codec.bytes_of("fp32", n) for n in sizes_P),
        "contributions": 0,
        "keyframes": 0,
        "deltas": 0,
    }
    for r in seen.rounds:
        p = r["fragment"]
        total["contributions"] += up[p] * sum(bool(v["subject"]) for v in r["verdicts"])
        if r["outcome"] != "committed":
            continue
        if r["keyframe"]:
            total["keyframes"] += LEARNERS * codec.bytes_of(a.keyframe_codec, sizes_P[p])
        else:
            total["deltas"] += LEARNERS * codec.bytes_of(a.codec_down, sizes_P[p])
    late = seen.status["refused"].get("late", 0)
    total["contributions"] += round(late * sum(up) / len(up))
    return total


async def _run(spec: RunSpec, folder: Path) -> Seen:
    """Everything that was seen of one whole run."""
    stack = Stack(
        folder, learners=LEARNERS, port=0, chaos=False, each=EachLearner(), throwaway=True
    )
    running = asyncio.create_task(stack.run())
    seen, until = Seen(spec.name), time.monotonic() + LIMIT_S
    try:
        await started(stack, lambda: answers(stack.data))
        with connect(Where(data=stack.data)) as client:
            await asyncio.to_thread(client.create_run, spec.model_dump(mode="json"))
            while not seen.over or not all(
                x["state"] == "finished" for x in seen.status["learners"].values()
            ):
                if running.done():
                    running.result()
                if time.monotonic() > until:
                    raise SystemExit(f"{spec.name} was not over within {LIMIT_S:.0f} s")
                await asyncio.sleep(0.5)
                try:
                    await asyncio.to_thread(seen.look, client)
                except (ApiError, Unreachable):
                    continue
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return seen


def _table(rows: dict[str, dict[str, Any]], gaps: dict[str, float]) -> None:
    print(
        f"{'run':>6} {'data MB':>9} {'analytic':>9} {'over':>6} {'control MB':>11} "
        f"{'data-parallel GB':>17} {'reduction':>10} {'with start':>11} {'loss gap':>9}"
    )
    for name, r in rows.items():
        control = r["measured_by_plane"]
        shown = f"{100 * gaps[name]:+.2f}%" if name in gaps else ""
        print(
            f"{name:>6} {r['measured'] / 1e6:9.1f} {r['analytic'] / 1e6:9.1f} "
            f"{r['measured'] / r['analytic']:6.3f} "
            f"{(control['control_up'] + control['control_down']) / 1e6:11.1f} "
            f"{r['data_parallel'] / 1e9:17.2f} {r['reduction']:10.1f} "
            f"{r['reduction_with_start']:11.1f} {shown:>9}"
        )


if __name__ == "__main__":
    main()
