"""Bits, speed and error of the wire codecs, against copying the same values.

    python bench/codec.py [--values 33554432] [--threads 2] [--json FILE]

Speed is bytes read plus bytes written per second, over that of np.copyto from one fp32 array to
another, on the same threads and measured right before: the median over interleaved repeats, since
the machine's memory is shared. Nothing counts the lines that a store fetches first. `device` is
what a learner runs: one jitted program for anchor - theta + residual, quanta and error, on this
machine's processor (three arrays read; the error, scales and quanta written).
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from runs import keep, surroundings

from diloco_learner.exchange.encoding import encode as encode_on_device
from diloco_shared.numerics import codec
from diloco_shared.spec.codecs import BLOCK, blocks_of

WARM = 2  # rounds that are not counted: compilation, first touch of every page


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--values", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    values_F = np.random.default_rng(args.seed).standard_normal(args.values, np.float32)
    with ThreadPoolExecutor(args.threads) as pool:
        rows = measure(values_F, pool, args.threads, args.repeats)
    figures: dict[str, float] = {}
    for name, row in rows.items():
        figures[f"{name}_bits_per_value"] = 8 * codec.bytes_of(name, args.values) / args.values
        figures[f"{name}_relative_error"] = error_of(name, values_F[: 1 << 20])
        figures |= {f"{name}_{what}": value for what, value in row.items()}
    result = {
        "figures": figures,
        "values": args.values,
        "threads": args.threads,
        "repeats": args.repeats,
        "seed": args.seed,
        **surroundings(__file__),
    }
    table(figures)
    keep(args.json, result)


def measure(
    values_F: np.ndarray, pool: ThreadPoolExecutor, threads: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Per codec: GB/s of encoding and decoding, and their shares of the copy's."""
    copy_F = np.empty_like(values_F)
    size = values_F.nbytes
    parts = shares(values_F.size, threads)

    def copy() -> None:
        list(pool.map(lambda w: np.copyto(copy_F[w], values_F[w]), parts))

    works: dict[tuple[str, str], tuple[int, Callable[[], None]]] = {}
    for name in codec.NAMES:
        data = np.frombuffer(codec.encode(name, values_F), np.uint8).copy()
        moved = size + data.size
        works[name, "encode"] = (moved, partial(encode, pool, parts, name, values_F, data))
        works[name, "decode"] = (moved, partial(decode, pool, parts, name, data, copy_F))
        if codec.find(name) > 1:
            works[name, "device"] = (4 * size + data.size, on_device(name, values_F))
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in works}
    for repeat in range(WARM + repeats):
        for key, (moved, work) in works.items():
            copied = 2 * size / seconds(copy)
            rate = moved / seconds(work)
            if repeat >= WARM:
                ratios[key].append(rate / copied)
                rates[key].append(rate / 1e9)
    rows: dict[str, dict[str, float]] = {name: {} for name in codec.NAMES}
    for (name, what), found in ratios.items():
        rows[name][f"{what}_gb_s"] = statistics.median(rates[name, what])
        rows[name][f"{what}_over_copy"] = statistics.median(found)
    return rows


def shares(values: int, threads: int) -> list[slice]:
    """One share per thread, whole blocks."""
    step = -(-blocks_of(values) // threads) * BLOCK
    return [slice(at, min(at + step, values)) for at in range(0, values, step)]


def encode(
    pool: ThreadPoolExecutor, parts: list[slice], name: str, values_F: np.ndarray, data: np.ndarray
) -> None:
    """Into a payload that is there."""
    body = data[8:]
    if name in ("fp32", "bf16"):
        dtype = np.dtype(np.float32 if name == "fp32" else ml_dtypes.bfloat16)
        out_F = body.view(dtype)
        list(pool.map(lambda w: np.copyto(out_F[w], values_F[w], casting="unsafe"), parts))
        return

    def part(w: slice) -> None:
        spare_2K = np.empty(2 * BLOCK, np.float32)
        codec.kernels.encode(
            codec.find(name), values_F[w], w.start // BLOCK, values_F.size, data, spare_2K
        )

    list(pool.map(part, parts))


def decode(
    pool: ThreadPoolExecutor, parts: list[slice], name: str, data: np.ndarray, out_F: np.ndarray
) -> None:
    """Into an array that is there."""
    kernel = partial(codec.kernels.decode, codec.find(name), data, out_F.size)
    list(pool.map(lambda w: kernel(w.start, w.stop, out_F[w]), parts))


def on_device(name: str, values_F: np.ndarray) -> Callable[[], None]:
    """A learner's encoding, on arrays of its device."""

    @jax.jit
    def contribute(anchor_F: jax.Array, theta_F: jax.Array, residual_F: jax.Array) -> Any:
        return encode_on_device(name, anchor_F - theta_F + residual_F)

    anchor_F = jnp.asarray(values_F)
    theta_F, residual_F = anchor_F * 0.5, anchor_F * 0.1
    return lambda: jax.block_until_ready(contribute(anchor_F, theta_F, residual_F))


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def error_of(name: str, values_F: np.ndarray) -> float:
    """Root mean square of the error over that of normally distributed values."""
    decoded_F = codec.decode(name, codec.encode(name, values_F), values_F.size)
    return math.sqrt(float(np.mean((values_F - decoded_F) ** 2) / np.mean(values_F**2)))


def table(figures: dict[str, float]) -> None:
    """One line per codec."""
    columns = ("encode", "decode", "device")
    print(
        f"{'codec':>6} {'bits':>7} {'error':>8}",
        *(f"{c + ' GB/s':>12} {'/copy':>6}" for c in columns),
    )
    for name in codec.NAMES:
        cells = [
            f"{figures[f'{name}_{c}_gb_s']:12.1f} {figures[f'{name}_{c}_over_copy']:6.2f}"
            for c in columns
            if f"{name}_{c}_gb_s" in figures
        ]
        bits, error = figures[f"{name}_bits_per_value"], figures[f"{name}_relative_error"]
        print(f"{name:>6} {bits:7.3f} {error:8.5f}", *cells)


if __name__ == "__main__":
    main()
