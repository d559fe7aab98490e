"""Shows the checkers what passes the hub of a whole world: tape, uploads and publications.

Only what the product itself wrote is looked at, by its subjects, at the moment at which the hub
takes it. What processes decide and hold is shown by `leaders`, `learners`, `leases` and `states`.
"""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from diloco_coordinator.runs.membership import MemberNote
from diloco_shared.bus.port import Stored
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import HEADER_INDEX
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    InitManifest,
    PublicationManifest,
    TapeRecord,
)
from diloco_shared.protocol.records import Assignment, Event, RunRecord, RunStatus, ShardLease
from diloco_shared.protocol.wire import WireError, decode, decode_tape
from diloco_shared.spec.run import RunSpec
from diloco_simulator.checkers.islands import IslandWatch
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.coverage.reached import Reached
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.troubles.lies import STRANGER
from diloco_simulator.virtual_loop import VirtualLoop
from diloco_simulator.worlds.options import Options


@dataclass(slots=True)
class Scene:
    """What checkers ask of a world."""

    loop: VirtualLoop
    options: Options
    counts: Counter[str] = field(default_factory=Counter)
    faulty: bool = True

    @property
    def now(self) -> float:
        return self.loop.now


class Observer:
    """Of one run. `watch.violations` is what it found."""

    def __init__(
        self, scene: Scene, spec: RunSpec, broker: MemoryBroker, *, numbers: bool = True
    ) -> None:
        """`numbers`: every merge is computed again; keeps all that was ever uploaded."""
        self.scene = scene
        self.spec = spec
        self.broker = broker
        self.watch = RunWatch(scene, spec, numbers=numbers)
        self.islands: IslandWatch | None = None  # of several hosts, where a world has some
        self.tapes = {subjects.tape(spec.name, n): n for n in range(spec.algorithm.shards)}
        self.refused = subjects.event(spec.name, "refused")
        self.flood = subjects.event(spec.name, "flood")
        self.runs = f"KV_{subjects.RUNS}"
        self.statuses = f"KV_{subjects.STATUS}"
        self.shards = f"KV_{subjects.SHARDS}"
        self.assignments = f"KV_{subjects.ASSIGNMENTS}"
        self.notes = f"KV_{subjects.NOTES}"
        self.draining: set[str] = set()  # members, as the coordinator has noted them
        # Of every shard's tape, with the sequences on its stream.
        self.records: list[list[tuple[int, TapeRecord]]] = [[] for _ in self.tapes]
        # What the hub has of a user's wishes by kind, and since when.
        self.wishes: dict[str, tuple[Any, float]] = {}
        self.checkpoint = 0  # the newest that anybody has asked for, as the hub has it
        self.deleting = False  # the run, or it is gone
        self.made_again = False  # its tape, after it was gone
        self.reached = Reached(spec, broker, scene.counts)
        # By the subject of their chunks, which the hub lost before it took them and takes again.
        self.torn: dict[str, tuple[str, Stored]] = {}

    def stored(self, stream: str, message: Stored) -> None:
        """The hub has taken a message."""
        if message.subject in self.tapes:
            self._recorded(self.tapes[message.subject], message)
        elif message.subject == self.refused:
            self.scene.counts["refused: told"] += 1
        elif stream == self.runs and message.subject.endswith(f".{self.spec.name}"):
            self._wanted(message)
        elif stream == self.statuses:
            self._shown(message)
        elif stream == self.shards:
            self._leased(message)
        elif stream == self.assignments:
            self._assigned(message)
        elif stream == self.notes:
            self._noted(message)
        elif message.subject == self.flood:
            self._taken_back(message)
        elif not message.subject.endswith(".m"):
            self.reached.stored(stream, message)
            if message.subject in self.torn:
                self._sealed(*self.torn.pop(message.subject))
        else:
            self._sealed(stream, message)

    def _taken_back(self, message: Stored) -> None:
        """Nobody here fills UP: whatever honest learners have there was asked for. What is on STATE
        an earlier leader may have asked for, of whom the present one knows nothing."""
        told = decode(message.payload, Event).data
        if told["stream"] == "UP" and told["learner"] != STRANGER:
            self.watch.broken("I12", f"what {told['learner']} was asked for is taken for a flood")

    def _noted(self, message: Stored) -> None:
        """What the coordinator remembers of a member; nothing once it is forgotten."""
        member = message.subject.rpartition(".")[2]
        if message.payload and MemberNote.model_validate_json(message.payload).draining:
            self.draining.add(member)
        else:
            self.draining.discard(member)

    def _assigned(self, message: Stored) -> None:
        """A member to this run, or to none: since the run is over, unless it drains."""
        if not message.payload:
            return
        told, over = decode(message.payload, Assignment), any(of.ended for of in self.watch.of)
        if told.run == self.spec.name:
            if not over and told.member in self.watch.taken_back:
                self.watch.taken_back[told.member] = True
        elif not over or told.member in self.draining:
            self.watch.taken_back[told.member] = False

    def _leased(self, message: Stored) -> None:
        """A data shard is, or it is free; or the run is deleted."""
        if self._ours(message):
            self.watch.data.leased(decode(message.payload, ShardLease), self.scene.now)

    def _ours(self, message: Stored) -> bool:
        """Whether it is the lease of a data shard of this run."""
        return bool(message.payload) and f".{self.spec.name}." in message.subject

    def _wanted(self, message: Stored) -> None:
        """The run's record, or that there is none any more."""
        record = decode(message.payload, RunRecord) if message.payload else None
        self.deleting = record is None or record.phase == "deleting"
        self.checkpoint = 0 if record is None else record.checkpoint
        if record is not None:
            for kind, wish in (("desired", record.desired), ("quorum", record.quorum)):
                if self.wishes.get(kind, (None, 0.0))[0] != wish:
                    self.wishes[kind] = wish, self.scene.now
        if record is not None and record.desired == "stopped":
            self.watch.stops.wished(self.scene.now, faulty=self.scene.faulty)
        for shard in self.watch.of:
            shard.leases.deleting = self.deleting

    def _shown(self, message: Stored) -> None:
        """How some run stands; of this one it matters once it has gone back, or is to stop."""
        stops, back = self.watch.stops, any(of.source for of in self.watch.of)
        if not message.payload or (stops.wished_at == math.inf and not back):
            return
        status = decode(message.payload, RunStatus)
        if status.run != self.spec.name:
            return
        self.watch.of[status.shard].shown(status)
        if stops.wished_at == math.inf:
            return
        if status.forced:
            stops.forced(status.shard, self.watch.of[status.shard].ended)
        else:
            stops.shown(status, self.scene.now)

    def _sealed(self, stream: str, message: Stored) -> None:
        """A manifest whose chunks are there, or may be."""
        if stream == subjects.up_stream(self.spec.name):
            self._uploaded(stream, message)
        elif stream == subjects.dn_stream(self.spec.name):
            self._published(stream, message)

    def _recorded(self, shard: int, message: Stored) -> None:
        if self.deleting and message.seq == 1:
            # By a syncer that had not heard of it yet. Nobody reads this tape, and it is removed.
            self.scene.counts["tapes made again behind their run's deletion"] += 1
            self.made_again = True
        if self.made_again:
            return
        record = decode_tape(message.payload)
        self.records[shard].append((message.seq, record))
        self.watch.record(shard, message.seq, record)
        self.reached.record(shard, record)

    def put_back(self) -> None:
        """The hub was, from a backup: what was wished for since may be lost."""
        self.checkpoint = 0
        self.watch.stops.forget()
        for of in self.watch.of:
            of.members.put_back()
        there = self.broker.select(self.shards, ">", 1) if self.broker.exists(self.shards) else ()
        leases = [decode(m.payload, ShardLease) for m in there if self._ours(m)]
        self.watch.data.put_back(leases, self.scene.now)

    def lost(self) -> None:
        """The hub lost the newest records: what is not there any more never was."""
        end = self.broker.info(subjects.tape_stream(self.spec.name)).last_seq
        for shard, records in enumerate(self.records):
            kept = [record for seq, record in records if seq <= end]
            gone = [record for seq, record in records if seq > end]
            if gone:
                self.records[shard] = records[: len(kept)]
                self.watch.lost(shard, kept, gone)

    def _uploaded(self, stream: str, message: Stored) -> None:
        m: ContributionManifest | InitManifest
        try:
            m = decode(message.payload, ContributionManifest)
        except WireError:
            try:
                m = decode(message.payload, InitManifest)
            except WireError:
                return  # bad input: nobody may take it
        if self.islands is not None and self.scene.options.carriers:
            self.islands.named(m.learner, m.blob)
        if (payload := self._payload(stream, m.blob, message)) is not None:
            self.watch.stored(m.blob, payload)
            if self.islands is not None and isinstance(m, ContributionManifest):
                lies = self.scene.options.garbage > 0 or self.scene.options.nan > 0
                self.islands.stored(m.learner, m.fragment, m.round, payload, lies=lies)

    def _published(self, stream: str, message: Stored) -> None:
        m = decode(message.payload, PublicationManifest)
        if (payload := self._payload(stream, m.blob, message)) is not None:
            self.reached.published(m)
            self.watch.published(f"term {m.term}", m, payload)

    def _payload(self, stream: str, blob: Blob, manifest: Stored) -> bytes | None:
        """Of several chunks the newest of each, in order; they lie there before their manifest.

        None: the hub has lost some of them since it acknowledged them.
        """
        chunks = {
            int(stored.headers[HEADER_INDEX]): stored.payload
            for stored in self.broker.select(stream, blob.subject, 1)
        }
        if len(chunks) < blob.chunks:
            self.scene.counts["manifests without their chunks"] += 1
            self.torn[blob.subject] = stream, manifest
            return None
        return b"".join(chunks[index] for index in sorted(chunks))
