"""Where a run that begins with a checkpoint reads its data: on from there, or anew."""

from pathlib import Path
from typing import Any

import pytest
from syncer.recording import SPEC, Recording

from diloco_shared.protocol.checkpoints import reference
from diloco_shared.protocol.messages import Cursor
from diloco_shared.spec.run import RunSpec
from diloco_syncer.checkpoints.parts_io import load, seal, write_part
from diloco_syncer.events import Capture, Seal
from diloco_syncer.history.history import History
from diloco_syncer.history.ledger import Ledger

REF = reference(SPEC.folder, 1)
DIGEST = "0123456789abcdef" * 2


def of(**tables: Any) -> RunSpec:
    """The run of the checkpoint, with other settings."""
    said = SPEC.model_dump()
    return RunSpec.model_validate(
        {
            k: v | tables.get(k, {}) if isinstance(v, dict) else tables.get(k, v)
            for k, v in said.items()
        }
    )


def kept(root: Path, spec: RunSpec) -> None:
    """A checkpoint of `spec`, which has read 40 sequences of data shard 3."""
    made = Recording()
    made.begin()
    assert made.store is not None
    made.history.ledger.read(Cursor(shard=3, passes=1, sequences=40))
    history, store = made.history.meta(), made.store
    part = write_part(spec, 0, str(root), 1, history, store.meta(), store.state_arrays())
    capture = Capture(1, history["seq"], "as the user asked", 1.0)
    seal(spec, str(root), capture, [(history, part)], Seal(1, {}, {}))


@pytest.mark.parametrize(
    ("was", "now", "reads_on"),
    [
        ({}, {}, True),
        ({}, {"budget": {"steps": 7}, "inner": {"batch_sequences": 3}}, True),
        ({}, {"data": {"source": "elsewhere"}}, False),
        ({"data": {"digest": DIGEST}}, {"data": {"digest": DIGEST, "source": "moved"}}, True),
        ({"data": {"digest": DIGEST}}, {"data": {"digest": DIGEST[::-1]}}, False),
        ({}, {"data": {"virtual_shards": 256}}, False),
        ({}, {"seed": 9}, False),
        ({}, {"model": {"context_tokens": 17}}, False),
        ({}, {"data": {"mixture": [{"source": "stdlib", "weight": 1.0}]}}, True),
        (
            {},
            {"data": {"mixture": [{"source": "a", "weight": 1}, {"source": "b", "weight": 2}]}},
            False,
        ),
    ],
)
def test_data_are_read_on_where_their_order_is_the_same(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], reads_on: bool
) -> None:
    kept(tmp_path, of(**was))
    found = load(of(**now), 0, REF, str(tmp_path))
    history = History(of(**now))
    history.load(found.history)
    assert history.ledger.places == ({3: (1, 40)} if reads_on else {})
    assert [(lease.shard, lease.sequences) for lease in found.leases] == [(3, 40)][: int(reads_on)]


def test_data_shards_are_those_of_the_run_that_goes_on() -> None:
    """A cursor of a shard that the checkpoint's run did not have counts."""
    ledger, present = Ledger.empty(1), Ledger.empty(1)
    ledger.shards, present.shards = 4, 256
    ledger.resume(present, own=False)
    ledger.read(Cursor(shard=200, passes=0, sequences=5))
    assert ledger.places[200] == (0, 5)
