"""Faults that a process inflicts on itself, on request (ARCHITECTURE.md, Messages).

Off unless the deployment turns it on. A fault's truth is written to the events before it is
carried out, so that detection and recovery can be scored against it.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, Delivery
from diloco_shared.bus.stored_records import event_now, tell
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Fault, FaultReply
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

# Faults waiting at once: more would be a mistake of the caller.
ARMED_MAX = 64
# Faults that a process remembers to have accepted: whoever asks once more does so within seconds.
REMEMBERED_MAX = 64
# The longest hang or slowness, in seconds: a forgotten fault must not outlive a test day.
DURATION_S_MAX = 3600.0
# An immediate fault waits so long, in seconds: its own process may have to pass the answer on.
ANSWER_S = 0.25

# Stops its parent, wakes it after a while, and ends at once when the parent is gone. That one
# process does both leaves no order of events in which the parent stays stopped.
_HANG = """
import os, signal, sys, time
parent, until = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
if os.getppid() == parent:
    os.kill(parent, signal.SIGSTOP)
while os.getppid() == parent and time.monotonic() < until:
    time.sleep(min(0.1, max(0.0, until - time.monotonic())))
if os.getppid() == parent:
    os.kill(parent, signal.SIGCONT)
"""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What this process can inflict beyond kill and hang. None: it cannot."""

    slow: Callable[[float], None] | None = None  # factor; 1 heals
    nan: Callable[[], None] | None = None  # poison the gradients of one step
    kill: Callable[[], None] | None = None  # instead of killing this very process
    hang: Callable[[float], None] | None = None
    hung: Callable[[bool], None] | None = None  # told before a hang (True) and after it


