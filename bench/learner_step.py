"""What a learner's step costs beside the bare step, and beside loops that others would write.

    python bench/learner_step.py [--window 60] [--cycles 4] [--torch PYTHON] [--json FILE]
        [--page docs/results/learner.md]

Real processes on one machine. The measured learner has a core of its own, as DILOCO_THREADS=1 has
it; message server, coordinator, syncer, a second learner and this script share another core. All is
on: a round begins at every step, heartbeats, checkpoints, evaluations.

Four loops take turns on the learner's core: plain JAX, the bare compiled step of the product,
the learner, and PyTorch, if `--torch` names a Python that has it. A cycle is all of them in this
order and then in the reverse one, so that what drifts on the machine strikes all alike. While one
has its turn, the others wait: the learner is stopped by a signal. The second learner trains all the
time, so the other core is busy in every turn. All begin with the same parameters and read the same
batches; that they compute the same is checked by their first loss.

step_rate_over_bare: steps a second of the learner over those of the bare step in the turn beside
it, median of all such pairs. steps_per_cpu_s_over_bare: the same of a second of the core that the
whole process used, which says what the learner does also where other work takes a part of the core.
method_share: what a learner computes beside its steps as a part of
the method, in the time of steps: contributing and adopting every fragment once in H steps, and
evaluating; measured by itself in another process. blocked_s_per_step_p99: of what the train loop
spends on anything but its own computation, a step. tokens_per_s: medians of all turns; over_best:
the learner's over the best of the others. peak_memory_over_budget: what the learner's process held
at most over what `diloco budget` counts. first_step_s_48_layers_over_1: seconds until the step is
compiled, of 48 layers over one, each in a fresh process that finds no compiled programs.

With an accelerator (`--accelerator`, or where JAX finds one): the share of its peak that the bare
step and the learner reach at each of `--sizes`, in bf16.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from stepping import page, turns
from stepping.cluster import Cluster, Turn, environment_of, loop_environment, training
from stepping.sizes import (
    LAYERS_FEW,
    LAYERS_MANY,
    SEED,
    SIZES,
    Size,
    facts,
    flops_per_token,
    spec_of,
)
from stepping.turns import Turns, Window

from diloco_learner.__main__ import LARGE_PAGES, TUNABLES
from diloco_shared.budget import known
from diloco_shared.budget.memory import device, learner
from diloco_shared.spec.shapes import shape_of

HERE = Path(__file__).resolve()
# While the others have their turn, the learner is stopped: six turns at most, and it must not be
# silent for the ten minutes after which a life is over.
WINDOW_S_MAX = 90.0
# Losses of the first step: of the same parameters and tokens, in another order of additions.
LOSS_TOLERANCE = 1e-2
TARGETS = {
    "step_rate_over_bare": (">=", 0.97),
    "blocked_s_per_step_p99": ("<=", 0.001),
    "first_step_s_48_layers_over_1": ("<=", 1.5),
    "peak_memory_over_budget": ("<=", 1.1),
    "over_best": (">=", 0.9),
}
# Dense bf16 operations a second, as their makers say, by what JAX calls the device.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and where."""

    size: str
    window_s: float
    cycles: int
    repeats: int
    core: int | None
    other: int | None
    learners: int
    threads: int
    torch: str
    torch_compile: bool


# --- figures --------------------------------------------------------------------------------------


def pairs(
    windows: Sequence[Window],
    who: str,
    beside: str,
    rate: Callable[[Window], float] = lambda window: window.steps_per_s,
) -> list[float]:
    """Rate of the one over that of the other, of every two turns side by side."""
    found = []
    for a, b in pairwise(windows):
        by = {a.who: a, b.who: b}
        if by.keys() == {who, beside}:
            found.append(rate(by[who]) / rate(by[beside]))
    return found


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def rates_of(windows: Sequence[Window], tokens_per_step: int) -> dict[str, float]:
    """Tokens a second by loop, the median of its turns."""
    return {
        who: statistics.median(w.steps_per_s for w in windows if w.who == who) * tokens_per_step
        for who in dict.fromkeys(w.who for w in windows)
    }


