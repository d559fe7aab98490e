"""A run that begins from a checkpoint: what only its folder tells, and whether it is the right one.

Whoever submits reads shape and digest from the folder. Every learner compares its own with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from diloco_shared.hf.weights import HfWeights, WrongCheckpoint, digest_of, open_weights
from diloco_shared.reach.local import Root, located
from diloco_shared.spec.run import Model, longer_context
from diloco_shared.spec.shapes import SHAPES, Shape, shape_of


def resolved(model: Mapping[str, Any], root: Root) -> dict[str, Any]:
    """The table with preset, overrides, digest and context of the checkpoint at `weights`.

    What the table says itself stays. Without `weights`, or with a digest, nothing is changed.
    Raises WrongCheckpoint for a folder that is none, OutOfReach for one that `root` leaves out.
    """
    named = model.get("weights")
    if not isinstance(named, str) or not named or model.get("weights_digest"):
        return dict(model)
    weights = open_weights(located(named, root))
    preset, overrides = nearest(weights.shape)
    given = model.get("overrides") or {}
    return {
        **model,
        "preset": preset,
        "overrides": {**overrides, **given},
        "weights_digest": digest_of(weights),
        **longer_context(weights.context, model),
    }


def nearest(shape: Shape) -> tuple[str, dict[str, Any]]:
    """The preset that has most in common with a shape, and the fields that differ.

    What is recomputed in the backward pass is the preset's own: it is no part of a checkpoint.
    """

    def other(preset: str) -> dict[str, Any]:
        there = asdict(SHAPES[preset])
        return {n: v for n, v in asdict(shape).items() if n != "remat" and v != there[n]}

    preset = min(SHAPES, key=lambda name: len(other(name)))
    return preset, other(preset)


# Fields of a shape that say how it is trained: weights have none of them, and any will do.
TRAINING = ("remat", "expert_capacity", "expert_balance")


def differing(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """In words, the first fields of two shapes that are not the same; "" for none."""
    found = [
        f"{name} is {there[name]} there, and {value} in the run"
        for name, value in wanted.items()
        if there[name] != value and name not in TRAINING
    ]
    return "; ".join(found[:5])


def weights_of(
    model: Model, root: Root, moved: Callable[[], object] = lambda: None
) -> HfWeights | None:
    """The weights that `model` names, which must be those that the run means; none: a seed.

    The folder is looked for in `root`. Raises WrongCheckpoint, OutOfReach. Reads all of it once,
    for its digest. `moved`: see `HfWeights`.
    """
    if not model.weights:
        return None
    weights = replace(open_weights(located(model.weights, root)), moved=moved)
    wanted = shape_of(model)
    if wrong := differing(asdict(weights.shape), asdict(wanted)):
        raise WrongCheckpoint(f"{weights.folder} holds a model of another shape: {wrong}")
    found = digest_of(weights)
    if model.weights_digest not in ("", found):
        raise WrongCheckpoint(
            f"{weights.folder} holds other weights than the run begins from: their digest is "
            f"{found}, and model.weights_digest is {model.weights_digest}"
        )
    return weights
