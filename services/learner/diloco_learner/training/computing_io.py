"""What a learner computes with, and where: its model, its data, and the thread that trains."""

import asyncio
import gc
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeVar

import jax
import psutil

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import (
    check_signs,
    check_tokenizer,
    check_vocabulary,
    load,
    separator_of,
)
from diloco_learner.data.shards import cut_of
from diloco_learner.events import Leave
from diloco_learner.models import forget
from diloco_learner.training import platforms
from diloco_learner.training.evaluate import HeldOut, held_out_of
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.speed import Island
from diloco_learner.training.train import Pause, Rest, Slowed, Stepping, TrainLoop
from diloco_learner.training.trainer import InitialWeights, Program, Trainer, Unread
from diloco_shared import ambient
from diloco_shared.checkpoints.parameters_io import beginning_of
from diloco_shared.gpus import gpus_here, unused
from diloco_shared.reach.local import Reach
from diloco_shared.spec.mesh import MeshSizes, fitted, idle
from diloco_shared.spec.run import RunSpec

T = TypeVar("T")

# Whether the train thread has handed something out is looked for some times in each step. A look
# takes up to 300 us of the core that may compute. So steps of more than 50 ms say when a turn is
# over, which is when they hand out: beside quicker ones that would cost more than to look.
LOOKS, QUICK_S = 8, 0.05
# What comes at another time is found after so many seconds.
RARELY_S = 0.5


@dataclass(frozen=True, slots=True)
class Built:
    """Of one run: a trainer with its initial parameters, and the data."""

    trainer: Any  # a Trainer, or what answers like one
    batches: Batches
    held_out: HeldOut
    warnings: tuple[str, ...] = ()  # of how it uses its devices
    # What keeps its own checkpoints, told a folder's name, the incarnation and how many are kept;
    # None: files of this process's own.
    keeper: Callable[[str, int, int], Any] | None = None


class LeftBehind(Exception):
    """Nobody waits for this build any more: its work is over, and the next one needs its room."""


# Called by whoever builds, between two things that take long: raises LeftBehind where it is.
Check = Callable[[], None]


def go_on() -> None:
    """It is wanted whatever happens."""


class Computing(Protocol):
    """Where a learner's steps are taken. See `OnThisMachine`."""

    async def handed(self, seconds: float) -> None:
        """Wait until the loop may have handed something out, at most about `seconds`.

        Where only looking tells, that is the time between two looks; see `Mailbox`.
        """

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        """Model, trainer and data of a run; called in a thread, which nobody can end: it has to
        look with `check` whether to go on. Whatever a user's own model or data raises. `begun`:
        parameters come from elsewhere, so the weights that the run began from are not looked for.
        """

    def island(self) -> Island | None:
        """What steps are taken on, and its memory now; None where nothing computes."""

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Spend the loop's turns; why it ended, or what it raised."""

    async def beside(self, work: Callable[[], T]) -> T:
        """Have something computed while `train` goes on: what it returns, or raises."""

    @property
    def lost(self) -> str:
        """Which other process of this learner is gone, and what follows; "" while none is."""

    async def freed(self) -> None:
        """One life has ended, and nobody uses what was built for it: its memory is given back."""

    async def over(self, within_s: float | None = None) -> None:
        """The work for a run has ended, however it went: nothing of it is needed any more.

        `within_s`: so long it may take at most, where the process ends with it.
        """


