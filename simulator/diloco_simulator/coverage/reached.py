"""Which rare states a whole world reached, as the hub shows them; no process is asked.

Heard are control messages of the run and stored events, member records, manifests and tape; what
the tape alone shows is counted by `reached_on_tape`.
"""

from typing import TYPE_CHECKING

from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
)
from diloco_syncer.rounds.rounds import DESERTED

if TYPE_CHECKING:
    from diloco_simulator.checkers.watch import RunWatch
    from diloco_simulator.checkers.watch_shard import OfShard
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from diloco_shared.bus.port import Delivery, Stored
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Beat,
    Grant,
    Message,
    PublicationManifest,
    Pull,
    TapeInit,
    TapeTerm,
)
from diloco_shared.protocol.records import Event, MemberRecord
from diloco_shared.protocol.wire import WireError, decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker

M = TypeVar("M", bound=Message)

# Why a learner may not join, by what is said of it.
JOIN_REFUSED = (
    ("the run is over", "the run is over"),
    ("is superseded by", "superseded"),
    ("configuration differs", "another configuration"),
)
# Of control messages: what stands behind the run in their subjects.
BEAT, GRANT, PULL, DONATE, SNAPSHOT = "beat", "grant", "pull", "donate", "snapshot"


class Reached:
    """Of one world."""

    def __init__(self, spec: RunSpec, broker: MemoryBroker, counts: Counter[str]) -> None:
        self.spec = spec
        self.counts = counts
        shards = range(spec.algorithm.shards)
        self.leaders = ["" for _ in shards]
        self.terms = [0 for _ in shards]
        self.initialised = [False for _ in shards]
        # Of each shard: (epoch, term, round) pulled and not closed; committed and not published.
        self.open: list[set[tuple[int, int, int]]] = [set() for _ in shards]
        self.unpublished: list[set[tuple[int, int, int]]] = [set() for _ in shards]
        self.granted: set[tuple[int, str]] = set()
        self.pulled: set[tuple[int, int, int, int]] = set()
        self.events = (subjects.event(spec.name, ""), subjects.event_by(""))
        self.restores_failed: set[tuple[int, int]] = set()  # shard, serial: as its leader has told
        self.last_told = False  # of this end: the last evaluation, or that there is none
        self.kinds: dict[str, Callable[[bytes], None]] = {
            BEAT: lambda payload: self._beat(decode(payload, Beat)),
            GRANT: lambda payload: self._grant(decode(payload, Grant)),
            PULL: lambda payload: self._pull(decode(payload, Pull)),
            DONATE: lambda payload: self.saw("donors asked"),
            SNAPSHOT: lambda payload: self.saw("snapshots asked for"),
        }
        broker.subscribe(f"ctl.{spec.name}.>", self.heard)

    def saw(self, *words: str) -> None:
        self.counts[" ".join(words)] += 1

    # --- control messages ----------------------------------------------------------------------

    def heard(self, delivery: Delivery) -> None:
        """A control message of the run; a lie that cannot be read shows nothing."""
        take = self.kinds.get(delivery.subject.split(".")[2])
        if take is not None:
            try:
                take(bytes(delivery.payload))
            except WireError:
                self.saw("control messages that cannot be read")

    def _beat(self, beat: Beat) -> None:
        self.saw("beats:", beat.state)
        if beat.term < self.terms[beat.shard]:
            self.saw("beats of a deposed leader")
        if beat.state == "starved":
            self.saw("starvation")
        if beat.state == "paused" and self.open[beat.shard]:
            self.saw("paused with a round in flight")

    def _grant(self, grant: Grant) -> None:
        if not grant.accepted:
            for part, why in JOIN_REFUSED:
                if part in grant.reason:
                    self.saw("join refused:", why)
        elif (key := (grant.shard, grant.nonce)) in self.granted:
            self.saw("grant sent again")
        else:
            self.granted.add(key)

    def _pull(self, pull: Pull) -> None:
        shard = pull.fragment % len(self.open)
        key = pull.epoch, pull.term, pull.round
        if (shard, *key) in self.pulled:
            self.saw("pulls sent again")
            return
        self.pulled.add((shard, *key))
        self.open[shard].add(key)
        self.saw("rounds in flight:", str(min(len(self.open[shard]), 4)))

    # --- what streams take ---------------------------------------------------------------------

    def stored(self, stream: str, message: Stored) -> None:
        """Events and member records."""
        if stream == subjects.EVENTS_STREAM and message.subject.startswith(self.events):
            event = _read(message, Event)
            # Who has credentials of its own tells all runs' events in one place.
            if event is not None and event.run == self.spec.name:
                self._told(event)
        elif stream == f"KV_{subjects.MEMBERS}" and message.payload:
            self._member(_read(message, MemberRecord))

    def _told(self, event: Event) -> None:
        self.saw("told:", event.kind)
        if event.kind in ("evaluation", "evaluation-failed") and event.data.get("final"):
            self.last_told = True
            self.saw("the last one told:", event.kind)
        if event.kind == "restore-failed" and {"shard", "serial"} <= event.data.keys():
            self.restores_failed.add((event.data["shard"], event.data["serial"]))
        if event.kind == "recovered" and "source" in event.data:  # else a syncer's
            self.saw("from", str(event.data["source"]))

    def _member(self, member: MemberRecord | None) -> None:
        if member is not None:
            self.saw("members:", member.role, member.state)
            if member.full:
                self.saw("a disk is full:", member.role)

    def published(self, m: PublicationManifest) -> None:
        shard = m.fragment % len(self.unpublished)
        self.unpublished[shard].discard((m.epoch, m.fragment, m.version))
        if m.round < 0 and m.version > 0:
            self.saw("keyframe on demand")

    def record(self, shard: int, record: TapeRecord) -> None:
        """The tape of a shard takes it."""
        match record:
            case TapeInit():
                self.initialised[shard] = True
            case TapeTerm() | TapeRebirth():
                self._leads(shard, record.leader, record.term)
            case TapeEnd():
                self.last_told = False
            case TapeRestore():
                if self.open[shard]:
                    self.saw("restored with a round in flight")
            case TapeRound():
                key = record.epoch, record.term, record.round
                self.open[shard].discard(key)
                if record.outcome == "committed":
                    version = record.epoch, record.fragment, record.version
                    self.unpublished[shard].add(version)

    def _leads(self, shard: int, leader: str, term: int) -> None:
        before = self.leaders[shard]
        if before and before != leader:
            self.saw("failovers")
        if before and self.unpublished[shard]:
            how = "takeover" if before != leader else "restart"
            self.saw(how, "during publication")
        self.leaders[shard], self.terms[shard] = leader, term
        self.open[shard].clear()
        self.unpublished[shard].clear()

    # --- who dies ------------------------------------------------------------------------------

    def role(self, name: str) -> str:
        """Of a machine, as the tapes have it."""
        if name.startswith("learner") or name.startswith("coordinator"):
            return name.partition("-")[0]
        return "leader" if name in self.leaders else "standby"

    def dies(self, name: str, before: str) -> None:
        """A process, before something that it was about to do."""
        role = self.role(name)
        self.saw(role, "dies before", before)
        if role != "leader":
            return
        shard = self.leaders.index(name)
        if self.open[shard]:
            self.saw("leader dies with a round being pulled")
        if self.unpublished[shard]:
            self.saw("leader dies with a publication under way")
        if not self.initialised[shard]:
            self.saw("leader dies before any init")


