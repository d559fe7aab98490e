"""One stage of the syncer (merge, outer step, publication, new anchor) against the copy bandwidth.

    python bench/merge.py [--values 8388608] [--learners 8] [--repeats 7] [--json FILE]

A fraction is the time that moving each byte once would take, over the time of the stage, at the
bandwidth (bytes read and written) of copying 256 MB with the same threads just before. Each byte
that must move once: M payloads in; master, momentum and anchor in and out (24 bytes per value);
one payload out. Up and down use the same codec. `known` norms came along from the gate, which
looks at every contribution as it arrives; otherwise RDA reads the contributions twice. Digests
are timed apart. Medians of interleaved repeats; other work on the machine lowers the fractions,
for a copy needs its bandwidth only and a merge the cores too.
"""

import argparse
import ctypes
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from diloco_shared.memory.pages import Recycled
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.numerics.compiled import cores
from diloco_shared.numerics.merge import Delta, Nesterov, Publishing, merge_and_step, norms
from diloco_shared.numerics.merge_kernels import MergeState
from diloco_shared.protocol.chunks import digest_bytes
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.fragmentation import Layout, Piece

COPIED = 1 << 26  # values: 256 MB, beyond any cache that is ours
OUTER = Nesterov(0.7, 0.8)
f32 = np.float32


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--values", type=int, default=1 << 23)
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory-values", type=int, default=1 << 26)
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.peak:
        print(json.dumps(peak(args.memory_values, args.learners)))
        return
    rows = timed(args)
    others = alternatives(args)
    command = [sys.executable, __file__, "--peak", "--memory-values", str(args.memory_values)]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    result = {
        "figures": figures(rows, others, memory),
        "rows": rows,
        "alternatives": others,
        "memory": memory,
        "values": args.values,
        "learners": args.learners,
        "seed": args.seed,
        "machine": f"{platform.machine()}, {cores()} cores",
        "load": round(os.getloadavg()[0], 1),
        "command": "python bench/merge.py",
    }
    table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def layout(values: int) -> tuple[Piece, ...]:
    """A fragment as of a transformer: eight matrices, an eighth of it an embedding, two norms."""
    row = values // 8 - 1024
    specs = [TensorSpec(name=f"m{n}", shape=(row,), embedding=n == 0) for n in range(8)]
    specs += [TensorSpec(name=f"n{n}", shape=(4096,), embedding=False) for n in range(2)]
    return Layout.build(specs, 1).fragments[0]


