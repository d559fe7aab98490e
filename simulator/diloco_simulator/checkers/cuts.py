"""Run-wide checkpoints and restores: one consistent cut, and exactly that when history goes back.

What a checkpoint holds is known from elsewhere: from the tape up to the mark, from standbys and a
replay that execute it, and from what learners were seen to have in memory.
"""

import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.protocol.messages import TapeRestore, TapeRound
from diloco_simulator.checkers.promises import Lost, Mark, Report

Arrays = Mapping[str, NDArray[Any]]


class Parts:
    """What learners kept, and when: the same for all shards."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.adopted: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self.moments: dict[tuple[int, str], list[bytes]] = {}  # by number and learner
        self.newest: dict[str, int] = {}  # life -> number of its newest part
        # (life, contribution) -> newest part of that life by then.
        self.made_after: dict[tuple[str, str], int] = {}
        self.began_with: dict[str, int] = {}  # life -> epoch of the restore it began after
        self.went: set[str] = set()  # lives that took moments of a run-wide checkpoint
        self.failed = 0  # number of the newest checkpoint that failed, on the first shard's tape

    def kept(
        self, life: str, learner: str, number: int, epoch: int, versions: tuple[int, ...], m: bytes
    ) -> None:
        """A process of a learner keeps its part."""
        if number <= self.newest.get(life, 0):
            self.report("I6", f"{life} keeps a part of {number} after {self.newest[life]}")
        self.newest[life] = number
        self.adopted[(life, number)] = (epoch, versions)
        self.moments.setdefault((number, learner), []).append(m)

    def contributed(self, life: str, subject: str) -> None:
        """A contribution goes out."""
        self.made_after[(life, subject)] = self.newest.get(life, 0)

    def began(self, life: str, restored: int) -> None:
        """A process has its inner state; what it knows of restores."""
        self.began_with[life] = restored

    def went_back(self, life: str, learner: str, source: str, own: bool, moments: bytes) -> None:
        """A process took moments of a checkpoint; `own`: there is a part of its own there."""
        self.went.add(life)
        number = parse_reference(source)[2]
        known = (
            self.moments.get((number, learner), [])
            if own
            else [m for (n, _), kept in self.moments.items() if n == number for m in kept]
        )
        if moments not in known:
            self.report("I6", f"{life} goes back to moments of {source} that nobody had")


class Cuts:
    """Of one syncer shard."""

    def __init__(self, report: Report, parts: Parts, owned: tuple[int, ...], lost: Lost) -> None:
        self.report = report
        self.parts = parts
        self.owned = owned
        self.lost = lost
        self.marks: list[Mark] = []
        self.of_restore: dict[tuple[int, str], Mark] = {}  # by epoch and digest of the manifest
        # By number and sequence: who stood there first, and with what.
        self.executed: dict[tuple[int, int], tuple[str, dict[str, Any]]] = {}
        # By number: all that leaders captured, also of records that were lost.
        self.captured: dict[int, list[dict[str, Any]]] = {}

    def marked(self, mark: Mark) -> None:
        """A checkpoint is begun on the tape."""
        self.marks.append(mark)
        for life, number in list(self.parts.adopted):
            if number == mark.number:
                self.cut(life, mark)

    def cut(self, life: str, mark: Mark) -> None:
        """No part has seen what was made after the mark."""
        epoch, versions = self.parts.adopted[(life, mark.number)]
        later = [p for p in self.owned if versions[p] > mark.versions[p]]
        if later and epoch == mark.epoch and epoch not in self.lost.epochs:
            self.report("I6", f"the part of {life} of {mark.number} has {later} of after its mark")

    def restored(self, record: TapeRestore) -> Mark | None:
        """History goes back: to exactly what was there when the checkpoint was begun."""
        number = parse_reference(record.source)[2]
        known = self.of_restore.get((record.epoch, record.digest))
        if known is not None:
            return known  # the tape is read again
        wanted = (record.versions, record.anchor_digests)
        for mark in reversed(self.marks):
            if mark.number == number and (mark.versions, mark.digests) == wanted:
                self.of_restore[(record.epoch, record.digest)] = mark
                return mark
        self.report("I6", f"epoch {record.epoch} begins with {wanted[0]} of {record.source}")
        return None

    def round(self, r: TapeRound, mark: int, restored: int) -> None:
        """A round: nobody's work of after the cut is in what is before it, or of before a restore.

        `mark`: the newest on this tape; `restored`: the epoch that began with the newest restore.
        A cut that failed binds nobody: another shard need not have heard of it.
        """
        for v in r.verdicts:
            if v.outcome != "merged":
                continue
            life = f"{v.learner}/{v.incarnation}"
            kept = self.parts.made_after.get((life, v.subject), 0)
            if kept > max(mark, self.lost.mark, self.parts.failed):
                self.report("I6", f"round {r.round} merges {v.subject}, of after part {kept}")
            if self.parts.began_with.get(life, -1) < restored:
                self.report("I1", f"round {r.round} merges {life}, of before the restore")

    def stands(
        self, who: str, number: int, history: dict[str, Any], store: dict[str, Any], arrays: Arrays
    ) -> None:
        """Somebody has the state of where a checkpoint was begun: executed or captured."""
        self.report.looked("I6")
        has = _described(history, store, arrays)
        first, known = self.executed.setdefault((number, history["seq"]), (who, has))
        differing = [part for part in has if has[part] != known[part]]
        if differing:
            self.report("I6", f"{who} has other {differing} at mark {number} than {first}")

    def keeps(
        self, who: str, number: int, history: dict[str, Any], store: dict[str, Any], arrays: Arrays
    ) -> None:
        """A leader captures its part."""
        self.captured.setdefault(number, []).append(_described(history, store, arrays))
        self.stands(who, number, history, store, arrays)

    def goes_back(
        self, who: str, number: int, history: dict[str, Any], store: dict[str, Any], arrays: Arrays
    ) -> None:
        """A leader has loaded its part: one that was captured, perhaps before records were lost."""
        self.report.looked("I6")
        if _described(history, store, arrays) not in self.captured.get(number, []):
            self.report("I6", f"{who} goes back to a state of {number} that nobody captured")


# What a part of a shard that was over says beside its state: its tape has no mark of it.
BESIDE = ("mark", "mark_at")


def _described(history: dict[str, Any], store: dict[str, Any], arrays: Arrays) -> dict[str, Any]:
    history = {name: value for name, value in history.items() if name not in BESIDE}
    digests = {name: digest_array(a) for name, a in arrays.items()}
    return {"history": json.loads(json.dumps(history)), "store": store, "arrays": digests}