def _read(message: Stored, kind: type[M]) -> M | None:
    try:
        return decode(message.payload, kind)
    except WireError:
        return None


# --------------------------------------------------------------------------------------------------
# Which rare states records on a tape show.


def of_record(watch: "RunWatch", of: "OfShard", record: TapeRecord) -> None:
    """What a record on a shard's tape shows; before it is watched."""
    match record:
        case TapeRound():
            _of_round(watch, of, record)
        case TapeRebirth():
            watch.reached("begun again from what is published")
            if any(record.versions[p] < of.merges.versions[p] for p in of.merges.owned):
                watch.reached("begun again without what was never published")
        case TapeEpoch():
            watch.reached("epoch raised")
            if of.ended:
                watch.reached("epoch of a shard that is over")
            if record.epoch > 1:
                watch.reached("two epochs raised")
        case TapeSetting(name="paused", value=1):
            watch.reached("paused")
        case TapeSetting(name="stopping"):
            watch.reached("stopped by the user")
        case TapeRestore():
            watch.reached("restored")
            if of.restores:
                watch.reached("restored twice")
        case TapeCheckpoint():
            watch.reached(f"checkpoint {record.outcome}")


def _of_round(watch: "RunWatch", of: "OfShard", r: TapeRound) -> None:
    if r.outcome == "skipped":
        watch.reached("skipped round")
        members = "eligible" in r.reason
        watch.reached("skipped for want of", "members" if members else "answers")
        if r.reason.startswith(DESERTED):
            watch.reached("skipped: nobody awaited was live")
        if of.skipped_before:
            watch.reached("two rounds skipped in a row")
    of.skipped_before = r.outcome == "skipped"
    if r.quorum != of.merges.quorum:
        older = r.quorum != of.merges.quorum_before
        watch.reached("counted to", "an older quorum" if older else "the quorum before")
    merged = [v for v in r.verdicts if v.outcome == "merged"]
    if len(merged) == 1:
        watch.reached("merged by one learner alone")
    if len(merged) == 4:
        watch.reached("merged by four learners")
    for v in r.verdicts:
        if v.outcome == "merged" and v.base < r.version - 1:
            watch.reached("merged with a base one behind")
        elif v.outcome == "refused":
            watch.reached("refused:", v.reason.split(":")[0])
        elif v.outcome != "merged":
            watch.reached(v.outcome)
            if v.reason.startswith("its answer was refused"):
                watch.reached("missed: its answer was refused")
