"""Which run-wide checkpoints a run needs, as its record says."""

from collections.abc import Iterable

from diloco_shared.protocol.checkpoints import parse_reference, reference
from diloco_shared.protocol.records import RunRecord
from diloco_shared.spec.run import OF_CHECKPOINT


def named(runs: Iterable[RunRecord]) -> set[str]:
    """Checkpoints that runs begin with, take weights from, or go back to: FOLDER/NUMBER of each,
    wherever it is. A run may wait for free machines while another one makes many checkpoints, and
    every learner that joins without a donor reads its own one again."""
    texts = set[str]()
    for record in runs:
        model = record.spec.get("model")
        weights = model.get("weights") if isinstance(model, dict) else None
        if isinstance(weights, str) and weights.startswith(OF_CHECKPOINT):
            texts.add(weights.removeprefix(OF_CHECKPOINT))
        if record.restore is not None:
            texts.add(record.restore.source)
    return {ref for text in texts if (ref := _reference(text))}


def _reference(text: str) -> str:
    """Without its address; "" for what is none."""
    try:
        return reference(*parse_reference(text)[1:])
    except ValueError:
        return ""
