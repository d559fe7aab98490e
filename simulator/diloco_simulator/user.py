"""What the user asks of a simulated run: pauses, another quorum, a stop, checkpoints, restores."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diloco_shared.edges.checkpoints import Checkpoints
from diloco_shared.protocol.records import Restore
from diloco_simulator.checkers import Report
from diloco_simulator.hub import Hub
from diloco_simulator.orders import Orders
from diloco_simulator.syncer_node import SyncerNode
from diloco_syncer.events import Wanted
from diloco_syncer.machine import Machine

# Before something is asked for again that could not be asked for yet, in virtual seconds.
AGAIN_S = 2.0
# What a wish asks for, by its field.
ORDERS = {
    "paused": "pause",
    "quorum": "quorum",
    "stopping": "stop",
    "checkpoint": "checkpoint",
    "restore": "restore",
}


class User:
    """One record, which every syncer reads; as the coordinator writes it."""

    def __init__(
        self, hub: Hub, syncers: Sequence[SyncerNode], quorum: int, report: Report
    ) -> None:
        self.hub = hub
        self.world = hub.world
        self.syncers = syncers
        self.wanted = Wanted(paused=False, stopping=False, quorum=quorum)
        self.orders = Orders(self.world, syncers, report)

    def wish(self) -> None:
        """Pause or go on, and another quorum."""
        rng = self.world.rng
        quorum = rng.randint(1, self.world.options.learners)
        self.world.counts["wishes"] += 1
        self._tell(paused=rng.random() < 0.5, quorum=quorum)

    def stop(self) -> None:
        """For good."""
        self.world.counts["stops asked for"] += 1
        self._tell(paused=False, stopping=True, quorum=self.world.options.quorum)

    def calm(self) -> None:
        """Go on as in the beginning, if it was not stopped."""
        self._tell(paused=False, quorum=self.world.options.quorum)

    def checkpoint(self) -> None:
        """Ask for one, unless one is being made."""
        machine = self._leader
        if machine is None or not machine.history.initialised:
            self._again(self.checkpoint)
            return
        newest = machine.history.checkpoint
        state, _ = machine.wishes.checkpoints.state()
        if state != "making" and self.wanted.checkpoint <= newest:
            self._tell(checkpoint=newest + 1)

    def restore(self) -> None:
        """Ask for the run to go back to a complete one, as soon as there is any."""
        refs = Checkpoints(self.hub.vault).complete(self.hub.spec.folder)
        machine = self._leader
        if not refs or machine is None:
            self._again(self.restore)
            return
        before = self.wanted.restore.serial if self.wanted.restore else 0
        known = max(machine.history.restores, machine.wishes.restoring.given_up)
        serial = max(before, known) + 1
        self._tell(restore=Restore(serial=serial, source=self.world.rng.choice(refs)))

    @property
    def _leader(self) -> Machine | None:
        """Of the first shard, whose status the coordinator shows."""
        for node in self.syncers:
            life = node.life
            if node.shard.number == 0 and life is not None and life.machine.leading:
                return life.machine
        return None

    def _again(self, ask: Any) -> None:
        if self.world.faulty:
            self.world.after(AGAIN_S, ask)

    def _tell(self, **changes: Any) -> None:
        before, self.wanted = self.wanted, replace(self.wanted, **changes)
        for field, kind in ORDERS.items():
            if getattr(before, field) != getattr(self.wanted, field):
                self._order(field, kind)
        for syncer in self.syncers:
            syncer.wish(self.wanted)

    def _order(self, field: str, kind: str) -> None:
        wanted = getattr(self.wanted, field)
        text = f"{field} = {wanted.serial if isinstance(wanted, Restore) else wanted}"
        self.orders.given(kind, text, lambda life: _is(life.machine, kind, wanted))


def _is(machine: Machine, kind: str, wanted: Any) -> bool:
    """Whether a leader shows what was asked for, or has given it up."""
    h = machine.history
    match kind:
        case "pause":
            return bool(h.paused == wanted)
        case "quorum":
            return bool(h.quorum == wanted)
        case "checkpoint":
            state, _ = machine.wishes.checkpoints.state()
            return h.checkpoint >= wanted and state != "making"
        case "restore":
            return bool(max(h.restores, machine.wishes.restoring.given_up) >= wanted.serial)
        case _:
            return bool(h.outcome)
