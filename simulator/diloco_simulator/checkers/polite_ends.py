"""Processes that are told to stop: each ends in its time, and what it has is not lost with it.

A learner has saved its moments, and its next life has them. A syncer has given its lease back, so
that a standby leads soon. A coordinator has answered what it was asked. None of them is a member.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco_coordinator.app import Coordinator
from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_learner.recovery.recovery import Recovery, Stage
from diloco_learner.work_io import RELEASE_S, Work
from diloco_shared.bus.stored_records import readable
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.process.membership import Registration
from diloco_shared.process.serving import Worker
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Message
from diloco_shared.protocol.records import LeaderLease, MemberRecord
from diloco_simulator.checkers.promises import Report
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.virtual_loop import Hosted

if TYPE_CHECKING:
    from diloco_simulator.inside.learners import Trained
    from diloco_simulator.worlds.processes import Host

# Until its last step is over, a write is in a thread, and those before it are: in virtual seconds.
WRITES_S = 0.5
# Over a link that takes no longer one way, the hub answers thrice within two seconds: so long a
# request still gets, and a lease is tried to be given back.
NEAR_S = 0.1


@dataclass(frozen=True, slots=True)
class Told:
    """A process was told to stop, at a virtual second, by a supervisor that kills it `limit_s`
    later. `well`: nothing goes wrong meanwhile."""

    machine: "Host"
    process: Hosted
    at: float
    limit_s: float
    well: bool

    @property
    def stood_still(self) -> bool:
        """Since then, or for a moment of that time."""
        process = self.process  # the dead stand still for ever
        return (process.frozen and not process.killed) or process.thawed_at > self.at


@dataclass(frozen=True, slots=True)
class Saved:
    """What a learner's disk must have of a run: a checkpoint's number, and the moments in it; None
    where several hosts hold them."""

    sequence: int
    moments: bytes | None


class PoliteEnds:
    """Of one world. `slow_s`: a checkpoint that is under way then, or begun later, takes up to so
    long; None: it may fail. `near`: the hub is, when nothing goes wrong."""

    def __init__(
        self,
        report: Report,
        broker: MemoryBroker,
        count: Callable[[str], None],
        slow_s: Callable[["Host", float], float | None],
        near: bool,
    ) -> None:
        self.report, self.broker, self.count = report, broker, count
        self.slow_s, self.near = slow_s, near
        self.trained: dict[Hosted, Trained] = {}

    # --- what learners have --------------------------------------------------------------------

    def trains(self, process: Hosted, trained: "Trained") -> None:
        """A learner's process begins to train: with what the one before has saved, if it has."""
        self.trained[process] = trained
        work, machine = trained.work, process.machine
        saved: Saved | None = machine.kept.pop(work.spec.folder, None)
        recovery = work.reporter.recovery
        if saved is None or recovery is None:
            return
        self.report.looked("stops")
        if fault := self._forgotten(saved, trained, work, recovery):
            self.report("stops", f"{trained.life} {fault}")

    def _forgotten(self, saved: Saved, trained: "Trained", work: Work, of: Recovery) -> str:
        newest = work.checkpoints.newest
        if newest is None or newest < saved.sequence:
            return f"finds checkpoint {newest}, and the life before had saved {saved.sequence}"
        if of.source == "fresh" and Stage.BOOTSTRAPPING not in of.reached:
            return "begins with fresh moments, and the life before had saved its own"
        if of.source != "checkpoint" or trained.life in trained.watch.parts.went:
            return ""
        self.count("moments of before a stop")
        if saved.moments is None or bytes(trained.loop.trainer.inner_state()) == saved.moments:
            return ""
        return "goes on with other moments than the life before had saved"

    def _leaves(self, told: Told) -> str:
        """Why a learner's moments are not saved, and should be; ""."""
        trained = self.trained.pop(told.process, None)
        if trained is None:
            return ""
        loop, work = trained.loop, trained.work
        slow_s = self.slow_s(told.machine, told.at)
        left = loop.left
        if left is None or left.outcome != "withdrawn":
            return ""
        epoch = loop.exchange.moments_epoch  # that of the run may be newer, and not begun here
        sequence = sequence_of(epoch, work.context.incarnation, trained.steps)
        if work.checkpoints.newest == sequence:
            self.count("moments saved at a stop")
            told.machine.kept[work.spec.folder] = Saved(sequence, trained.last_moments)
            return ""
        until = told.at + work.stop_s - RELEASE_S
        # One that was under way comes first.
        late = slow_s is None or trained.state.left_at + 2 * slow_s + WRITES_S > until
        if late or told.stood_still or not loop.exchange.counters.step:
            return ""
        return f"leaves with checkpoint {work.checkpoints.newest}, and not with {sequence}"

    # --- ends ----------------------------------------------------------------------------------

    def ended(self, told: Told, fault: str) -> None:
        """It has ended by itself; `fault`: of what."""
        self.report.looked("stops")
        who, app = f"{told.process.name} was told to stop", told.process.app
        if fault:
            self.report("stops", f"{who}, and ends by itself: {fault}")
        if why := self._leaves(told):
            self.report("stops", f"{who}, and {why}")
        if told.well:
            for left in self._left(told, app):
                self.report("stops", f"{who}, and {left}")

    def late(self, told: Told) -> None:
        """It lives when it is to be killed."""
        self.report.looked("stops")
        if not told.stood_still:
            self.report(
                "stops", f"{told.process.name} was told to stop {told.limit_s:g} s ago, and lives"
            )

    def _left(self, told: Told, app: Any) -> list[str]:
        """What the hub still has of it."""
        member = _registration(app)
        boot, found = member.record.boot, list[str]()
        there = self._record(subjects.MEMBERS, member.key, MemberRecord)
        if self.near and there is not None and there.boot == boot:
            found.append("is a member for as long as its key lives")
        for key in self._keys(subjects.LEASES) if self.near else ():
            lease = self._record(subjects.LEASES, key, LeaderLease)
            if lease is not None and lease.holder and lease.boot == boot:
                found.append(f"has the lease {key} for as long as that lives")
        return found

    def _keys(self, bucket: str) -> list[str]:
        prefix = f"{subjects.KEYS}.{bucket}."
        stored = self.broker.select(bucket_stream(bucket), f"{prefix}>", 1)
        return sorted({message.subject.removeprefix(prefix) for message in stored})

    def _record(self, bucket: str, key: str, kind: type[Any]) -> Any:
        newest = self.broker.last(bucket_stream(bucket), f"{subjects.KEYS}.{bucket}.{key}")
        record: Message | None = None
        if newest is not None and newest.payload:
            record = readable(newest.payload, kind)
        return record


def _registration(app: Any) -> Registration:
    if isinstance(app, Worker):
        return app.membership
    coordinator: Coordinator = app.coordinator
    return coordinator.membership
