"""Re-execution of a tape: the same records and contributions give the same bytes (I9).

Used by a restart, by the simulator and by `diloco replay`. Pure: payloads are handed in.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco_shared.numerics import codec
from diloco_shared.protocol.checkpoints import CheckpointManifest
from diloco_shared.protocol.messages import (
    PublicationManifest,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    Verdict,
)
from diloco_shared.protocol.records import ShardLease
from diloco_shared.spec.fragmentation import Layout
from diloco_syncer.events import Rewound, Stage
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.merging.store import Contribution, FragmentStore, Shelf, StagedMerge, in_memory


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a checkpoint brings back."""

    manifest: CheckpointManifest
    digest: str  # of the manifest
    history: dict[str, Any]  # `History.meta`
    store: FragmentStore
    leases: tuple[ShardLease, ...] = ()  # how far its data were read, where this run reads them on


def payloads_needed(record: TapeRecord) -> tuple[str, ...]:
    """Subjects of the blobs that re-executing `record` takes."""
    match record:
        case TapeInit():
            return tuple(subject for subject in record.subjects if subject)
        case TapeRound(outcome="committed"):
            return tuple(v.subject for v in _merged(record))
        case _:
            return ()


def replay(
    history: History,
    store: FragmentStore | None,
    record: TapeRecord,
    seq: int,
    payloads: Mapping[str, bytes],
    back: RestoredState | FragmentStore | None = None,
    shelf: Shelf = in_memory,
) -> FragmentStore | None:
    """Advance history and store by one record; the store (created by the init record).

    `back`: what a restore record goes back to, or the store that a rebirth began with; `shelf`: of
    a store that is created.

    Raises TapeFault naming the record when a digest differs: another machine, another library
    or a damaged contribution.
    """
    match record:
        case TapeInit():
            history.apply(record, seq)
            store = build_store(history, record.subjects, payloads, shelf)
            for p in history.owned:
                digest = record.anchor_digests[p]
                _check(store.anchor_digest(p), digest, seq, f"version 0 of fragment {p}")
            return store
        case TapeRound(outcome="committed"):
            if store is None:
                raise TapeFault(f"record {seq} commits a round before any init record")
            codec_up = history.spec.algorithm.codec_up
            try:
                staged = store.stage(
                    record.fragment,
                    [
                        Contribution(v.learner, v.weight, v.base, payloads[v.subject], codec_up)
                        for v in _merged(record)
                    ],
                    keyframe=record.keyframe,
                    fraction=record.outer_fraction,
                )
            except (KeyError, ValueError) as error:
                raise TapeFault(f"record {seq} cannot be executed again: {error}") from error
            where = f"round {record.round}, fragment {record.fragment}"
            _check(staged.master_digest, record.master_digest, seq, f"master of {where}")
            _check(staged.anchor_digest, record.anchor_digest, seq, f"anchor of {where}")
            _check(staged.payload_digest, record.payload_digest, seq, f"publication of {where}")
            store.install(record.fragment, staged)
        case TapeRebirth():
            assert isinstance(back, FragmentStore), "a rebirth without what was published"
            history.apply(record, seq)
            for p in history.owned:
                digest, what = record.anchor_digests[p], f"published fragment {p}"
                _check(back.anchor_digest(p), digest, seq, what)
            return back
        case TapeRestore():
            assert isinstance(back, RestoredState), "a restore without its state"
            history.resume(back.history, record, seq)
            return back.store
    history.apply(record, seq)
    return store


def newest_published(history: History, manifests: Iterable[PublicationManifest]) -> tuple[int, ...]:
    """Newest version per fragment on DN in this epoch, -1 for none.

    A head counts if it is the anchor of the tape, and nothing that it builds on is lost. A version
    above the head counts in any case: the tape has lost the record of it, and the leader must not
    make another one of that number.
    """
    there = _of_epoch(history, manifests)
    newest, whole = [-1] * history.fragments, _whole(there)
    for m in there:
        p = m.fragment
        head = m.anchor_digest == history.anchor_digests[p] and (p, m.version) in whole
        lost = m.version > history.versions[p]
        if lost or head:
            newest[p] = max(newest[p], m.version)
    return tuple(newest)


def newest_keyframes(history: History, manifests: Iterable[PublicationManifest]) -> tuple[int, ...]:
    """Newest version per fragment that DN has whole in this epoch, -1 for none: what is older can
    go. One above the head may be of a record that the tape has lost, and does not count."""
    newest = [-1] * history.fragments
    for m in manifests:
        p = m.fragment
        if m.epoch == history.epoch and p < len(newest) and m.prev_version < 0:
            newest[p] = max(newest[p], m.version if m.version <= history.versions[p] else -1)
    return tuple(newest)


def rewound(
    history: History, known: tuple[int, ...], manifests: Iterable[PublicationManifest]
) -> Rewound | None:
    """What DN lost of the versions `known` to have been published in this epoch; None: nothing."""
    there = _of_epoch(history, manifests)
    newest, seen, whole = [-1] * history.fragments, [-1] * history.fragments, _whole(there)
    for m in there:
        p = m.fragment
        seen[p] = max(seen[p], m.version)
        if (p, m.version) in whole:
            newest[p] = max(newest[p], m.version)
    if all(newest[p] >= known[p] for p in history.owned):
        return None
    return Rewound(tuple(newest), tuple(seen))


def _of_epoch(
    history: History, manifests: Iterable[PublicationManifest]
) -> list[PublicationManifest]:
    """Those of this epoch, so that what builds on another comes after it."""
    there = [m for m in manifests if m.epoch == history.epoch and m.fragment < history.fragments]
    return sorted(there, key=lambda m: (m.version, m.prev_version))


def _whole(there: Iterable[PublicationManifest]) -> set[tuple[int, int]]:
    """(fragment, version) of everything that can be built, a keyframe first."""
    whole = set[tuple[int, int]]()
    for m in there:
        if m.prev_version < 0 or (m.fragment, m.prev_version) in whole:
            whole.add((m.fragment, m.version))
    return whole


def build_store(
    history: History,
    subjects_P: tuple[str, ...],
    payloads: Mapping[str, bytes],
    shelf: Shelf = in_memory,
) -> FragmentStore:
    """The store at version 0 from the initial parameters (fp32 blobs, one per fragment owned).

    The payloads are its arrays: nothing is copied, and nobody may write to them any more.
    """
    layout = Layout.build(history.layout, history.fragments)
    fragments = [
        codec.view(payloads[subject], size) if p in history.owned else None
        for p, (subject, size) in enumerate(zip(subjects_P, layout.sizes, strict=True))
    ]
    return FragmentStore.init(layout, history.spec.algorithm, fragments, shelf)


def stage_chosen(
    store: FragmentStore,
    stage: Stage,
    payloads: Mapping[str, bytes],
    norms: Mapping[str, NDArray[np.float64]] | None = None,
) -> StagedMerge:
    """Compute the merge that an effect asks for; `norms` of pieces save it a pass."""
    known = norms or {}
    return store.stage(
        stage.fragment,
        [
            Contribution(c.learner, c.weight, c.base, payloads[c.key], c.codec, known.get(c.key))
            for c in stage.contributions
        ],
        keyframe=stage.keyframe,
        fraction=stage.fraction,
    )


def _merged(record: TapeRound) -> tuple[Verdict, ...]:
    return tuple(v for v in record.verdicts if v.outcome == "merged")


def _check(ours: str, theirs: str, seq: int, what: str) -> None:
    if ours != theirs:
        raise TapeFault(f"record {seq}: digest of the {what} is {ours}, the tape says {theirs}")
