"""Which run-wide checkpoints runs need, as their records say, and what their syncers show.

A record has the newest wish to go back, and no earlier one. A run may not have gone back to that
checkpoint yet, and where it cannot it never does: until it has, it needs the one before. That is
known to its syncer alone, which shows it in the run's status (`run_states.needs_in`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco_shared.bus.port import Bus
from diloco_shared.bus.status_key import shown
from diloco_shared.bus.stored_records import records_in
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import parse_reference, reference
from diloco_shared.protocol.records import RunRecord, RunStatus
from diloco_shared.protocol.run_states import needs_in
from diloco_shared.spec.run import OF_CHECKPOINT


async def needed_by_runs(bus: Bus) -> list[tuple[RunRecord, set[str]]]:
    """Every run that can be read, and what it needs, as the hub has it now. Raises BusError."""
    runs = await records_in(bus, subjects.RUNS, RunRecord)
    # Each record is read before its status: a wish that is older than the status is judged rightly,
    # and one that is newer is open to it.
    records = [found.record for found in runs.values()]
    return [(record, named(record, await _told(bus, record))) for record in records]


async def _told(bus: Bus, record: RunRecord) -> list[RunStatus | None]:
    """What is shown of each syncer shard. Nobody is asked for a run without a wish, since most
    have none."""
    if record.restore is None:
        return []
    algorithm = record.spec.get("algorithm")
    shards = algorithm.get("shards", 1) if isinstance(algorithm, dict) else 1
    run_id = str(record.spec.get("id", ""))
    return [await shown(bus, record.name, run_id, n) for n in range(max(int(shards), 1))]


def named(record: RunRecord, told: Sequence[RunStatus | None]) -> set[str]:
    """Checkpoints that a run begins with, takes weights from, went back to, or shall go back to:
    FOLDER/NUMBER of each, wherever it is. The run may wait for free machines while another one
    makes many checkpoints, and every learner that joins without a donor reads its own one again.

    `told`: by each of its syncer shards; None where one shows nothing.
    """
    texts = {weights_in(record.spec)}
    for status in told:
        texts.update((status and needs_in(status)) or ())
    wish = record.restore
    if wish is not None and not (told and all(_answers(status, wish.serial) for status in told)):
        texts.add(wish.source)
    return {ref for text in texts if (ref := bare(text))}


def weights_in(spec: Mapping[str, Any]) -> str:
    """The checkpoint whose weights a specification takes, perhaps with an address; "" for none."""
    model = spec.get("model")
    weights = model.get("weights") if isinstance(model, dict) else None
    named = isinstance(weights, str) and weights.startswith(OF_CHECKPOINT)
    return str(weights).removeprefix(OF_CHECKPOINT) if named else ""


def _answers(status: RunStatus | None, serial: int) -> bool:
    """Whether a shard has fulfilled this wish, or given it up, and shows what it needs since. A
    syncer of release 0.2 does not show that, and then the wish counts for good."""
    return status is not None and status.restores >= serial and needs_in(status) is not None


def bare(text: str) -> str:
    """A reference without its address; "" for what is none."""
    try:
        return reference(*parse_reference(text)[1:])
    except ValueError:
        return ""
