"""What must hold of a run's tape and publications whatever died meanwhile."""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from live.stack import Stack

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import PublicationManifest, TapeRecord, TapeRound
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.follow_io import payloads_of
from diloco_syncer.history.history import History
from diloco_syncer.history.replay import replay
from diloco_syncer.history.tape_io import Tape
from diloco_syncer.merging.store import FragmentStore
from diloco_syncer.snapshots.snapshots_io import SnapshotStore


def check_tape(rounds: list[dict[str, Any]], fragments: int = 6) -> None:
    """No round or version lost or repeated (I1, I6), none merged twice (I2), terms grow (I7)."""
    assert [r["round"] for r in rounds] == list(range(len(rounds)))
    assert all(a["term"] <= b["term"] for a, b in pairwise(rounds))
    committed = [r for r in rounds if r["outcome"] == "committed"]
    for p in range(fragments):
        versions = [r["version"] for r in committed if r["fragment"] == p]
        assert versions == list(range(1, len(versions) + 1))
    merged = [v["subject"] for r in rounds for v in r["verdicts"] if v["outcome"] == "merged"]
    assert len(merged) == len(set(merged))


def balanced(status: dict[str, Any]) -> bool:
    """I5, per fragment, as the API shows it."""
    by_fragment = status["tokens_by_fragment"]
    return all(sum(of.values()) == status["tokens_processed"] for of in by_fragment)


async def executed_again(stack: Stack) -> int:
    """Merges of the run's tape, all of which come to the same in an execution that nobody kills."""
    async with stack.bus() as bus:
        return await check_against_an_unfailed_execution(bus, stack.folder)


async def check_against_an_unfailed_execution(bus: NatsBus, folder: Path) -> int:
    """Execute run `r` from its beginning in this process, where nothing fails.

    Digests of master, anchor and publication are compared with every record (I9), whole states with
    every snapshot that a syncer left: master, anchor, outer momentum, history. What is published
    last is the newest version, with the same digest in every term (I4). Returns merges executed.
    """
    entry = await bus.kv_get(subjects.RUNS, "r")
    assert entry is not None and entry.value is not None
    spec = RunSpec.model_validate(decode(entry.value, RunRecord).spec)
    there = snapshots_in(folder, spec)  # before the tape, which has all their records by then
    tape = await Tape(bus, "r").read()
    executed = await execute(spec, tape, lambda record: payloads_of("r", bus, record), there)
    assert executed.merges
    await check_publications(bus, executed.history, executed.digests)
    return executed.merges


@dataclass
class Executed:
    """What an execution has come to."""

    history: History
    merges: int = 0
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # by (fragment, version)


async def execute(
    spec: RunSpec,
    tape: Iterable[tuple[int, TapeRecord]],
    payloads: Callable[[TapeRecord], Awaitable[Mapping[str, bytes]]],
    there: list[tuple[SnapshotStore, int]],
) -> Executed:
    """Execute a whole tape, and lay its states against the snapshots that are there."""
    assert there, "no snapshot to compare with"
    executed, store, compared = Executed(History(spec)), None, 0
    for seq, record in tape:
        store = replay(executed.history, store, record, seq, await payloads(record))
        if isinstance(record, TapeRound) and record.outcome == "committed":
            executed.merges += 1
            executed.digests[record.fragment, record.version] = record.anchor_digest
        for snapshots, covers in there:
            if covers == seq:
                assert store is not None
                compare(snapshots, covers, executed.history, store)
                compared += 1
    assert compared == len(there), "a snapshot of a record that is not on the tape"
    return executed


def snapshots_in(folder: Path, spec: RunSpec) -> list[tuple[SnapshotStore, int]]:
    """(where, record covered) of every snapshot of every syncer."""
    stores = [SnapshotStore(p) for p in folder.glob(f"*/snapshots/{spec.folder}")]
    return [(store, covers) for store in stores for covers in store.covers()]


def compare(snapshots: SnapshotStore, covers: int, history: History, store: FragmentStore) -> None:
    """A snapshot against the state of the same record, bit for bit."""
    meta, arrays = snapshots.load(covers)
    ours = store.state_arrays()
    assert arrays.keys() == ours.keys()
    assert any(".outer." in name for name in ours), "no momentum"
    for name, array in ours.items():
        assert arrays[name].tobytes() == np.asarray(array).tobytes(), (snapshots.folder, name)
    # But for the ledger, which also has the newest word of every learner: that is not on the tape.
    said, known = json.loads(json.dumps(history.meta())), meta["history"]
    assert said.keys() == known.keys()
    for name in said.keys() - {"ledger"}:
        assert said[name] == known[name], (snapshots.folder, name)


async def check_publications(
    bus: NatsBus, history: History, digests: dict[tuple[int, int], str]
) -> None:
    """What DN holds is what the tape committed, and the newest of every fragment is there."""
    newest = dict.fromkeys(range(history.fragments), 0)
    for (p, version), digest in (await published(bus)).items():
        assert version == 0 or digest == digests[p, version]
        newest[p] = max(newest[p], version)
    assert tuple(newest.values()) == tuple(history.versions)


async def published(bus: NatsBus) -> dict[tuple[int, int], str]:
    """(fragment, version) -> digest of all that DN holds, the same in every term (I4)."""
    found: dict[tuple[int, int], str] = {}
    for stored in await bus.fetch(subjects.dn_stream("r"), "dn.r.*.*.*.*.m"):
        m = decode(stored.payload, PublicationManifest)
        assert found.setdefault((m.fragment, m.version), m.anchor_digest) == m.anchor_digest
    return found