class OnThisMachine:
    """On the devices of this process, by a thread of its own: see `Computing`."""

    def __init__(
        self,
        reach: Reach | None = None,
        cache: CorpusCache | None = None,
        mesh: MeshSizes | None = None,
    ) -> None:
        """`reach`: what runs may open here, by default what lies in the working directory;
        `cache`: where corpora are prepared; `mesh`: of this process's devices, None for "auto"."""
        self.reach = reach or Reach()
        self.cache = cache
        self.mesh = mesh
        self.devices: Sequence[Any] = ()  # that the run computes on, once it is built
        self.pace, self.turned = StepPace(), asyncio.Event()

    async def handed(self, seconds: float) -> None:
        """`seconds`, or until the end of a turn where steps take long."""
        if self.pace.step_s < QUICK_S:
            await asyncio.sleep(max(seconds, self.pace.step_s / LOOKS))
            return
        at_last = asyncio.get_running_loop().call_later(RARELY_S, self.turned.set)
        try:
            await self.turned.wait()
        finally:
            at_last.cancel()
        self.turned.clear()

    def build(self, spec: RunSpec, check: Check = go_on, *, begun: bool = False) -> Built:
        """Seconds: it compiles. Minutes if a large text is prepared first, or weights are read.

        Raises OutOfReach for what runs may not open here, WrongMesh where devices cannot share
        the work as they are told to, LeftBehind, and whatever a user's own model raises.
        """
        if spec.model.factory is not None:
            self.reach.factories.check(spec.model.factory)  # else nothing of it is imported
        try:
            return self._built(spec, check, begun=begun)
        except (Exception, SystemExit):
            forget(spec.model)
            raise

    def _built(self, spec: RunSpec, check: Check, *, begun: bool) -> Built:
        check()
        corpus = load(spec.data, self.reach.data, self.cache, check)
        if not begun:  # else the weights are opened no more
            check_tokenizer(spec, corpus, self.reach.data)
        check_vocabulary(spec, corpus)
        cut = cut_of(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
        sequences = spec.inner.batch_sequences * spec.inner.accumulation
        held_out = held_out_of(spec, corpus.validation)
        check()
        beginning = opened(spec, self.reach, begun=begun, moved=check)
        platforms.check()
        there = self.there()
        sizes = self.sizes(spec, len(there))
        check()  # else they are the next run's by now
        self.devices = there[: sizes.devices]
        separator = separator_of(spec.data, corpus)
        program = Program.build(spec, beginning, separator, mesh_over(sizes, there))
        check_signs(spec, program.model, corpus)
        # Else it would be found while compiling, in the middle of the work: the process would end,
        # begin again and end again.
        program.check_loss()
        warnings = (
            unused(gpus_here(), jax.default_backend()),
            idle(sizes, len(there), spec.inner.batch_sequences),
            program.warning,
        )
        told = tuple(text for text in warnings if text)
        check()
        trainer = self.trainer(program, sizes, separator)
        return Built(trainer, Batches(cut, sequences), held_out, told)

    def there(self) -> Sequence[Any]:
        """The devices that a learner may compute on."""
        found: Sequence[Any] = jax.local_devices()
        return found

    def sizes(self, spec: RunSpec, devices: int) -> MeshSizes:
        """How so many share the work. Raises WrongMesh."""
        return fitted(self.mesh, devices, spec.inner.batch_sequences)

    def trainer(self, program: Program, sizes: MeshSizes, separator: int | None) -> Trainer:
        """With its initial parameters."""
        return Trainer(program)

    def island(self) -> Island:
        """Some system calls: not for the thread that trains."""
        return island_of(self.devices or jax.local_devices()[:1])

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Not to be cancelled: `loop.stopping` ends it after the step that is under way."""
        return await self.training(loop, mailbox)

    def training(self, loop: TrainLoop, mailbox: Mailbox) -> asyncio.Future[Leave]:
        """The thread that trains, begun."""
        running, self.turned = asyncio.get_running_loop(), asyncio.Event()
        # No part of what the train loop waits for: the core does the event loop's own work then.
        self.pace = pace = StepPace(partial(soon, running, self.turned.set))
        return threaded("train", lambda: run(loop, mailbox, pace=pace))

    async def beside(self, work: Callable[[], T]) -> T:
        """In a thread of its own. Whoever is cancelled leaves it behind: it goes on to its end."""
        return await threaded("beside", work)

    async def freed(self) -> None:
        """Parts of a life know each other: the trainer would stay, with all that it has on its
        devices, until Python happens to look for such circles."""
        await asyncio.to_thread(gc.collect)

    @property
    def lost(self) -> str:
        """There is no other process."""
        return ""

    async def over(self, within_s: float | None = None) -> None:
        """Whoever held the trainer lets go of it."""


def opened(
    spec: RunSpec, reach: Reach, *, begun: bool, moved: Callable[[], object] = go_on
) -> InitialWeights | None:
    """What the run begins from; None: its seed. Where it has `begun`, nothing is opened.

    `moved` is called whenever some more was read. Raises ValueError and OSError.
    """
    if begun and spec.model.weights:
        return Unread()
    places = (reach.data, reach.checkpoint_root, reach.checkpoints)
    return beginning_of(spec.model, *places, moved=moved)


def soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Have `loop` call it, from any thread; nothing where the process has ended it meanwhile."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def threaded(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns, or raises, in a new thread; no process waits for it at its end.

    Whoever learns that it has ended may count on this: the thread holds nothing of it any more.
    """
    loop, given = asyncio.get_running_loop(), [work]
    ended: asyncio.Future[T] = loop.create_future()

    def done(settle: Callable[[], None]) -> None:
        if not ended.done():  # else nobody waits for it any more
            settle()

    def body() -> None:
        try:
            found = given.pop()()
        except BaseException as error:
            settle = partial(ended.set_exception, error)
        else:
            settle = partial(ended.set_result, found)
        soon(loop, partial(done, settle))
        del settle  # an error knows this frame: they would keep each other, and all it holds

    threading.Thread(target=body, name=name, daemon=True).start()
    return ended


class StepPace:
    """How long the newest step of a train loop took, in seconds; 0 before there was one."""

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        """`tell`: that a turn is over, where steps are not quick; in the thread that takes them."""
        self.step_s, self.ended_at = 0.0, 0.0
        self.tell = tell

    def of(self, turns: Iterator[Pause]) -> Iterator[Pause]:
        """These turns, looked at."""
        for pause in turns:
            if isinstance(pause, Stepping):
                now = ambient.monotonic()
                self.step_s = now - self.ended_at if self.ended_at else 0.0
                self.ended_at = now
            if self.step_s >= QUICK_S:
                self.tell()
            yield pause


def run(
    loop: TrainLoop,
    mailbox: Mailbox,
    sleep: Callable[[float], None] = time.sleep,
    pace: StepPace | None = None,
) -> Leave:
    """The train thread's body; `pace` is told of every turn."""
    for pause in (pace or StepPace()).of(loop.turns()):
        match pause:
            case Rest():
                mailbox.rest(pause.seconds)
            case Slowed():
                sleep(pause.seconds)
    assert loop.left is not None
    return loop.left


# --------------------------------------------------------------------------------------------------
# What this process computes on.


def island_of(devices: Sequence[Any]) -> Island:
    """These devices of jax, at least one, and what their memory holds now.

    A CPU has no memory of its own, and some devices tell nothing: then it is the process's.
    """
    kinds = sorted({str(device.device_kind) for device in devices})
    named = (str(devices[0].platform), " + ".join(kinds), len(devices))
    stats = [None if d.platform == "cpu" else _memory_stats(d) for d in devices]
    told = [s for s in stats if s and "bytes_in_use" in s]
    if len(told) < len(devices):
        used = int(psutil.Process().memory_info().rss)
        return Island(*named, True, used, max(used, _resident_peak()))
    used = sum(int(s["bytes_in_use"]) for s in told)
    peak = sum(int(s.get("peak_bytes_in_use", s["bytes_in_use"])) for s in told)
    limited = all("bytes_limit" in s for s in told)
    limit = sum(int(s["bytes_limit"]) for s in told) if limited else None
    return Island(*named, False, used, max(used, peak), limit)


def _memory_stats(device: Any) -> dict[str, int] | None:
    """None where its driver cannot tell: no learner ends over a figure."""
    try:
        stats: dict[str, int] | None = device.memory_stats()
        return stats
    except (RuntimeError, AttributeError):  # of jax, or of a plug-in without it
        return None


def _resident_peak() -> int:
    """Bytes of this process that were resident at most; macOS counts in bytes, others in KiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# --------------------------------------------------------------------------------------------------
# How long the train loop spent on anything but its own computation (invariant I8).


class WaitClock:
    """A context manager around every call of the train loop that could wait; adds up seconds."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self.clock = clock
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = self.clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.seconds += self.clock() - self._since
