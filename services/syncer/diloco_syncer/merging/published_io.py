"""Reads the published parameters back from DN, for a syncer that begins again from them."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

import structlog

from diloco_shared.bus.blobs import BlobIncomplete, fresh, get_blob
from diloco_shared.bus.port import Bus, Stored
from diloco_shared.bus.stored_records import messages_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import PublicationManifest, TapeRebirth
from diloco_shared.protocol.subjects import PublicationSubject
from diloco_syncer.history.history import History
from diloco_syncer.leadership.rebirth import Reborn, chains, decoded, reborn, reborn_store
from diloco_syncer.merging.store import FragmentStore, Shelf, Values

log = structlog.get_logger()

# A publication whose chunks do not come for this long, in seconds, is taken for one without them:
# it is published again, which harms nobody.
CHUNKS_S = 5.0


class Unpublished(Exception):
    """A fragment cannot be read from DN; the text says which, and why."""


async def manifests_on(run: str, data: Bus, epoch: str = "*") -> list[PublicationManifest]:
    """Every publication that DN has, of one epoch or of all."""
    where = f"dn.{run}.{epoch}.*.*.*.m"
    return publications(await data.fetch(subjects.dn_stream(run), where, start_seq=1))


def publications(stored: Iterable[Stored]) -> list[PublicationManifest]:
    """The publications among what was read."""
    return messages_of(stored, PublicationManifest)


def parsed(stored: Iterable[Stored]) -> list[tuple[PublicationSubject, Stored]]:
    """What lies on subjects of publications, with their parts; whatever else DN holds is left."""
    found = []
    for one in stored:
        with suppress(ValueError):
            found.append((subjects.parse_publication(one.subject), one))
    return found


async def without_chunks(run: str, data: Bus, sealed: Iterable[Stored]) -> set[str]:
    """Of these manifests, the subjects of those whose chunks DN does not give whole.

    Raises BusError when the bus does not answer.
    """
    torn = set[str]()
    for stored in sealed:
        for manifest in publications([stored]):
            try:
                await get_blob(data, subjects.dn_stream(run), manifest.blob, patience_s=CHUNKS_S)
            except BlobIncomplete as error:
                log.warning("a publication is not whole", error=str(error))
                torn.add(stored.subject)
    return torn


async def read_newest(
    history: History, data: Bus, reason: str, shelf: Shelf
) -> tuple[FragmentStore, Reborn]:
    """The store made of the newest complete publication of every fragment owned.

    Raises Unpublished, or BusError when the bus does not answer.
    """
    manifests = await manifests_on(history.spec.name, data)
    found: dict[int, PublicationManifest] = {}
    anchors: dict[int, Values] = {}
    for p in history.owned:
        options = chains(history, p, manifests)
        found[p], anchors[p] = await _first(history, data, p, options)
    epoch = max((m.epoch for m in manifests if m.fragment in history.owned), default=0)
    born = reborn(history, found, epoch, reason)
    store = await asyncio.to_thread(reborn_store, history, born.versions, anchors, shelf)
    return store, born


async def read_recorded(
    history: History, data: Bus, record: TapeRebirth, shelf: Shelf
) -> FragmentStore:
    """The store that a record speaks of, digest by digest; raises likewise."""
    manifests = await manifests_on(history.spec.name, data)
    anchors: dict[int, Values] = {}
    for p in history.owned:
        options = chains(history, p, manifests, recorded=record.anchor_digests[p])
        _, anchors[p] = await _first(history, data, p, options)
    return await asyncio.to_thread(reborn_store, history, record.versions, anchors, shelf)


async def _first(
    history: History, data: Bus, p: int, options: Sequence[Sequence[PublicationManifest]]
) -> tuple[PublicationManifest, Values]:
    """The first of `options` that is whole."""
    why = f"nothing that makes a version of fragment {p} is published"
    if history.restored is not None:
        source = history.restored.source
        why += f" since the run went back to {source}: it waits for {source}, or for a syncer that "
        why += "has the state"
    for chain in options:
        try:
            return chain[-1], await _anchor(history.spec.name, data, chain)
        except (BlobIncomplete, ValueError) as error:
            why = f"what is published of fragment {p} is damaged: {error}"
    raise Unpublished(why)


async def _anchor(run: str, data: Bus, chain: Sequence[PublicationManifest]) -> Values:
    anchor_F: Values | None = None
    for m in chain:
        # Of a keyframe in fp32 the anchor is a view.
        payload = await get_blob(data, subjects.dn_stream(run), m.blob, take=fresh)
        anchor_F = await asyncio.to_thread(decoded, m, payload, anchor_F)
    assert anchor_F is not None, "an empty chain"
    return anchor_F
