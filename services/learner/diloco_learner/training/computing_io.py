"""What a learner computes with, and where: its model, its data, and the thread that trains."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from diloco_learner.data.batches_io import Batches
from diloco_learner.data.cache import Cache
from diloco_learner.data.corpus import HERE, check_signs, check_vocabulary, load
from diloco_learner.data.shards import cut_of
from diloco_learner.events import Leave
from diloco_learner.models import forget
from diloco_learner.training.evaluate import HeldOut, held_out_of
from diloco_learner.training.mailbox_io import Mailbox
from diloco_learner.training.train import Rest, Slowed, TrainLoop
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared import ambient
from diloco_shared.hf.resolving import weights_of
from diloco_shared.spec.run import RunSpec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Built:
    """Of one run: a trainer with its initial parameters, and the data."""

    trainer: Any  # a Trainer, or what answers like one
    batches: Batches
    held_out: HeldOut


class Computing(Protocol):
    """Where a learner's steps are taken. See `OnThisMachine`."""

    async def handed(self, seconds: float) -> None:
        """Wait until the loop may have handed something out, at most about `seconds`.

        Where only looking tells, that is the time between two looks; see `Mailbox`.
        """

    def build(self, spec: RunSpec) -> Built:
        """Model, trainer and data of a run; called in a thread. Whatever a user's own model or
        data raises."""

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Spend the loop's turns; why it ended, or what it raised."""

    async def beside(self, work: Callable[[], T]) -> T:
        """Have something computed while `train` goes on: what it returns, or raises."""


class OnThisMachine:
    """On the devices of this process, by a thread of its own: see `Computing`."""

    def __init__(self, root: Path = HERE, cache: Cache | None = None) -> None:
        """`root`: where relative paths of corpora are; `cache`: where they are prepared."""
        self.root = root
        self.cache = cache

    async def handed(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def build(self, spec: RunSpec) -> Built:
        """Seconds: it compiles. Minutes if a large text is prepared first."""
        try:
            return self._built(spec)
        except (Exception, SystemExit):
            forget(spec.model)
            raise

    def _built(self, spec: RunSpec) -> Built:
        corpus = load(spec.data, self.root, self.cache)
        check_vocabulary(spec, corpus)
        cut = cut_of(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
        sequences = spec.inner.batch_sequences * spec.inner.accumulation
        held_out = held_out_of(spec, corpus.validation)
        program = Program.build(spec, weights_of(spec.model, self.root))
        check_signs(spec, program.model, corpus)
        # Else it would be found while compiling, in the middle of the work: the process would end,
        # begin again and end again.
        program.check_loss()
        return Built(Trainer(program), Batches(cut, sequences), held_out)

    async def train(self, loop: TrainLoop, mailbox: Mailbox) -> Leave:
        """Not to be cancelled: `loop.stopping` ends it after the step that is under way."""
        return await threaded("train", lambda: run(loop, mailbox))

    async def beside(self, work: Callable[[], T]) -> T:
        """In a thread of its own. Whoever is cancelled leaves it behind: it goes on to its end."""
        return await threaded("beside", work)


def threaded(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """What `work` returns, or raises, in a new thread; no process waits for it at its end."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def done(settle: Callable[[], None]) -> None:
        if not ended.done():  # else nobody waits for it any more
            settle()

    def body() -> None:
        try:
            found = work()
        except BaseException as error:
            settle = partial(ended.set_exception, error)
        else:
            settle = partial(ended.set_result, found)
        with suppress(RuntimeError):  # the process has ended its loop meanwhile
            loop.call_soon_threadsafe(done, settle)
        del settle  # an error knows this frame: they would keep each other, and all it holds

    threading.Thread(target=body, name=name, daemon=True).start()
    return ended


def run(loop: TrainLoop, mailbox: Mailbox, sleep: Callable[[float], None] = time.sleep) -> Leave:
    """The train thread's body."""
    for pause in loop.turns():
        match pause:
            case Rest():
                mailbox.rest(pause.seconds)
            case Slowed():
                sleep(pause.seconds)
    assert loop.left is not None
    return loop.left


# --------------------------------------------------------------------------------------------------
# How long the train loop spent on anything but its own computation (invariant I8), and since when
# this process runs.


class WaitClock:
    """A context manager around every call of the train loop that could wait; adds up seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
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


# Where the system does not tell, a process was started when it came here.
_IMPORTED_AT = ambient.monotonic()


def process_started() -> float:
    """When this process was started, on the monotonic clock (`man proc`: field 22 of stat)."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        after_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_s
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED_AT
    return ambient.monotonic() - max(age_s, 0.0)
