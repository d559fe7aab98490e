"""What arrives at a simulated syncer, as events for the product's machine."""

from typing import TYPE_CHECKING, Any

from diloco_shared.numerics import codec
from diloco_shared.numerics.digest import digest_array
from diloco_shared.protocol.messages import ContributionManifest, InitManifest, Join, Progress
from diloco_simulator.world import Item, Reader
from diloco_syncer.events import (
    ContributionSeen,
    Event,
    InitSeen,
    JoinSeen,
    Malformed,
    ProgressSeen,
)
from diloco_syncer.norms import inspect
from diloco_syncer.round import Phase

if TYPE_CHECKING:
    from diloco_simulator.syncer_life import SyncerLife

NAME = "syncer"


class Inbox:
    """Of one process that leads."""

    def __init__(self, life: "SyncerLife") -> None:
        self.life = life
        self.hub, self.watch = life.hub, life.watch
        self.payloads: dict[str, bytes] = {}
        self.seen: set[int] = set()  # ids of bad messages, some of which come twice
        self.inits: dict[tuple[str, int], dict[int, InitManifest]] = {}
        self.up_seq = 0  # newest on UP whose manifest was read

    def open(self, after_seq: int) -> None:
        """From now on this process hears what is sent to it, and reads UP."""
        self.up_seq = after_seq
        process, alive = self.life.process, lambda: self.life.alive
        self.hub.listen(process, alive, self._receive)
        Reader(self.hub.up, process, alive, self._arrived, after_seq=after_seq, found=self._found)

    def _receive(self, message: Any) -> None:
        event: Event
        match message:
            case Progress():
                event = ProgressSeen(message)
            case Join():
                event = JoinSeen(message)
            case _:
                event = Malformed("wire", "somebody", "cannot be decoded")
        self.life.enter(lambda: self._take(message, event))

    def _found(self, item: Item) -> None:
        if item.seq <= self.up_seq:
            self.life.up_rewound(item.seq - 1)
        self.up_seq = item.seq

    def _arrived(self, item: Item) -> None:
        if isinstance(item.message, InitManifest):
            self.life.enter(lambda: self._initial(item.message))
        else:
            self.life.enter(lambda: self._contribution(item.message, item.payload))

    def _initial(self, m: InitManifest) -> None:
        parts = self.inits.setdefault((m.learner, m.incarnation), {})
        parts[m.fragment] = m
        history = self.life.machine.history
        if history.initialised or not all(p in parts for p in history.owned):
            return
        digests, names = [""] * history.fragments, [""] * history.fragments
        for p in history.owned:
            item = self.hub.up.by_subject.get(parts[p].blob.subject)
            if item is None:
                return  # purged while this process stood still: another leads by now
            self.payloads[item.subject] = item.payload
            values_F = codec.decode("fp32", item.payload, codec.count("fp32", item.payload))
            digests[p], names[p] = digest_array(values_F), item.subject
        whose = (m.learner, m.incarnation, m.config_hash, m.layout)
        self.life.give(InitSeen(*whose, tuple(names), tuple(digests), True))

    def _wanted(self, m: ContributionManifest) -> bool:
        return any(
            r.n == m.round
            and r.phase is Phase.PULLING
            and m.learner in r.participants
            and not r.answer(m.learner)
            for r in self.life.machine.rounds.open
        )

    def _contribution(self, m: ContributionManifest, payload: bytes) -> None:
        history = self.life.machine.history
        if m.fragment < history.fragments and m.fragment not in history.owned:
            return  # another shard's
        if not self._wanted(m):
            self._take(m, ContributionSeen(m, finite=True, norm=0.0))
            return
        try:
            found = inspect(payload, m.codec, m.values)
            finite, norm = found.finite, found.norm
        except ValueError:
            finite, norm = True, 0.0  # sizes that do not fit: the gate sees them too
        self.payloads[m.blob.subject] = payload
        self._take(m, ContributionSeen(m, finite, norm))

    def _take(self, message: object, event: Event) -> None:
        """Give what a message brought; if it is a bad one, look what that changes (I11)."""
        refusals, machine = self.watch.refusals, self.life.machine
        if not refusals.is_bad(message) or not machine.leading:
            self.life.give(event)
            return
        before, counted = machine.history.meta(), self._refused()
        again = id(message) in self.seen
        self.seen.add(id(message))
        self.life.give(event)
        after = machine.history.meta()
        grown = self._refused() - counted
        refusals.handled(self.watch.describe(message), before, after, 1 if again else grown)

    def _refused(self) -> int:
        """Refusals counted so far: at the door, on the tape, and in the rounds in flight."""
        machine = self.life.machine
        rounds = machine.rounds.open
        verdicts = [v for r in rounds for v in r.verdicts.values() if v.outcome == "refused"]
        return len(verdicts) + (machine.history.refused + machine.refused).total()