def speeds_of(
    windows: Sequence[Window], told: Sequence[Turn], work: Mapping[str, float], size: Size
) -> dict[str, Any]:
    """The figures that come of turns; `work`: seconds of the method's own work."""
    rates = rates_of(windows, size.batch * size.context)
    step_s = size.batch * size.context / rates["bare"]
    spec = spec_of(size)
    moved = work["moved_s"] / spec.algorithm.sync_every_steps / step_s
    evaluated = work["evaluated_s"] / spec.evaluation.every_steps / step_s
    best = max((rate, who) for who, rate in rates.items() if who != "learner")
    return {
        "step_rate_over_bare": statistics.median(pairs(windows, "learner", "bare")),
        "steps_per_cpu_s_over_bare": statistics.median(
            pairs(windows, "learner", "bare", lambda window: window.steps_per_cpu_s)
        ),
        "method_share": moved + evaluated,
        "method_share_of_fragments": moved,
        "method_share_of_evaluations": evaluated,
        "blocked_s_per_step_p99": p99([s for turn in told for s in turn.blocked_s]),
        "adopted_per_step": sum(t.adopted for t in told) / sum(t.window.steps for t in told),
        "step_s": step_s,
        "tokens_per_s": rates,
        "best": best[1],
        "over_best": rates["learner"] / best[0],
    }


def budget_bytes(size: Size, learners: int) -> int:
    """Of a learner whose device is the host, as `diloco budget` counts."""
    job = known(spec_of(size, learners))
    assert job is not None
    return learner(job).bytes + device(job, on_cpu=True).bytes


# --- measuring ------------------------------------------------------------------------------------


