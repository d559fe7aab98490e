"""The learner process: registers, waits for a run, works for it, waits for the next."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_learner.context import RunContext
from diloco_learner.data.cache import CorpusCache
from diloco_learner.events import Leave
from diloco_learner.hosts.computing_io import OnHosts, OnOneHost
from diloco_learner.hosts.leading_io import Hosts
from diloco_learner.hosts.receiving_io import fetched_by_all
from diloco_learner.recovery.incarnation_io import newest_boot
from diloco_learner.settings import Settings
from diloco_learner.training.computing_io import Computing, OnThisMachine, soon
from diloco_learner.work_io import CHECKPOINTS, RUN_OVER, Unfit, Work
from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError
from diloco_shared.bus.run_streams import exists
from diloco_shared.bus.status_key import shown
from diloco_shared.bus.stored_records import event_now, tell
from diloco_shared.process import serving
from diloco_shared.process.chaos import Abilities
from diloco_shared.process.disk_room import DiskRoom
from diloco_shared.process.health import speed_metrics
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.serving import Worker
from diloco_shared.protocol.pace import LAST_EVALUATION
from diloco_shared.protocol.run_states import over
from diloco_shared.reach.checkpoint_roots import root_of_run
from diloco_shared.reach.local import OutOfReach, Reach
from diloco_shared.spec.mesh import MeshSizes, mesh_of
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

# Between two attempts at a run that this process is unfit for, in seconds: whoever mends a file
# looks on until it is noticed. An attempt that takes long, as reading all of a checkpoint does, is
# followed by as long a pause, since others want this machine's disk too; but by no longer one than
# the second figure.
UNFIT_RETRY_S, UNFIT_RETRY_S_MAX = 5.0, 30.0
# A work that does not train yet gets so many seconds to leave by itself, before it is cancelled.
LEAVES_S = 3.0
# A process that ends has so many seconds to tell the other hosts of its island that, and the hub
# that it has lost one of them. After six of those that has an end: see `whole.LAST_WORDS_S`.
OVER_S, LAST_WORD_S = 2.0, 2.0
# Between two looks at whether a run is over that this process is no longer assigned to, in seconds.
DISMISS_S = 1.0


# What is still built or compiled for a run that was left, or written where a disk hangs, is waited
# for this long before the next life begins. What is built mostly ends much sooner, where it looks
# whether anybody wants it.
ALONE_S = 60.0
# What the member's record says meanwhile.
WAITS = "waits until what was still at work for the run before has let go of the devices"
# Why a process whose id another one has taken does not work.
TAKEN = "another process has this id: stop one of the two"


class Learner(Worker[Settings]):
    """Works for one run at a time."""

    role, kept, unfit = "learner", CHECKPOINTS, "unfit"
    # Its loop is watched half as often as others: its steps would miss 0.3 % of their processor.
    shortest_hold_s = 0.1

    def __init__(
        self,
        settings: Settings,
        control: Bus,
        data: Bus,
        folder: DataFolder,
        computing: Computing | None = None,
    ) -> None:
        super().__init__(settings, control, data, folder)
        self.computing = computing or OnThisMachine(*_of_this_machine(settings))
        if isinstance(self.computing, OnThisMachine) and self.computing.cache is not None:
            self.computing.cache = replace(self.computing.cache, tell=self._prepares)
        if isinstance(self.computing, OnHosts):
            self.computing.tell = self.tell
            fetched_by_all(data, self.computing.hosts.carriers)
        self.work: Work | None = None
        self.assigned = ("", "")  # the run that it was told last, and its id
        self.dismissed: asyncio.Task[None] | None = None  # the work that was told to end last
        self.reads_for = ("", "")  # a run, and its id, of which it reads what it began from
        self.unfit_for = ""  # why it could not work for its run, as an event told last
        self.trained = False  # in its last attempt
        self.ends = False  # with this process
        self.here: asyncio.AbstractEventLoop | None = None  # in which it works
        self.left: set[asyncio.Future[Any]] = set()  # threads of the life before, see `Work.over`

    def abilities(self) -> Abilities:
        return Abilities(slow=self._slow, nan=self._nan, hung=self._hung)

    def _slow(self, factor: float) -> None:
        if self.work is not None:
            self.work.injected.slow_factor = factor

    def _nan(self) -> None:
        if self.work is not None:
            self.work.injected.poison = True

    def _hung(self, now: bool) -> None:
        """Time in which a fault stopped this process is no time of a step."""
        if self.work is not None and self.work.train_loop is not None:
            self.work.train_loop.speed.untimed = now

    def _prepares(self, text: str) -> None:
        """How far a corpus is that takes long; in the thread that builds."""
        log.info(text)
        if self.here is not None:
            soon(self.here, partial(self._shows, text))

    def _shows(self, text: str) -> None:
        """Whoever asks why it does not join sees it; `fit` takes it away."""
        if self.membership.record.state == "working" and self.work and not self.work.built:
            self.membership.update(reason=text[:500])

    def room(self) -> DiskRoom | None:
        return None if self.work is None else self.work.room

    async def tell(self, kind: str, text: str) -> None:
        if self.work is not None and self.work.built:
            await self.work.up.tell(kind, text, {"place": self.settings.id})

    def detail(self) -> dict[str, Any]:
        found = {} if self.work is None else self.work.health()
        if isinstance(self.computing, OnHosts):
            found["carried"] = self.computing.hosts.carriers.shown()
        return found

    def metrics(self) -> Iterator[Metric]:
        work = self.work
        progress = work.last_progress if work is not None else None
        if work is None or progress is None:
            return
        refused = CounterMetricFamily("diloco_refused", "Refused input", labels=["run", "kind"])
        for kind, count in work.book.refused.copy().items():
            refused.add_metric([work.spec.name, kind], count)
        yield refused
        yield GaugeMetricFamily("diloco_step", "Inner steps of this life", value=progress.step)
        yield GaugeMetricFamily("diloco_step_seconds", "Mean step time", value=progress.step_s)
        yield CounterMetricFamily(
            "diloco_steps_skipped",
            "Inner steps whose loss or gradient was not a finite number",
            value=progress.steps_skipped,
        )
        yield CounterMetricFamily(
            "diloco_wait_seconds", "Time not spent on computation", value=progress.wait_s
        )
        if (speed := work.speed()) is not None:
            yield from speed_metrics(speed)

    async def serve_runs(self, tasks: asyncio.TaskGroup) -> None:
        try:
            await self._serve_runs(tasks)
        finally:
            self.ends = True

    async def _serve_runs(self, tasks: asyncio.TaskGroup) -> None:
        working: asyncio.Task[None] | None = None
        async for run in self.membership.assignments():
            self.assigned = run, self.membership.run_id
            if working is not None and not working.done():
                await self._end(working, run, tasks)
            if run:
                working = tasks.create_task(self._work_for(run))
            elif working is not None and working.done():
                # It may have shown why it could not work for that run.
                self.membership.update(run="", state="idle", reason="")

    async def _end(
        self, working: asyncio.Task[None], next_run: str, tasks: asyncio.TaskGroup
    ) -> None:
        """The assignment is taken back: leave once all work is merged, unless the run itself ends.

        Another run waits until this one is left; a process that is told to stop does not.
        """
        why = "assigned elsewhere" if next_run else "not assigned any more"
        self.dismissed = working
        await self._dismiss(why)
        if not await self._leaves_by_itself(working):
            working.cancel()
        tasks.create_task(self._dismiss_again(working, why))
        if next_run:
            await asyncio.wait({working})

    async def _dismiss_again(self, working: asyncio.Task[None], why: str) -> None:
        """Until it is left: the end may be shown later, or nobody could be asked before."""
        while not (await asyncio.wait({working}, timeout=DISMISS_S))[0]:
            await self._dismiss(why)

    async def _dismiss(self, why: str) -> None:
        work = self.work
        if work is None:
            return
        ended = await self._ended(work.spec)
        if self.work is not work:
            return  # left meanwhile, or begun again
        if ended:
            work.withdraw(ended, run_over=True)
        elif not work.run_ends:
            work.drain(why)

    async def _ended(self, spec: RunSpec) -> str:
        """Why nobody merges anything of this run any more; "": somebody may, or it is unknown."""
        try:
            if await self._is_over(spec):
                # Its leader died before it could tell, or before it had published all.
                return RUN_OVER
            # Nothing is shown of it then, and no round will come, however long one waits.
            there = await exists(self.control, spec.name, spec.id)
        except BusError:
            return ""
        return "" if there else "the run is deleted"

    async def _is_over(self, spec: RunSpec) -> bool:
        """Whether every shard is shown as over. Raises BusError."""
        found = [
            await shown(self.control, spec.name, spec.id, shard)
            for shard in range(spec.algorithm.shards)
        ]
        return all(status is not None and over(status) for status in found)

    async def _leaves_by_itself(self, working: asyncio.Task[None]) -> bool:
        """Whether the work ended, or will: in training the loop sees to it."""
        if self.work is not None and self.work.train_loop is not None:
            return True
        await asyncio.wait({working}, timeout=LEAVES_S)
        return working.done()

    async def _work_for(self, run: str) -> None:
        await self._work_once_for(run)
        while not self._is_dismissed and self.membership.worked_for():
            await self._work_once_for(run)

    @property
    def _is_dismissed(self) -> bool:
        """Whether the task that asks was told to end. Nobody would end another life of it: the one
        that was left was to end it. And whoever has been given the run again waits for its end."""
        return asyncio.current_task() is self.dismissed

    async def _work_once_for(self, run: str) -> None:
        spec = await self.spec_of(run)
        if spec is None:
            return
        self.faults.works_for(run)
        self.membership.update(run=run, state="working")
        await self.membership.refresh()
        leave: Leave | None = None
        try:
            while leave is None or await self._begins_again(leave, spec):
                leave = await self._attempt(spec)
                if self._is_dismissed:
                    break
        except BaseException:
            await self._tell_lost(run)
            raise
        finally:
            self.work, self.unfit_for = None, ""
            await self.computing.over(OVER_S if self.ends else None)
            self.faults.works_for("")
            self.membership.update(run="", state="idle", reason="")
        if leave is not None:
            log.info("left", run=run, outcome=leave.outcome, reason=leave.reason)
        await self.membership.refresh()

    async def _begins_again(self, leave: Leave, spec: RunSpec) -> bool:
        """Whether it works on after this, as a newer life; waits until it may.

        After a restore it has moments and data of that checkpoint. A run that has lost all it had
        made may want what it began from, which the older life had not read. It may have been silent
        for so long that it counted as gone. Or another process took its id: that one works, as long
        as it lives.
        """
        run, this = spec.name, (spec.name, spec.id)
        if self.assigned != this:
            return False
        if leave.outcome == "unread":
            log.warning("begins again", run=run, reason=leave.reason)
            self.reads_for = this
            return True
        if leave.outcome != "superseded":
            return leave.outcome == "restored"
        own = self.membership.record.boot
        if await newest_boot(self.control, run, self.settings.id) != own:
            log.warning("waits until the other process with this id is gone", id=self.settings.id)
            self.work = None
            self.membership.update(run="", state="idle", reason=TAKEN)
            await self.membership.regained()
            self.membership.update(run=run, state="working", reason="")
        return self.assigned == this and not self._is_dismissed

    async def _attempt(self, spec: RunSpec) -> Leave | None:
        """Work for the run once; None, after a while, if this process is unfit for it."""
        await self._alone()
        began = ambient.monotonic()
        try:
            leave = await self._worked(spec)
            self.unfit_for = ""
            return leave
        except Unfit as unfit:
            # Not the exception itself: what raised it holds all that was built until then.
            why = str(unfit)
        finally:
            self.trained = self.work is not None and self.work.ended is not None
            # The next life, of this run or another one, needs the room that this one's took.
            if self.work is not None:
                self.left |= self.work.over()
            self.work = None
            await self.computing.freed()
        # Its member record says so for as long as it is true; the event comes when it changes.
        self.membership.update(state="unfit", reason=why[:500])
        if gist(why) != self.unfit_for and not self.computing.lost:
            self.unfit_for = gist(why)
            await self._tell_unfit(spec.name, why)
        await asyncio.sleep(pause_after(ambient.monotonic() - began))
        return None

    async def _alone(self) -> None:
        """Wait until no thread is at work any more for the life before: it may hold what this one
        needs of the devices. But one that hangs holds nobody up for ever."""
        if all(thread.done() for thread in self.left):
            self.left.clear()
            return
        before = self.membership.record.reason
        self.membership.update(reason=WAITS)
        log.info(WAITS)
        if (await asyncio.wait(self.left, timeout=ALONE_S))[1]:
            log.warning("goes on beside what is left of the work before", after_s=ALONE_S)
        self.membership.update(reason=before)
        self.left.clear()  # whoever failed knows all that it had built until then
        await self.computing.freed()

    async def _worked(self, spec: RunSpec) -> Leave:
        """Work for the run until it is left. Raises Unfit."""
        self.here = asyncio.get_running_loop()
        self.work = work = Work(await self._context(spec), self.faults, self.computing)
        work.injected.duty_cycle = self.settings.duty_cycle
        work.stop_s = self.settings.stop_s
        work.reads_beginning = self.reads_for == (spec.name, spec.id)
        work.fit = lambda: self.membership.update(state="working", reason="")
        work.evaluates = lambda: self.membership.update(reason=LAST_EVALUATION)
        leave = await work.run()
        # Whoever refused it may let it in later: another configuration, or a free place.
        if leave.outcome == "refused" and not await self._ended(spec):
            raise Unfit(leave.reason)
        return leave

    async def _context(self, spec: RunSpec) -> RunContext:
        """Of an attempt. Raises Unfit for a run that keeps its checkpoints where none may be."""
        places, named = self.settings.checkpoint_places, spec.keeping.run_checkpoint_root
        try:
            # Links are followed, on a disk that may hang.
            root = await asyncio.to_thread(root_of_run, named, places) if named else places[0]
        except OutOfReach as error:
            raise Unfit(f"keeping.run_checkpoint_root: {error}") from None
        return RunContext(
            spec=spec,
            me=self.settings.id,
            boot=self.membership.record.boot,
            control=self.control,
            data=self.data,
            folder=self.folder.path,
            checkpoint_root=root,
            checkpoint_places=places,
        )

    async def _tell_unfit(self, run: str, why: str) -> None:
        me = self.settings.id
        text = (
            f"{me} cannot work for {run}: {why}; it tries again by itself and says no more of it "
            "until something changes"
        )
        log.error("unfit", run=run, reason=why)
        event = event_now(run, "unfit", me, text, {"learner": me})
        await tell(self.control, event, role=self.role)

    async def _tell_lost(self, run: str) -> None:
        """Why this process ends, where another one of its island is gone before they train: from
        then on a training tells it."""
        me, lost = self.settings.id, self.computing.lost
        if lost and not self.trained:
            event = event_now(run, "host-lost", me, f"{me}: {lost}"[:500], {"learner": me})
            await tell(self.control, event, role=self.role, timeout_s=LAST_WORD_S)


def pause_after(took_s: float) -> float:
    """Seconds to wait after an attempt of `took_s` that found this process unfit."""
    return min(max(took_s, UNFIT_RETRY_S), UNFIT_RETRY_S_MAX)


def gist(why: str) -> str:
    """A reason without its numbers: of memory and of addresses they differ at every attempt."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", why)


async def serve(settings: Settings, hosts: Hosts | None = None) -> None:
    """Connect and run until the process is told to stop. `hosts`: the others of its island."""
    place, here = settings.hosts_checkpoints, _of_this_machine(settings)
    if hosts is not None:
        computing: Computing = OnHosts(hosts, *here, checkpoints=place)
        await serving.serve(settings.of_host(hosts.place.hosts), Learner, computing=computing)
    elif place:
        await serving.serve(settings, Learner, computing=OnOneHost(*here, checkpoints=place))
    else:
        await serving.serve(settings, Learner)


def _of_this_machine(settings: Settings) -> tuple[Reach, CorpusCache, MeshSizes | None]:
    cache = CorpusCache(settings.corpus_cache, settings.corpora_bytes_max, log.info)
    return settings.reach, cache, mesh_of(settings.mesh)
