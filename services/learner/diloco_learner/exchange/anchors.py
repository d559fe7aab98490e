"""Host copies of the published anchors: manifests and payloads in, bit-checked fp32 arrays out.

A keyframe replaces, a delta adds to the version before it, exactly as the syncer did, so that all
copies of an anchor have the same bytes (I4). Whatever does not check changes nothing and is counted
with its reason (I11). Where several hosts are one learner, each keeps its part of what was checked,
and a handle stands for it here (`hosts.held_anchors`). Decoding costs processor time in proportion
to the payload: call from one worker thread at a time, not from an event loop. Meanwhile only
`epoch` and then `versions` may be read.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco_learner.events import AnchorReady
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import PublicationManifest

Anchor = NDArray[np.float32]

# Deltas held per fragment until what they add to is here. Transfers run side by side, so a few
# may overtake; what is beyond them comes again with the next keyframe.
WAITING_MAX = 4
# Anchors kept per fragment: the newest, which deltas build on. Who adopts takes it as soon as it is
# ready, and shares its memory: nobody writes to an anchor.
KEPT_MAX = 1
# Deltas of an epoch whose first keyframe is still on its way: about one per fragment in flight.
EARLY_MAX = 8


@dataclass(slots=True)
class FragmentAnchors:
    """What is held of one fragment, in the book's epoch."""

    anchors: dict[int, Anchor] = field(default_factory=dict)  # by version, oldest first
    digest: str = ""  # of the newest
    waiting: dict[int, tuple[PublicationManifest, bytes]] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """Newest version held; -1 for none."""
        # A copy, made at one stroke: `versions` is read while a worker thread takes one in.
        return max(tuple(self.anchors), default=-1)

    def put(self, m: PublicationManifest, anchor_F: Anchor) -> None:
        """Keep a checked anchor, which is newer than all held."""
        assert m.version > self.version
        self.anchors[m.version], self.digest = anchor_F, m.anchor_digest
        while len(self.anchors) > KEPT_MAX:
            del self.anchors[next(iter(self.anchors))]


