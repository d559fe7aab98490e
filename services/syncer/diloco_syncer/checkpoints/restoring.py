"""Going back to a checkpoint, of this run or of another one.

    wanted ──► load ──► restore record on the tape ──► in force: keyframes, a new epoch
                   └──► not to be had: told; a run that has not begun tries again, and so does a
                        shard where another one has gone back

Pure: the edge loads, and answers with Loaded.
"""

from typing import Any

from diloco_shared.protocol.messages import TapeRestore
from diloco_shared.protocol.records import Restore
from diloco_syncer.events import Effect, Load, Loaded, Tell
from diloco_syncer.history.history import History

# A run that has nothing else to begin with tries again after this many seconds: a folder may be
# mounted meanwhile.
RETRY_S = 10.0


class Restoring:
    """Of one leader's term."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.wanted: Restore | None = None
        self.asked: Restore | None = None  # what is being loaded, or is on its way to the tape
        self.recorded = 0  # serial of the newest wish whose record was handed out
        self.unfit = 0  # serial of a wish that cannot be fulfilled
        # Newest epoch of a learner, and serial of the newest restore that it knew of then.
        self.heard = (0, 0)
        # Serial of the newest restore that learners were heard to know of: two of them, or the only
        # one that lives. One alone may lie, and a shard that goes back merges nothing until it can.
        self.known = 0
        self.failed = (0, "")  # serial of the newest wish that failed, and why
        self.retry_at = 0.0
        self.held = False  # the record of another epoch is on its way: this one's follows it

    @property
    def due(self) -> bool:
        """A wish is open: nobody joins, and no round opens.

        What is over does not go back, but for one of several shards when learners, or its own tape,
        tell of an epoch since: it has heard of the wish later than another.
        """
        wish, h = self.wanted, self.history
        since = h.spec.algorithm.shards > 1 and max(h.epoch, self.heard[0]) > h.ended_in
        over = h.outcome and not since
        return wish is not None and not over and wish.serial > max(h.restores, self.given_up)

    @property
    def given_up(self) -> int:
        """Serial of a wish that cannot be fulfilled; 0: none.

        Of several shards, one that could not go back must as soon as learners tell of another that
        has: else they would train with one part of before and one of after. Its disk may have been
        full for a moment.
        """
        h = self.history
        # After a stop it follows the others into their epoch, so that learners may leave.
        if h.outcome and h.stopping:
            return max(self.unfit, self.failed[0])
        return 0 if self._behind else self.unfit

    def refused_before(self, epoch: int, restores: int) -> None:
        """An earlier leader showed, in that epoch, that wishes up to `restores` were fulfilled or
        given up. Their users were told: whoever leads next does not go back after all.

        What the tape has of that epoch names every wish that was fulfilled by then. So one that was
        fulfilled in an epoch that the tape has lost is due again. A hub that was put back begins
        another epoch behind what it still has, and what was given up before stays so.
        """
        h = self.history
        on_tape = epoch == h.epoch or epoch in h.epochs_before
        if h.initialised and on_tape and restores > h.restores:
            self.unfit = restores

    @property
    def _behind(self) -> bool:
        """Another shard has gone back, and this one could not."""
        h = self.history
        return h.spec.algorithm.shards > 1 and h.restores < self.unfit <= self.known

    @property
    def deadline(self) -> float | None:
        return self.retry_at if self.due and not self._under_way and not self.held else None

    @property
    def _under_way(self) -> bool:
        # A record on its way to the tape must find there what was loaded for it.
        recording = self.recorded > self.history.restores
        wish, asked = self.wanted, self.asked
        # What is loaded is kept by its serial: of two wishes with one, one at a time.
        loading = wish is not None and asked is not None and asked.serial == wish.serial
        return recording or loading

    @property
    def needed(self) -> tuple[str, ...]:
        """Checkpoints that may be read again, and the one that is to be gone back to.

        Whoever joins without a donor begins with the moments that lie there. Whoever begins at an
        older snapshot executes every restore since. A wish that was given up needs nothing.
        """
        back, wish = self.history.restored, self.wanted
        there = [back.source] if back else []
        there += [*self.history.sources, *([wish.source] if wish and self.due else [])]
        return tuple(dict.fromkeys(there))

    @property
    def reason(self) -> str:
        """Why no round may open; empty if nothing is to be restored."""
        if not self.due or self.wanted is None:
            return ""
        serial, fault = self.failed
        why = f": {fault}" if serial == self.wanted.serial else ""
        return f"restoring {self.wanted.source}{why}"

    def advance(self, now: float) -> list[Effect]:
        """Ask for what is to be restored."""
        if not self.due or self._under_way or self.held or now < self.retry_at:
            return []
        assert self.wanted is not None
        self.asked = self.wanted
        return [Load(self.wanted)]

    def loaded(self, event: Loaded, now: float, wall: float) -> TapeRestore | Tell | None:
        """The record that puts it in force, or why there will be none."""
        if not self.due or event.restore != self.wanted:
            if event.restore == self.asked:
                self.asked = None  # the same wish may become due again, or another of its serial
            return None  # the user has changed their mind
        fault = event.fault or unfit(self.history, event.history)
        if fault:
            return self._fails(event.restore, fault, now)
        h, self.recorded = self.history, event.restore.serial
        return TapeRestore(
            epoch=self._epoch(),
            term=h.term,
            serial=event.restore.serial,
            source=event.restore.source,
            digest=event.digest,
            run=event.run,
            versions=tuple(event.history["versions"]),
            anchor_digests=tuple(event.history["anchor_digests"]),
            at=wall,
        )

    def _fails(self, wish: Restore, fault: str, now: float) -> Tell | None:
        """Once for every wish, and again where the fault is another: its user waits to be told."""
        known, self.failed = self.failed, (wish.serial, fault)
        self.asked, self.retry_at = None, now + RETRY_S
        if self.history.initialised and not self._behind:
            self.unfit = wish.serial
        if self.failed == known:
            return None
        text = f"{wish.source} is not restored: {fault}"
        return Tell("restore-failed", text, told_of(self.history, wish.serial))

    def _epoch(self) -> int:
        """One that no learner has seen, but for that of another shard's part of this restore."""
        h, (heard, serial) = self.history, self.heard
        assert self.wanted is not None
        others = h.spec.algorithm.shards > 1 and serial == self.wanted.serial
        return max(h.epoch, heard - others) + 1


def told_of(history: History, serial: int) -> dict[str, Any]:
    """Which wish an event is about: there may be several for one checkpoint, and each of several
    shards tells of its own part."""
    return {"serial": serial, "shard": history.shard}


def unfit(history: History, meta: dict[str, Any]) -> str:
    """Why the state of a checkpoint cannot become this run's; "" if it can."""
    theirs, ours = len(meta["versions"]), history.fragments
    if theirs != ours:
        return (
            f"its parameters are cut into {theirs} fragments, the run wants {ours}: set "
            f"algorithm.fragments = {theirs}"
        )
    shapes = {t["name"]: list(t["shape"]) for t in meta["layout"]}
    own = {t.name: list(t.shape) for t in history.layout}
    if history.initialised and shapes != own:
        differing = sorted(n for n in shapes.keys() | own.keys() if shapes.get(n) != own.get(n))
        return f"it is of another model (another layout): {', '.join(differing[:5])} differ"
    return ""
