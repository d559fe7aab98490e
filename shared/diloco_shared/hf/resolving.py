"""A run's [model] table that names a checkpoint, with what only its folder tells filled in."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_shared.hf.weights import digest_of, open_weights
from diloco_shared.spec.shapes import SHAPES, Shape


def resolved(model: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The table with preset, overrides and digest of the checkpoint at `weights`.

    What the table says itself stays. Without `weights`, or with a digest, nothing is changed.
    Raises WrongCheckpoint for a folder that is none.
    """
    named = model.get("weights")
    if not isinstance(named, str) or not named or model.get("weights_digest"):
        return dict(model)
    weights = open_weights(root / named)
    preset, overrides = nearest(weights.shape)
    given = model.get("overrides") or {}
    return {
        **model,
        "preset": preset,
        "overrides": {**overrides, **given},
        "weights_digest": digest_of(weights),
    }


def nearest(shape: Shape) -> tuple[str, dict[str, Any]]:
    """The preset that has most in common with a shape, and the fields that differ.

    What is recomputed in the backward pass is the preset's own: it is no part of a checkpoint.
    """

    def differing(preset: str) -> dict[str, Any]:
        there = asdict(SHAPES[preset])
        return {n: v for n, v in asdict(shape).items() if n != "remat" and v != there[n]}

    preset = min(SHAPES, key=lambda name: len(differing(name)))
    return preset, differing(preset)