class AnchorBook:
    """The newest anchor of each of P fragments, of the newest epoch seen."""

    def __init__(
        self,
        sizes_P: Sequence[int],
        hold: Callable[[int, Anchor], Anchor] = lambda fragment, anchor_F: anchor_F,
    ) -> None:
        """`sizes_P`: fp32 values per fragment, from the learner's own layout. `hold`: makes of a
        fragment's checked anchor what is kept of it: a handle, where it is given away in parts."""
        self.sizes_P = tuple(sizes_P)
        self.hold = hold
        self.epoch = 0
        self.shelves = [FragmentAnchors() for _ in self.sizes_P]
        self.early: list[tuple[PublicationManifest, bytes]] = []
        self.refused: Counter[str] = Counter()  # kind -> count
        self.last_refusal = ""

    def offer(self, manifest: PublicationManifest, payload: bytes) -> AnchorReady | None:
        """Take in a publication; the anchor it makes ready (perhaps a later one it released).

        None if it is old or a repeat, waits for what it adds to, or is refused (see `refused`
        and `last_refusal`). Raises HostLost where a host of the island is gone, and then the
        publication counts as one that never came.
        """
        m = manifest
        fault = self._fault(m)
        if fault:
            self._refuse("malformed", m, fault)
            return None
        if m.epoch < self.epoch:
            return None
        shelf = self.shelves[m.fragment]
        if m.epoch == self.epoch and m.version <= shelf.version:
            if m.version == shelf.version and m.anchor_digest != shelf.digest:
                self._refuse("conflict", m, f"digest {m.anchor_digest}, held {shelf.digest}")
            return None
        if m.prev_version >= 0 and (m.epoch, m.prev_version) != (self.epoch, shelf.version):
            self._wait(m, payload)
            return None
        anchor_F = self._decode(shelf, m, payload)
        if anchor_F is None:
            return None
        if m.epoch > self.epoch:  # only a keyframe comes here: a delta waits above
            self._enter(m.epoch)
            shelf = self.shelves[m.fragment]
        shelf.put(m, anchor_F)
        return _ready(self._follow(shelf, m))

    def take(self, epoch: int, fragment: int, version: int) -> Anchor:
        """Read-only fp32 anchor of shape (F,), or what `hold` made of it. KeyError if it is no
        longer, or not yet, held."""
        shelf = self.shelves[fragment]
        if epoch != self.epoch or version not in shelf.anchors:
            raise KeyError(
                f"anchor (epoch {epoch}, fragment {fragment}, version {version}) is not held; "
                f"held: epoch {self.epoch}, versions {list(shelf.anchors)}"
            )
        return shelf.anchors[version]

    @property
    def versions(self) -> tuple[int, ...]:
        """Newest version held per fragment, in `epoch`; -1 for none."""
        return tuple(shelf.version for shelf in self.shelves)

    def _fault(self, m: PublicationManifest) -> str:
        if m.fragment >= len(self.sizes_P):
            return f"fragment {m.fragment} of {len(self.sizes_P)}"
        if m.values != self.sizes_P[m.fragment]:
            return f"{m.values} values, the layout has {self.sizes_P[m.fragment]}"
        if m.prev_version not in (-1, m.version - 1):
            return f"version {m.version} cannot add to {m.prev_version}"
        return ""

    def _enter(self, epoch: int) -> None:
        """History began again: nothing of before may be built upon."""
        # In this order: whoever reads meanwhile must not take old versions for the new epoch's.
        self.shelves = [FragmentAnchors() for _ in self.sizes_P]
        self.epoch = epoch
        early, self.early = self.early, []
        for m, payload in early:
            if m.epoch >= epoch:
                self._wait(m, payload)

    def _wait(self, m: PublicationManifest, payload: bytes) -> None:
        """Hold a delta until what it adds to is here."""
        if m.epoch > self.epoch:
            self.early.append((m, payload))
            if len(self.early) > EARLY_MAX:
                self._refuse("waiting", self.early.pop(0)[0], "its epoch has not begun here")
            return
        waiting = self.shelves[m.fragment].waiting
        waiting[m.version] = (m, payload)
        if len(waiting) > WAITING_MAX:
            # The farthest goes: the nearest are the ones a single late transfer releases.
            self._refuse("waiting", waiting.pop(max(waiting))[0], "too far ahead")

    def _decode(
        self, shelf: FragmentAnchors, m: PublicationManifest, payload: bytes
    ) -> Anchor | None:
        """The checked anchor, or None if it was refused."""
        try:
            anchor_F = codec.decode(m.codec, payload, m.values)
        except ValueError as error:
            self._refuse("malformed", m, str(error))
            return None
        if m.prev_version >= 0:
            base_F = np.asarray(shelf.anchors[m.prev_version])
            # Infinities may meet; the digest decides whether that is what was published.
            with np.errstate(all="ignore"):
                np.add(base_F, anchor_F, out=anchor_F)
            del base_F
        digest = digest_array(anchor_F)
        if digest != m.anchor_digest:
            self._refuse("digest", m, f"anchor {digest}, published {m.anchor_digest}")
            return None
        anchor_F.flags.writeable = False
        return self.hold(m.fragment, anchor_F)

    def _follow(self, shelf: FragmentAnchors, first: PublicationManifest) -> PublicationManifest:
        """Apply the waiting deltas that `first` released; the newest of it and those."""
        newest = first
        while (following := shelf.waiting.pop(shelf.version + 1, None)) is not None:
            anchor_F = self._decode(shelf, *following)
            if anchor_F is None:
                break
            newest = following[0]
            shelf.put(newest, anchor_F)
        shelf.waiting = {v: w for v, w in shelf.waiting.items() if v > shelf.version}
        return newest

    def _refuse(self, kind: str, m: PublicationManifest, why: str) -> None:
        self.refused[kind] += 1
        where = f"epoch {m.epoch}, fragment {m.fragment}, version {m.version}, term {m.term}"
        self.last_refusal = f"publication ({where}): {kind}: {why}"


def _ready(m: PublicationManifest) -> AnchorReady:
    merged = dict(m.last_merged)
    return AnchorReady(m.epoch, m.fragment, m.version, m.round, m.stamp, merged, m.checkpoint)