class Children:
    """Commands of child processes on the learner's core."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.environment = environment_of(threads=plan.threads)
        self.of_loops = loop_environment(self.environment, plan.threads)
        pin = ["taskset", "-c", str(plan.core)] if plan.core is not None else []
        self.base = [*pin, sys.executable, str(HERE), "--size", plan.size]
        self.torch = [*pin, plan.torch, str(HERE.parent / "stepping" / "torch_loop.py")]

    def ask(self, what: str, *more: str) -> dict[str, Any]:
        command = [*self.base, "--child", what, "--folder", str(self.folder), *more]
        return turns.asked(command, self.of_loops)

    def loops(self, *, others: bool) -> dict[str, Turns]:
        """Ready to take turns."""
        found = {}
        for who, what in (("plain jax", "plain"), ("bare", "ours")):
            if others or what == "ours":
                command = [*self.base, "--child", what, "--folder", str(self.folder)]
                # A learner starts itself over with large pages; so the bare step has them as well.
                pages = {TUNABLES: LARGE_PAGES} if what == "ours" else {}
                found[who] = Turns(who, command, self.of_loops | pages)
        if self.plan.torch and others:
            self._tell_torch()
            command = [*self.torch, str(self.folder)]
            found["torch"] = Turns("torch", command, self.environment)
        return found

    def _tell_torch(self) -> None:
        spec = spec_of(SIZES[self.plan.size])
        given = {
            "shape": asdict(shape_of(spec.model)),
            "rate": spec.inner_rate,
            "threads": self.plan.threads or os.cpu_count(),
            "compile": self.plan.torch_compile,
            **spec.inner.model_dump(include={"b1", "b2", "weight_decay", "clip_norm"}),
        }
        (self.folder / "torch.json").write_text(json.dumps(given))


def check_losses(loops: Mapping[str, Turns]) -> dict[str, float]:
    """All of them compute the same, or nothing is to be compared."""
    found = {who: float(loop.ready["first_loss"]) for who, loop in loops.items()}
    if max(found.values()) - min(found.values()) > LOSS_TOLERANCE:
        raise SystemExit(f"the loops do not compute the same: their first losses are {found}")
    return found


async def take_turns(
    plan: Plan, loops: Mapping[str, Turns], cluster: Cluster
) -> tuple[list[Window], list[Turn]]:
    """Cycles of all loops forth and back."""
    order = [who for who in ("plain jax", "bare", "learner", "torch") if who in {*loops, "learner"}]
    windows, told = [], []
    for cycle in range(plan.cycles):
        for who in (*order, *reversed(order)):
            if who == "learner":
                told.append(await cluster.turn(plan.window_s))
                windows.append(told[-1].window)
            else:
                windows.append(await asyncio.to_thread(loops[who].turn, plan.window_s))
            print(f"cycle {cycle + 1}: {who:10} {windows[-1].steps_per_s:8.4f} steps/s", flush=True)
    return windows, told


async def measure(plan: Plan, folder: Path, *, others: bool = True) -> dict[str, Any]:
    """Everything that comes of turns, of one size. `others`: loops that are not ours as well."""
    size, children = SIZES[plan.size], Children(plan, folder)
    await asyncio.to_thread(children.ask, "prepare")
    work = await asyncio.to_thread(children.ask, "work")
    loops = await asyncio.to_thread(children.loops, others=others)
    try:
        losses = check_losses(loops)
        cluster_folder = folder / "cluster"
        cluster_folder.mkdir()
        async with training(
            size,
            cluster_folder,
            children.environment,
            learners=plan.learners,
            core=plan.core,
            other=plan.other,
        ) as cluster:
            windows, told = await take_turns(plan, loops, cluster)
            peak = cluster.peak_bytes()
    finally:
        for loop in loops.values():
            loop.end()
    budget = budget_bytes(size, plan.learners)
    return {
        **speeds_of(windows, told, work, size),
        "peak_memory_over_budget": peak / budget,
        "peak_bytes": peak,
        "budget_bytes": budget,
        "first_losses": losses,
        "torch": loops["torch"].ready if "torch" in loops else None,
        "windows": [asdict(w) for w in windows],
    }


def compiling(plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds until the step is compiled, medians; in turns, few layers and many."""
    children, found = Children(plan, folder), dict[int, list[float]]()
    for _ in range(plan.repeats):
        for layers in (LAYERS_FEW, LAYERS_MANY):
            said = children.ask("compile", "--layers", str(layers))
            found.setdefault(layers, []).append(said["compile_s"])
    few, many = (statistics.median(found[n]) for n in (LAYERS_FEW, LAYERS_MANY))
    return {
        "first_step_s_1_layer": few,
        "first_step_s_48_layers": many,
        "first_step_s_48_layers_over_1": many / few,
    }


# --- an accelerator -------------------------------------------------------------------------------


def peak_flops(device_kind: str, given_tflops: float | None) -> float | None:
    """Of one device; None where it is not known."""
    if given_tflops is not None:
        return given_tflops * 1e12
    fits = [name for name in PEAK_FLOPS if name.lower() in device_kind.lower()]
    return PEAK_FLOPS[max(fits, key=len)] if fits else None


def shares_of_peak(name: str, found: Mapping[str, Any], peak: float | None) -> dict[str, Any]:
    """Model operations a second over the peak, of the bare step and of the learner."""
    size = SIZES[name]
    each = flops_per_token(shape_of(spec_of(size).model), size.context)
    rates = {who: found["tokens_per_s"][who] for who in ("bare", "learner")}
    return {
        "size": name,
        **facts(size),
        "flops_per_token": each,
        "tokens_per_s": rates,
        "mfu": {who: rate * each / peak if peak else None for who, rate in rates.items()},
        "step_rate_over_bare": found["step_rate_over_bare"],
    }


