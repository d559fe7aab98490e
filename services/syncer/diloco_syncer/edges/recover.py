"""A leader's first act: rebuild history and store from snapshot, tape and contributions."""

import asyncio
from dataclasses import dataclass

from diloco_shared.config import RunSpec
from diloco_shared.edges.blobs import get_blob
from diloco_shared.edges.bus import Bus
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    ContributionManifest,
    InitManifest,
    PublicationManifest,
    TapeInit,
    TapeRecord,
)
from diloco_shared.protocol.wire import WireError, decode
from diloco_syncer.edges.snapshots import SnapshotStore
from diloco_syncer.edges.tape import Tape
from diloco_syncer.history import History, TapeFault
from diloco_syncer.replay import newest_published, payloads_needed, replay
from diloco_syncer.store import FragmentStore

# Time to read one contribution back, in seconds; it lies on the hub's own disk.
BLOB_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Recovered:
    """Where the run stands, and what happened on the way there."""

    history: History
    store: FragmentStore | None
    published: tuple[int, ...]
    notes: list[str]


async def recover(
    spec: RunSpec, data: Bus, tape: Tape, snapshots: SnapshotStore, *, until: int | None = None
) -> Recovered:
    """Snapshot, then every later record; raises TapeFault when they do not fit together."""
    found, notes = await asyncio.to_thread(snapshots.newest)
    history, store = History(spec), None
    if found is not None:
        meta, arrays = found
        history = History.restore(spec, meta["history"])
        store = FragmentStore.restore(meta["store"], arrays, spec.algorithm)
        notes.append(f"snapshot of record {history.seq}, round {history.next_round - 1}")
    records = await tape.read(after=history.seq)
    for seq, record in records:
        payloads = await _payloads(spec.name, data, record)
        store = await asyncio.to_thread(replay, history, store, record, seq, payloads)
    notes.append(f"{len(records)} records replayed up to {history.seq}")
    return Recovered(history, store, await _published(spec.name, data, history), notes)


async def _payloads(run: str, data: Bus, record: TapeRecord) -> dict[str, bytes]:
    """The blobs that a record names, from UP; TapeFault when one is gone."""
    kind: type[InitManifest] | type[ContributionManifest] = (
        InitManifest if isinstance(record, TapeInit) else ContributionManifest
    )
    payloads: dict[str, bytes] = {}
    for subject in payloads_needed(record):
        stored = await data.last(subjects.up_stream(run), subject + ".m")
        if stored is None:
            raise TapeFault(
                f"the tape needs {subject}, which is no longer in {subjects.up_stream(run)}: the "
                "snapshot that covered it is gone; restore the syncer's data folder"
            )
        blob = decode(stored.payload, kind).blob
        payloads[subject] = await get_blob(
            data, subjects.up_stream(run), blob, timeout_s=BLOB_TIMEOUT_S
        )
    return payloads


async def _published(run: str, data: Bus, history: History) -> tuple[int, ...]:
    """Newest version of each fragment on DN in this epoch; -1 none."""
    manifests = []
    for stored in await data.fetch(
        subjects.dn_stream(run), f"dn.{run}.{history.epoch}.*.*.*.m", start_seq=1
    ):
        try:
            manifests.append(decode(stored.payload, PublicationManifest))
        except WireError:
            continue  # not ours to judge: it is simply not a publication
    return newest_published(history, manifests)
