"""I11 from within: what is bad changes nothing that lasts, and a leader that meets it counts it.

A hub shows only what is merged, and some of what is told. So the leader's own machine is looked at
before and after each event that this world knows to be bad.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco_shared.protocol.wire import encode
from diloco_simulator.troubles.lies import STRANGER, Lies
from diloco_syncer.events import ContributionSeen, Effect, Event, Malformed, ProgressSeen
from diloco_syncer.machine import Machine


class Counted:
    """Of one world's first run."""

    def __init__(self, lies: Lies) -> None:
        self.lies, self.observer, self.refusals = lies, lies.observer, lies.refusals
        # By the machine that met it: what comes again is not counted again.
        self.met: set[tuple[int, bytes]] = set()
        self.machines: list[Machine] = []  # held, so that no other has their ids

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block every leader's machine is looked at."""
        handle = Machine.handle

        def looked_at(machine: Machine, event: Event, now: float) -> list[Effect]:
            what = self._bad(machine, event)
            if not what:
                return handle(machine, event, now)
            before, counted = machine.history.meta(), _refused(machine)
            effects = handle(machine, event, now)
            grown = 1 if self._again(machine, event) else _refused(machine) - counted
            self.refusals.handled(what, before, machine.history.meta(), grown)
            self.observer.reached.saw("bad input counted")
            return effects

        Machine.handle = looked_at  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Machine.handle = handle  # type: ignore[method-assign]

    def _bad(self, machine: Machine, event: Event) -> str:
        """What is bad about it; "" for what is good, or not known to be bad."""
        if not machine.leading or machine.history.spec.name != self.observer.spec.name:
            return ""
        match event:
            case Malformed():
                return f"{event.kind} of {event.source}"
            # Word for word: what is true may come in the place of a lie.
            case ContributionSeen() if encode(event.manifest) in self.lies.bad:
                return f"a bad contribution on {event.manifest.blob.subject}"
            case ProgressSeen() if event.progress.learner == STRANGER:
                return "progress of a stranger"
            case _:
                return ""

    def _again(self, machine: Machine, event: Event) -> bool:
        """Whether this machine met the same contribution before."""
        if not isinstance(event, ContributionSeen):
            return False
        key = id(machine), encode(event.manifest)
        if key in self.met:
            return True
        self.met.add(key)
        self.machines.append(machine)
        return False


def _refused(machine: Machine) -> int:
    """Refusals counted so far: at the door, on the tape, and in the rounds in flight."""
    rounds = machine.rounds.open
    verdicts = [v for r in rounds for v in r.verdicts.values() if v.outcome == "refused"]
    return len(verdicts) + (machine.history.refused + machine.refused).total()
