"""States of shards, wherever somebody has one: captured, gone back to, or executed (I6, I9)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diloco_shared.protocol.messages import TapeRecord
from diloco_simulator.checkers.watch import RunWatch
from diloco_simulator.checkers.watch_shard import OfShard
from diloco_simulator.virtual_loop import current
from diloco_syncer.checkpoints.checkpointing_io import Checkpointer
from diloco_syncer.events import Capture, Install
from diloco_syncer.history import audit_io as audit
from diloco_syncer.history import follow_io as follow
from diloco_syncer.history.history import History
from diloco_syncer.merging.numbers_io import Numbers, Numeric
from diloco_syncer.merging.store import FragmentStore


class SeenStates:
    """Of one world. `watch_of` gives the watch of a run by its name; None: nobody looks at it."""

    def __init__(self, watch_of: Callable[[str], RunWatch | None]) -> None:
        self.watch_of = watch_of

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block."""
        # Standbys and auditors; by whatever names they have.
        modules: tuple[Any, ...] = (follow, audit)
        perform, replay = Numbers.perform, modules[0].replay
        capture, install = Checkpointer.capture, Checkpointer.install

        def performed(numbers: Numbers, effect: Numeric) -> None:
            perform(numbers, effect)
            if isinstance(effect, Install):
                self._installed(numbers, effect.fragment)

        def executed(history: History, store: Any, record: TapeRecord, *rest: Any) -> Any:
            after = replay(history, store, record, *rest)
            if (of := self._of(history.spec.name, history.shard)) is not None:
                of.executed(_who(), record, history, after)
            return after

        def captured(
            made: Checkpointer,
            effect: Capture,
            history: dict[str, Any],
            store: dict[str, Any],
            arrays: Any,
        ) -> Any:
            if (of := self._of(made.spec.name, made.shard)) is not None:
                of.cuts.keeps(_who(), effect.number, history, store, arrays)
                if history["outcome"]:
                    of.gives(effect.number)
            return capture(made, effect, history, store, arrays)

        def installed(made: Checkpointer, serial: int) -> FragmentStore:
            state, of = made.loaded[serial], self._of(made.spec.name, made.shard)
            if of is not None:
                kept = state.store.meta(), state.store.state_arrays()
                of.cuts.goes_back(_who(), state.manifest.number, state.history, *kept)
                if of.numbers is not None:
                    of.numbers.goes_back(state)
            return install(made, serial)

        Numbers.perform = performed  # type: ignore
        for module in modules:
            module.replay = executed
        Checkpointer.capture, Checkpointer.install = captured, installed  # type: ignore
        try:
            yield
        finally:
            Numbers.perform = perform  # type: ignore
            for module in modules:
                module.replay = replay
            Checkpointer.capture, Checkpointer.install = capture, install  # type: ignore

    def _of(self, run: str, shard: int) -> OfShard | None:
        watch = self.watch_of(run)
        return None if watch is None else watch.of[shard]

    def _installed(self, numbers: Numbers, p: int) -> None:
        """A merge is in force at a leader: where directions cancelled, it is believed."""
        of = self._of(numbers.spec.name, numbers.machine.history.shard)
        if of is None or of.numbers is None or numbers.store is None or numbers.building:
            return
        fragment = numbers.store.fragments[p]
        of.numbers.installed(p, fragment.master, fragment.outer)


def _who() -> str:
    process = current()
    return "an auditor" if process is None else process.name
