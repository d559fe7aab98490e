"""Room in the run's streams: what is published whole, and kept, before there is none; what is full.

DN is purged up to a keyframe, UP and TAPE up to a snapshot: so room is made by making one of them
earlier than the run's settings say. Pure; told by events how much each stream holds.
"""

import math

from diloco_shared.spec.codecs import bytes_of
from diloco_syncer.events import Effect, Full, MergeWaits, StreamSeen, Tell
from diloco_syncer.history.history import History

# Share of UP or TAPE that is held when a snapshot is made before its time: what comes while it is
# written must find room. What UP keeps for standbys goes once there is none (purging_io.py).
CROWDED = 0.75
# What chunks and manifests add to a payload: 200 bytes of headers to 512 KiB, a manifest of some
# hundred bytes, and of a keyframe 300 bytes a tensor (protocol/wire.py).
CHUNKS_FACTOR, MANIFEST_BYTES, TENSOR_BYTES = 1.001, 2000, 300

# Waits of merges for a disk are told once they are so many seconds together, and whenever they have
# become twice as many: some twenty times in a run of a year.
WAITS_TOLD_S = 10.0


class Room:
    """Of one leader's term."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.algorithm = history.spec.algorithm
        self.seen: dict[str, StreamSeen] = {}
        self.full: dict[str, str] = {}  # place -> what is full, and what to do
        self.snapshot_failed = ""
        self.waits: dict[int, str] = {}  # fragment -> what its merge waits for
        self.waited_s, self.waits_told_s = 0.0, WAITS_TOLD_S  # all merges; when it is told next
        self.behind_P: dict[int, int] = {}  # bytes on DN from the newest keyframe on

    # --- what is full --------------------------------------------------------------------------

    def take(self, event: Full) -> list[Effect]:
        """Told once at its beginning and once at its end."""
        was = self.full.pop(event.place, "")
        if event.reason:
            self.full[event.place] = event.reason
        if bool(was) == bool(event.reason):
            return []
        data = {"place": event.place}
        if event.reason:
            return [Tell("full", event.reason, data)]
        return [Tell("room-again", f"{event.place} has room again: the run goes on", data)]

    @property
    def reason(self) -> str:
        """Why the run cannot go on; "" while there is room."""
        return "; ".join(why for _, why in sorted(self.full.items()))

    def merge_waits(self, event: MergeWaits) -> list[Effect]:
        """What is written slowly holds merges up: shown while it does, and told now and then."""
        self.waits.pop(event.fragment, "")
        self.waited_s = event.seconds
        if event.place:
            self.waits[event.fragment] = event.place
        if not event.place or self.waited_s < self.waits_told_s:
            return []
        self.waits_told_s = 2 * self.waited_s
        return [Tell("slow-disk", self.slow, {"seconds": round(self.waited_s, 1)})]

    @property
    def slow(self) -> str:
        """What merges wait for; "" while they wait for no disk."""
        places = " and ".join(sorted(set(self.waits.values())))
        if not places:
            return ""
        seldom = " or a larger keeping.snapshot_every_rounds" if "snapshots" in places else ""
        return (
            f"merges wait for {places}, {self.waited_s:.0f} s in all: it writes less than rounds "
            f"replace; a faster one{seldom} would help"
        )

    # --- room before it is needed ---------------------------------------------------------------

    def saw(self, event: StreamSeen) -> None:
        self.seen[event.kind] = event

    @property
    def crowded(self) -> bool:
        """Whether a snapshot shall be made before its time.

        Not where the stream has yet to let go what one covers: one snapshot after the other would
        take the disk's time, and each asks of slow standbys that they are further than the one
        before.
        """
        found = [self.seen[kind] for kind in ("UP", "TAPE") if kind in self.seen]
        return any(s.limit and not s.waits and s.used > CROWDED * s.limit for s in found)

    def keyframe_due(self, fragment: int) -> bool:
        """Whether the next publication of `fragment` is whole to make room: DN is short of it, and
        no other fragment would make more."""
        dn = self.seen.get("DN")
        if dn is None or not dn.limit or dn.limit - dn.used >= self.needed:
            return False
        behind_P = {p: self.behind(p) for p in self.history.owned}
        return behind_P[fragment] == max(behind_P.values())

    @property
    def needed(self) -> int:
        """Bytes that DN must have free: every fragment once more as it is, meanwhile the keyframes
        that may be on their way, and the one that was decided on."""
        h = self.history
        deltas = sum(self.delta_bytes(p) for p in range(len(h.sizes_P)))
        flying = (self.algorithm.rounds_in_flight_max + 2) * self.algorithm.shards
        return deltas + flying * self.keyframe_bytes

    @property
    def keyframe_bytes(self) -> int:
        """Of the largest fragment, exact: what a new leader or epoch publishes."""
        sizes_P = self.history.sizes_P
        return self._stored("fp32", max(sizes_P)) if sizes_P else 0

    @property
    def contribution_bytes(self) -> int:
        """Of the largest fragment."""
        sizes_P = self.history.sizes_P
        return self._stored(self.algorithm.codec_up, max(sizes_P)) if sizes_P else 0

    def delta_bytes(self, fragment: int) -> int:
        return self._stored(self.algorithm.codec_down, self.history.sizes_P[fragment])

    def _stored(self, codec: str, values: int) -> int:
        """What so many values take in a stream."""
        tensors = TENSOR_BYTES * len(self.history.layout)
        return math.ceil(bytes_of(codec, values) * CHUNKS_FACTOR) + MANIFEST_BYTES + tensors

    def behind(self, fragment: int) -> int:
        """Bytes that a keyframe of `fragment` would free: told by this term's publications, before
        the first of them as the run's settings say."""
        told = self.behind_P.get(fragment)
        if told is not None:
            return told
        since = self.algorithm.deltas_since(fragment, self.history.versions[fragment])
        keyframe = self._stored("fp32", self.history.sizes_P[fragment])
        return keyframe + since * self.delta_bytes(fragment)

    def published(self, fragment: int, *, keyframe: bool) -> None:
        """A publication of `fragment` is on DN."""
        if keyframe:
            sizes_P = self.history.sizes_P
            self.behind_P[fragment] = self._stored("fp32", sizes_P[fragment])
        else:
            self.behind_P[fragment] = self.behind(fragment) + self.delta_bytes(fragment)


# --------------------------------------------------------------------------------------------------
# Up to where UP may be purged once a snapshot covers its rounds.
#
# All that belongs to a round came after the round was first pulled; so what was on UP before the
# first pull of any later round belongs to earlier ones, late and orphaned contributions alike.


class Horizon:
    """Of one leader's term: bounded by the rounds between two snapshots."""

    def __init__(self) -> None:
        self.floor: dict[int, int] = {}  # round -> newest sequence on UP at its first pull

    def pulled(self, round_: int, up_seq: int) -> None:
        """A pull of `round_` goes out while `up_seq` is the newest sequence seen on UP."""
        self.floor.setdefault(round_, up_seq)

    def rewound(self, end: int) -> None:
        """UP lost what came after `end`: its sequences come again, for rounds of now."""
        self.floor = {n: min(seq, end) for n, seq in self.floor.items()}

    def below(self, last_round: int, up_seq: int) -> int:
        """Sequence below which everything is of rounds up to `last_round`.

        A round may be skipped without a pull: any later one's pull is the limit then.
        """
        self.floor = {n: seq for n, seq in self.floor.items() if n > last_round}
        return min(self.floor.values(), default=up_seq) + 1
