"""Gate, merge, outer step and publication of a round by the syncer's own store, in one process."""

import os
import statistics
import time
from typing import Any

import numpy as np
from fragments.workers import peak, reset_peak
from numpy.typing import NDArray

from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.merging.store import Contribution, FragmentStore
from diloco_syncer.rounds.norms import inspect

f32 = np.float32


def layout(values: int, fragments: int = 1) -> Layout:
    """As of a transformer: matrices of equal size, an eighth of them embeddings."""
    pieces = max(8, 2 * fragments)
    sizes = [values // pieces] * pieces
    sizes[0] += values - sum(sizes)
    return Layout.build(
        [
            TensorSpec(name=f"m{n:03d}", shape=(size,), embedding=n % 8 == 0)
            for n, size in enumerate(sizes)
        ],
        fragments,
    )


def encoded(name: str, values: int, learners: int) -> list[bytes]:
    """A contribution each, all different."""
    delta_F = np.random.default_rng(0).standard_normal(values, f32) * f32(1e-3)
    return [codec.encode(name, np.roll(delta_F, 977 * m)) for m in range(learners)]


class Case:
    """A store, and a round's contributions to one of its fragments."""

    def __init__(self, learners: int, values: int, name: str = "bf16", fragments: int = 1) -> None:
        self.name = name
        algorithm = Algorithm.model_validate(
            {
                "fragments": fragments,
                "sync_every_steps": fragments,
                "codec_up": name,
                "codec_down": name,
            }
        )
        cut = layout(values, fragments)
        self.pieces, self.size = cut.fragments[0], cut.sizes[0]
        initial = [np.full(size, 0.5, f32) for size in cut.sizes]
        self.store = FragmentStore.init(cut, algorithm, initial)
        self.payloads = encoded(name, self.size, learners)

    def round(self, threads: int) -> tuple[float, float, float]:
        """Processor seconds of the gate and of the rest, and seconds of the rest on the clock."""
        began = time.process_time()
        norms: list[NDArray[np.float64]] = [
            inspect(payload, self.name, self.size, self.pieces).norms_P for payload in self.payloads
        ]
        gated = time.process_time()
        version = self.store.version(0)
        contributions = [
            Contribution(f"learner-{m:03d}", 1.0, version, payload, self.name, norms[m])
            for m, payload in enumerate(self.payloads)
        ]
        self.store.threads = threads
        on_the_clock = time.perf_counter()
        staged = self.store.stage(0, contributions, keyframe=False)
        wall_s, stage_s = time.perf_counter() - on_the_clock, time.process_time() - gated
        self.store.install(0, staged)
        return gated - began, stage_s, wall_s


def cost(
    learners: int,
    values: int,
    name: str = "bf16",
    *,
    fragments: int = 1,
    threads: int = 1,
    repeats: int = 3,
) -> dict[str, Any]:
    """Of one round: medians, after one that warms up; `peak_bytes` beside what was there before.

    `values` are those of the whole model; a round merges one of `fragments`.
    """
    pid = os.getpid()
    reset_peak(pid)
    before = peak(pid)
    case = Case(learners, values, name, fragments)
    case.round(threads)
    reset_peak(pid)
    runs = [case.round(threads) for _ in range(repeats)]
    gate_s, stage_s, stage_wall_s = (statistics.median(x) for x in zip(*runs, strict=True))
    return {
        "learners": learners,
        "values": case.size,
        "model_values": values,
        "fragments": fragments,
        "codec": name,
        "threads": threads,
        "gate_s": gate_s,
        "stage_s": stage_s,
        "stage_wall_s": stage_wall_s,
        "peak_bytes": peak(pid) - before,
        "payload_bytes": codec.bytes_of(name, case.size),
    }