class FaultAgent:
    """Answers faults addressed to `target`, arms them, and carries them out."""

    def __init__(
        self,
        bus: Bus,
        target: str,
        *,
        enabled: bool,
        abilities: Abilities | None = None,
        role: str = "",
    ) -> None:
        self.bus = bus
        self.target = target
        self.role = role
        self.enabled = enabled
        self.abilities = abilities or Abilities()
        self.run = ""  # the run it works for: part of the event's subject
        self.step = -1
        self.answer_s = ANSWER_S
        self.armed: list[Fault] = []
        self.accepted: dict[str, str] = {}  # by id: when each comes, of the newest
        self.slowing: list[Fault] = []  # those that last, the newest last
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Until cancelled."""
        async with self.bus.serve(subjects.chaos(self.target), self._answer):
            await asyncio.Event().wait()

    def works_for(self, run: str) -> None:
        """Another run begins, or none: its steps are counted anew, and what was to come at a step
        of the one before never comes. What was to come at a time is judged then."""
        dropped, self.armed = self.armed, []
        for fault in dropped:
            log.warning("fault dropped: its step was not reached", id=fault.id, step=fault.at_step)
        self.slowing = []  # whatever works for the next run is as fast as it can be
        self.run, self.step = run, -1

    async def _answer(self, delivery: Delivery) -> bytes:
        try:
            fault = decode(delivery.payload, Fault)
        except WireError as error:
            return encode(FaultReply(id="unknown", accepted=False, reason=str(error)))
        if (known := self.accepted.get(fault.id)) is not None:
            # The first answer was lost, or the request came twice: it is one fault.
            return encode(FaultReply(id=fault.id, accepted=True, reason=known))
        reason = self._refuses(fault)
        when = self._when(fault)
        if not reason:
            self._remember(fault.id, when)
            self._arm(fault)
        log.warning("fault", id=fault.id, kind=fault.kind, refused=reason or "no")
        return encode(FaultReply(id=fault.id, accepted=not reason, reason=reason or when))

    def _remember(self, fault_id: str, when: str) -> None:
        self.accepted[fault_id] = when
        if len(self.accepted) > REMEMBERED_MAX:
            del self.accepted[next(iter(self.accepted))]

    def _refuses(self, fault: Fault) -> str:
        if not self.enabled:
            return f"{self.target} allows no faults: start it with DILOCO_CHAOS=1, or 'up --chaos'"
        if fault.kind == "slow" and self.abilities.slow is None:
            return f"{self.target} has no training loop to slow down"
        if fault.kind == "nan" and self.abilities.nan is None:
            return f"{self.target} has no gradients to poison"
        if fault.kind in ("hang", "slow") and not 0 < fault.duration_s <= DURATION_S_MAX:
            return f"{fault.kind} needs a duration of 0 to {DURATION_S_MAX:.0f} seconds"
        if fault.kind == "slow" and not 1 <= fault.factor <= 1000:
            return "slow needs a factor of 1 to 1000"
        if fault.run and self.run and self.run != fault.run:
            return f"{self.target} still works for run {self.run}: try again in a few seconds"
        if fault.at_step >= 0 and self.step < 0:
            return self._takes_no_steps()
        if len(self.armed) + len(self.tasks) >= ARMED_MAX:
            return f"{ARMED_MAX} faults are waiting already"
        return ""

    def _takes_no_steps(self) -> str:
        if self.role != "learner":
            return f"{self.target} takes no inner steps: give a time instead of a step"
        if not self.run:
            return f"{self.target} trains for no run: submit one, or give a time instead of a step"
        return (
            f"{self.target} has taken no step of run {self.run} yet: try again once it trains, or "
            "give a time instead of a step"
        )

    def _when(self, fault: Fault) -> str:
        if 0 <= fault.at_step <= self.step:
            return f"at once: step {fault.at_step} is past (now {self.step})"
        if fault.at_step >= 0:
            return f"at step {fault.at_step} (now {self.step})"
        return f"in {fault.after_s:g} s"

    def _arm(self, fault: Fault) -> None:
        if fault.at_step >= 0:
            self.armed.append(fault)
            self.stepped(self.step)
        else:
            self._start(fault)

    def stepped(self, step: int) -> None:
        """The process has taken inner step `step`: faults armed for it come due."""
        self.step = step
        due = [f for f in self.armed if f.at_step <= step]
        self.armed = [f for f in self.armed if f.at_step > step]
        for fault in due:
            self._start(fault)

    def _start(self, fault: Fault) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(fault))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _is_anothers(self, fault: Fault, worked_for: str) -> bool:
        """Whether a fault that has come due would hit another run than its own. `worked_for`: what
        the process worked for when it took the fault. Whoever is given a run hears of it late: one
        that had no run then, and has none yet, is meant nevertheless."""
        late = not self.run and not worked_for
        return bool(fault.run) and self.run != fault.run and not late

    async def _carry_out(self, fault: Fault) -> None:
        worked_for = self.run
        if fault.at_step < 0:
            await asyncio.sleep(max(fault.after_s, self.answer_s))
        if self._is_anothers(fault, worked_for):
            log.warning("fault dropped: its run was left", id=fault.id, run=fault.run, now=self.run)
            return
        await self._tell("fault-applied", fault)
        match fault.kind:
            case "kill":
                (self.abilities.kill or _kill_self)()
            case "hang":
                hung = self.abilities.hung or (lambda _: None)
                hung(True)
                try:
                    await self._hang(fault.duration_s)
                finally:
                    hung(False)
                await self._tell("fault-healed", fault)
            case "slow":
                await self._slow(fault)
                await self._tell("fault-healed", fault)
            case "nan":
                assert self.abilities.nan is not None
                self.abilities.nan()

    async def _slow(self, fault: Fault) -> None:
        """Of several at once the newest counts; once it is over, the one before it."""
        assert self.abilities.slow is not None
        self.slowing.append(fault)
        self.abilities.slow(fault.factor)
        await asyncio.sleep(fault.duration_s)
        if fault not in self.slowing:
            return  # it was over with the run that it came in
        self.slowing.remove(fault)
        self.abilities.slow(self.slowing[-1].factor if self.slowing else 1.0)

    async def _hang(self, duration_s: float) -> None:
        """Stop every thread of this process; returns once it runs again."""
        if self.abilities.hang is not None:
            self.abilities.hang(duration_s)
            await asyncio.sleep(duration_s)
            return
        # Not the event loop's own way: uvloop's forks, which a process with jax in it must not.
        await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-I", "-S", "-c", _HANG, str(os.getpid()), str(duration_s)],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    async def _tell(self, kind: str, fault: Fault) -> None:
        """Write the truth down; a fault whose record cannot be written is carried out anyway."""
        data = {**fault.model_dump(), "step": self.step, "at": ambient.wall()}
        run = self.run or fault.run or "cluster"
        what = healed(fault) if kind == "fault-healed" else applied(fault)
        event = event_now(run, kind, self.target, f"{self.target} {what} ({fault.id})", data)
        await tell(self.bus, event, role=self.role, timeout_s=2.0)


# --------------------------------------------------------------------------------------------------
# Faults in words: ends of sentences that begin with the target's name.


def planned(fault: Fault) -> str:
    """What a fault will do."""
    lasts = f"for {fault.duration_s:g} s"
    match fault.kind:
        case "kill":
            return "is to be killed"
        case "hang":
            return f"is to stand still {lasts}"
        case "slow":
            return f"is to take {fault.factor:g} times as long for each step, {lasts}"
        case "nan":
            return "is to compute gradients of one step that are no numbers"


def applied(fault: Fault) -> str:
    """What a fault does."""
    lasts = f"for {fault.duration_s:g} s"
    match fault.kind:
        case "kill":
            return "was killed on request"
        case "hang":
            return f"stands still {lasts}, on request"
        case "slow":
            return f"takes {fault.factor:g} times as long for each step {lasts}, on request"
        case "nan":
            return "computes gradients of one step that are no numbers, on request"


def healed(fault: Fault) -> str:
    """That a fault is over."""
    return "goes on" if fault.kind == "hang" else "is as fast as before"


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