def on_accelerator(args: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    peak = peak_flops(kind, args.peak_tflops)
    if peak is None:
        print(f"the peak of {kind!r} is not known here: give --peak-tflops for shares of it")
    rows = []
    for name in args.sizes:
        plan = Plan(name, args.window, args.cycles, 1, None, None, 1, 0, "", False)
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(measure(plan, Path(folder), others=False))
        rows.append(shares_of_peak(name, found, peak))
        mfu = rows[-1]["mfu"]
        shown = {who: "unknown" if share is None else f"{share:.1%}" for who, share in mfu.items()}
        print(
            f"{name:>6}  share of the peak: bare step {shown['bare']}, learner {shown['learner']}"
        )
    return rows


def device_found() -> tuple[str, str]:
    """(platform, kind) of JAX's first device, asked in a process of its own."""
    said = turns.asked([sys.executable, str(HERE), "--child", "device"], environment_of(threads=0))
    return said["platform"], said["kind"]


# --- the command ----------------------------------------------------------------------------------


def show(found: Mapping[str, Any]) -> None:
    """A line for each figure, with what it is to be."""
    for name, value in found.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            wanted = " {} {}".format(*TARGETS[name]) if name in TARGETS else ""
            print(f"{name:32} {value:<12.6g}{wanted}")
    for who, rate in found.get("tokens_per_s", {}).items():
        print(f"{'tokens_per_s: ' + who:32} {rate:<12.6g}")


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    """The table of the page."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one for the learner, one for everything else")
    core, other = cores[0], cores[-1]
    os.sched_setaffinity(0, {other})
    if not (args.torch or args.ours):
        print("no loop of PyTorch: give --torch PYTHON, a Python that has torch and numpy")
    plan = Plan(
        args.size,
        args.window,
        args.cycles,
        args.repeats,
        core,
        other,
        args.learners,
        1,
        args.torch,
        not args.torch_eager,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = compiling(plan, Path(folder)) if args.repeats else {}
        found = found | asyncio.run(measure(plan, Path(folder), others=not args.ours))
    show(found)
    return {"model": facts(SIZES[plan.size]), "figures": found}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--window", type=float, default=60.0, help="seconds of one turn")
    parser.add_argument("--cycles", type=int, default=4, help="of all loops forth and back")
    parser.add_argument("--repeats", type=int, default=5, help="of compilations; 0: none")
    parser.add_argument("--size", choices=SIZES, default="11m", help="of the model, on a CPU")
    parser.add_argument("--learners", type=int, default=2, help="in the run, the measured one too")
    parser.add_argument("--torch", default="", metavar="PYTHON", help="a Python that has torch")
    parser.add_argument("--torch-eager", action="store_true", help="do not compile torch's model")
    parser.add_argument("--ours", action="store_true", help="no loops of others: bare and learner")
    parser.add_argument("--accelerator", action="store_true", help="even if JAX finds none")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["125m", "350m", "1b"])
    parser.add_argument("--peak-tflops", type=float, help="of the accelerator, in bf16")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="put the tables into docs/results/learner.md")
    for hidden, kind in (("--child", str), ("--folder", Path), ("--layers", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 1 <= args.window <= WINDOW_S_MAX:
        parser.error(f"--window {args.window:g}: give 1 to {WINDOW_S_MAX:g} seconds")
    if args.cycles < 1 or args.learners < 1 or args.repeats < 0:
        parser.error("give at least one cycle, one learner, and no negative number of repeats")
    return args


def main() -> None:
    """Print a table; write the figures as JSON."""
    args = parsed()
    if args.child == "device":
        import jax

        first = jax.devices()[0]
        turns.say(platform=first.platform, kind=first.device_kind)
        return
    if args.child:
        turns.child(args.child, args.size, args.folder, args.layers)
        return
    platform, kind = device_found()
    if args.accelerator or platform != "cpu":
        result: dict[str, Any] = {"device": kind, "sizes": on_accelerator(args, kind)}
    else:
        result = on_cpu(args)
    result |= {"seed": SEED, "load_average": os.getloadavg()[0], **surroundings(__file__)}
    keep(args.json, result, indent=1)
    if args.page and "figures" in result:
        page.put(args.page, page.table(result))


if __name__ == "__main__":
    main()
