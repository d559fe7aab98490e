"""What a run begins from where it is not a seed: a Hugging Face checkpoint on this machine."""

from dataclasses import asdict, replace
from pathlib import Path

from diloco_shared.hf.weights import HfWeights, WrongCheckpoint, digest_of, open_weights
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import shape_of


def weights_of(model: Model, root: Path) -> HfWeights | None:
    """The weights that `model` names, which must be those that the run means; none: a seed.

    A relative path begins at `root`. Raises WrongCheckpoint. Reads all of it once, for its digest.
    """
    if not model.weights:
        return None
    weights = open_weights(root / model.weights)
    wanted = shape_of(model)
    there = asdict(replace(weights.shape, remat=wanted.remat))
    differing = [
        f"{name} is {there[name]} there, and {value} in the run"
        for name, value in asdict(wanted).items()
        if there[name] != value
    ]
    if differing:
        raise WrongCheckpoint(
            f"{weights.folder} holds a model of another shape: {'; '.join(differing[:5])}"
        )
    found = digest_of(weights)
    if model.weights_digest not in ("", found):
        raise WrongCheckpoint(
            f"{weights.folder} holds other weights than the run begins from: their digest is "
            f"{found}, and model.weights_digest is {model.weights_digest}"
        )
    return weights