class Case:
    """Inputs of one codec."""

    def __init__(self, name: str, values: int, learners: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.name, self.pieces, self.values = name, layout(values), values
        self.payloads = []
        for _ in range(learners):
            delta_F = rng.standard_normal(values, f32) * f32(1e-3)
            self.payloads.append(codec.encode(name, delta_F))
        self.norms = [norms(name, p, self.pieces, cores()) for p in self.payloads]
        master_F = rng.standard_normal(values, f32)
        self.memory = (
            Recycled()
        )  # as in a run, where a committed round sets free what the next takes
        self.state = MergeState(master_F, rng.standard_normal(values, f32), master_F + f32(1e-4))

    @property
    def bytes(self) -> int:
        """What must be moved once."""
        one = codec.bytes_of(self.name, self.values)
        return len(self.payloads) * one + 24 * self.values + one

    def stage(self, rule: Any, threads: int, *, known: bool) -> Any:
        deltas = [
            Delta(1.0 + m, self.name, payload, norms_P=self.norms[m] if known else None)
            for m, payload in enumerate(self.payloads)
        ]
        return merge_and_step(
            deltas,
            self.pieces,
            rule,
            OUTER,
            Publishing(self.name, False),
            self.state,
            threads=threads,
            memory=self.memory,
        )


KINDS = (("rda", True), ("rda", False), ("mean", False))  # (rule, norms known)


def timed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per codec, number of threads and kind."""
    source, target = np.ones(COPIED, f32), np.zeros(COPIED, f32)
    rows = []
    for name in codec.NAMES:
        case = Case(name, args.values, args.learners, args.seed)
        for threads in sorted({1, cores()}):
            case.stage("rda", threads, known=False)
            seen: dict[tuple[str, bool], list[tuple[float, ...]]] = {kind: [] for kind in KINDS}
            for _ in range(args.repeats):
                for kind in KINDS:
                    seen[kind].append(once(case, *kind, threads, source, target))
            for (rule, known), runs in seen.items():
                medians = [statistics.median(column) for column in zip(*runs, strict=True)]
                figures = zip(
                    ("ms", "cpu_ms", "digests_ms", "copy_gb_per_s", "fraction"),
                    medians,
                    strict=True,
                )
                rows.append(
                    {"codec": name, "rule": rule, "norms_known": known, "threads": threads}
                    | dict(figures)
                )
    return rows


def once(
    case: Case, rule: str, known: bool, threads: int, source: Any, target: Any
) -> tuple[float, ...]:
    """Milliseconds of a stage, of all its threads and of its digests; GB/s of a copy; fraction."""
    bandwidth = 8 * COPIED / seconds_of(lambda: copy(source, target, threads))
    began, worked = time.perf_counter(), time.process_time()
    out = case.stage(rule, threads, known=known)
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    digests = seconds_of(lambda: digest(out))
    fraction = case.bytes / bandwidth / seconds
    return 1e3 * seconds, 1e3 * worked, 1e3 * digests, bandwidth / 1e9, fraction


def digest(out: Any) -> None:
    digest_array(out.master_F)
    digest_array(out.anchor_F)
    digest_bytes(out.payload.data)


def copy(source: Any, target: Any, threads: int) -> None:
    """np.copyto with so many threads."""
    bounds = [source.size * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [slice(a, b) for a, b in itertools.pairwise(bounds)]
        list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- what was measured and not taken -----------------------------------------------------------


def alternatives(args: argparse.Namespace) -> dict[str, float]:
    """The same stage (bf16, RDA, norms unknown) by XLA and by numpy, in milliseconds."""
    case = Case("bf16", args.values, args.learners, args.seed)
    start = len(codec.header("bf16", args.values))
    halves = [np.frombuffer(p, np.uint16, offset=start) for p in case.payloads]
    ours: list[float] = []
    xla: list[float] = []
    plain: list[float] = []
    by_xla = xla_stage(case, halves)
    for _ in range(max(args.repeats // 2, 1)):
        ours.append(seconds_of(lambda: case.stage("rda", cores(), known=False)))
        xla.append(seconds_of(by_xla))
        plain.append(seconds_of(lambda: numpy_stage(case, halves)))
    names = ("passes_ms", "xla_ms", "numpy_ms")
    return {
        name: 1e3 * statistics.median(seconds)
        for name, seconds in zip(names, (ours, xla, plain), strict=True)
    }


def xla_stage(case: Case, halves: list[Any]) -> Callable[[], Any]:
    """jitted, single precision throughout, on all cores; XLA fuses and reorders."""
    import jax
    import jax.numpy as jnp

    weights = [1.0 + m for m in range(len(halves))]

    def stage(halves_M: Any, master_F: Any, trace_F: Any, anchor_F: Any) -> Any:
        deltas = [jax.lax.bitcast_convert_type(h, jnp.bfloat16).astype(f32) for h in halves_M]
        merged = []
        for p in case.pieces:
            parts = [d[p.offset : p.offset + p.size] for d in deltas]
            if p.embedding:
                total = sum(w * d for w, d in zip(weights, parts, strict=True))
                merged.append(total / sum(weights))
                continue
            lengths = [jnp.sqrt(jnp.sum(d * d)) for d in parts]
            sums = sum(w / n * d for w, n, d in zip(weights, lengths, parts, strict=True)) / sum(
                weights
            )
            radius = sum(w * n for w, n in zip(weights, lengths, strict=True)) / sum(weights)
            merged.append(sums * (radius / jnp.sqrt(jnp.sum(sums * sums))))
        delta_F = jnp.concatenate(merged)
        trace_F = delta_F + OUTER.momentum * trace_F
        master_F = master_F - OUTER.rate * (delta_F + OUTER.momentum * trace_F)
        published_F = (master_F - anchor_F).astype(jnp.bfloat16)
        return master_F, trace_F, anchor_F + published_F.astype(f32), published_F

    cpu = jax.devices("cpu")[0]
    inputs = jax.device_put((tuple(halves), *case.state), cpu)
    compiled = jax.jit(stage)
    jax.block_until_ready(compiled(*inputs))
    return lambda: jax.block_until_ready(compiled(*inputs))


def numpy_stage(case: Case, halves: list[Any]) -> Any:
    """Whole arrays, single precision but for norms."""
    import ml_dtypes

    weights = [1.0 + m for m in range(len(halves))]
    merged_F = np.empty(case.values, f32)
    for p in case.pieces:
        where = slice(p.offset, p.offset + p.size)
        parts = [h[where].view(ml_dtypes.bfloat16).astype(f32) for h in halves]
        lengths = [1.0 if p.embedding else float(np.linalg.norm(d)) for d in parts]
        total = np.zeros(p.size, f32)
        for w, n, d in zip(weights, lengths, parts, strict=True):
            total += d * f32(w / n / sum(weights))
        if not p.embedding:
            radius = sum(w * n for w, n in zip(weights, lengths, strict=True)) / sum(weights)
            total *= f32(radius / float(np.linalg.norm(total)))
        merged_F[where] = total
    trace_F = merged_F + f32(OUTER.momentum) * case.state.momentum_F
    step_F = merged_F + f32(OUTER.momentum) * trace_F
    master_F = case.state.master_F - f32(OUTER.rate) * step_F
    published_F = (master_F - case.state.anchor_F).astype(ml_dtypes.bfloat16)
    return master_F, trace_F, case.state.anchor_F + published_F.astype(f32), published_F


# --- memory ------------------------------------------------------------------------------------


def peak(values: int, learners: int) -> dict[str, float]:
    """Resident bytes per value before and during a stage (bf16, RDA), by Linux' own account."""
    rng = np.random.default_rng(0)
    part_F = rng.standard_normal(1 << 20).astype(f32)
    delta_F = np.resize(part_F, values)
    specs = [TensorSpec(name="t", shape=(values,), embedding=False)]
    pieces = Layout.build(specs, 1).fragments[0]
    payloads = [codec.encode("bf16", delta_F) for _ in range(learners)]
    deltas = [Delta(1.0, "bf16", payload) for payload in payloads]
    state = MergeState(delta_F, delta_F.copy(), delta_F.copy())
    warm = [Delta(1.0, "bf16", codec.encode("bf16", part_F))] * 2
    small = Layout.build([TensorSpec(name="t", shape=part_F.shape, embedding=False)], 1)
    merge_and_step(
        warm,
        small.fragments[0],
        "rda",
        OUTER,
        Publishing("bf16", False),
        MergeState(part_F, part_F, part_F),
        threads=cores(),
    )
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    out = merge_and_step(
        deltas, pieces, "rda", OUTER, Publishing("bf16", False), state, threads=cores()
    )
    during = resident("VmHWM")
    outcome = sum(array.nbytes for array in out)
    return {
        "values": values,
        "before_bytes_per_value": before / values,
        "stage_bytes_per_value": (during - before) / values,
        "outcome_bytes_per_value": outcome / values,
    }


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status: this bench needs Linux")


# --- figures -----------------------------------------------------------------------------------


def figures(
    rows: list[dict[str, Any]], others: dict[str, float], memory: dict[str, float]
) -> dict[str, float]:
    """What the README cites: on all cores, as the syncer runs it and with norms unknown."""
    chosen = {}
    for row in rows:
        if row["rule"] == "rda" and row["threads"] == cores():
            suffix = "" if row["norms_known"] else "_norms_unknown"
            chosen[f"merge_bound_fraction_{row['codec']}{suffix}"] = round(row["fraction"], 3)
    chosen["merge_over_xla"] = round(others["xla_ms"] / others["passes_ms"], 2)
    chosen["merge_over_numpy"] = round(others["numpy_ms"] / others["passes_ms"], 2)
    chosen["stage_bytes_per_value"] = round(memory["stage_bytes_per_value"], 2)
    return chosen


def table(result: dict[str, Any]) -> None:
    print("codec  rule  norms    threads  stage ms  cpu ms  digests ms  copy GB/s  fraction")
    for row in result["rows"]:
        known = "known" if row["norms_known"] else "unknown" if row["rule"] == "rda" else "none"
        print(
            f"{row['codec']:5}  {row['rule']:4}  {known:7}  {row['threads']:7}  {row['ms']:8.1f}"
            f"  {row['cpu_ms']:6.1f}  {row['digests_ms']:10.1f}  {row['copy_gb_per_s']:9.1f}"
            f"  {row['fraction']:8.2f}"
        )
    for name, ms in result["alternatives"].items():
        print(f"bf16 RDA, norms unknown, all cores: {name.removesuffix('_ms'):7} {ms:8.1f} ms")
    print(
        "memory of a stage of {values} values: {stage_bytes_per_value:.1f} bytes per value, of "
        "which outcome {outcome_bytes_per_value:.1f}; before {before_bytes_per_value:.1f}".format(
            **result["memory"]
        )
    )
    print(json.dumps(result["figures"]))


if __name__ == "__main__":
    main()
