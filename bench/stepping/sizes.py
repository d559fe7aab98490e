"""Models whose steps are timed, the run that trains them, and what a step computes."""

from dataclasses import dataclass, field
from typing import Any

from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import Shape, shape_of

RUN = "learner-bench"
SEED = 0
# A learner that is stopped while others have their turn must not be given up meanwhile.
LEASE_S = 900.0


@dataclass(frozen=True, slots=True)
class Size:
    """`preset` with `overrides`, in batches of `batch` sequences of `context` tokens."""

    preset: str
    batch: int
    context: int
    overrides: dict[str, int | float | str | bool] = field(default_factory=dict)
    # Rounds overlap all the time: one begins at every step, and takes two and more.
    fragments: int = 24
    sync_every_steps: int = 24


_DENSE = {"heads": 6, "kv_heads": 6, "head_width": 64, "hidden": 1024, "width": 384}
SIZES = {
    # A step of some ten milliseconds, to try the script itself.
    "tiny": Size("nano", 2, 32, fragments=4, sync_every_steps=4),
    # Six layers, more than are unrolled: 10.8 million parameters, about a second a step on a core.
    "11m": Size("small", 4, 128, {"layers": 6, **_DENSE}),
    # Three of common shapes for one accelerator of 40 GB and more, in batches that keep it busy.
    "125m": Size(
        "150m",
        32,
        1024,
        {"width": 768, "layers": 12, "heads": 12, "kv_heads": 12, "hidden": 2048},
    ),
    "350m": Size(
        "150m",
        16,
        1024,
        {"width": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "hidden": 2736},
    ),
    "1b": Size("1b", 8, 1024),
}
# Of the programs whose compilation is timed.
LAYERS_FEW, LAYERS_MANY = 1, 48


def spec_of(size: Size, learners: int = 1, layers: int | None = None) -> RunSpec:
    """The run, everything on: it evaluates and keeps checkpoints while it trains."""
    overrides = size.overrides | ({} if layers is None else {"layers": layers})
    return RunSpec.model_validate(
        {
            "name": RUN,
            "seed": SEED,
            "algorithm": {
                "fragments": min(size.fragments, 8) if layers == 1 else size.fragments,
                "sync_every_steps": size.sync_every_steps,
                # One: the rounds go on with the other learner while the measured one is stopped.
                "quorum": 1,
            },
            "model": {
                "preset": size.preset,
                "overrides": overrides,
                "context_tokens": size.context,
            },
            "inner": {"batch_sequences": size.batch},
            "membership": {"learners_min": learners, "lease_s": LEASE_S},
            # As often as by default, of two batches each. So are checkpoints.
            "evaluation": {"sequences": 2 * size.batch},
            "budget": {"steps": 10_000_000},
        }
    )


def flops_per_token(shape: Shape, context: int) -> int:
    """Floating-point operations of a forward and a backward pass, a token.

    Six for each value of a matrix (the embedding is looked up, and counts only where it is the
    head as well), and of attention's two products what is left of the causal mask: half. What is
    computed again (`remat`) is not counted, as is usual for a share of the peak.
    """
    s = shape
    attention = s.width * s.head_width * (2 * s.heads + 2 * s.kv_heads)
    matrices = s.layers * (attention + 3 * s.width * s.hidden) + s.width * s.vocabulary
    mixed = s.layers * 2 * s.heads * s.head_width * context // 2
    return 6 * (matrices + mixed)


def facts(size: Size) -> dict[str, Any]:
    """For the page: what the model is."""
    from diloco_shared.budget import known

    spec = spec_of(size)
    job = known(spec)
    assert job is not None
    return {
        "parameters": job.parameters,
        "layers": shape_of(spec.model).layers,
        "width": shape_of(spec.model).width,
        "batch_sequences": size.batch,
        "context_tokens": size.context,
        "tokens_per_step": size.batch * size.context,
        "fragments": size.fragments,
        "sync_every_steps": size.sync_every_steps,
    }
