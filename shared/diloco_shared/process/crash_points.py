"""Places where a process kills itself on purpose, to prove that nothing is lost by dying there.

    DILOCO_CRASH_AT="syncer-1/before-append:30,learner-2/donation"

names member, point and passage: syncer-1 gets SIGKILL when one life of it passes `before-append`
for the 30th time, learner-2 when it first gives its state away. Without a member every process is
meant. Each entry does so once: it is noted in the process's data folder before the end, and a later
life finds it there. Unset, which is what users have, a point costs one comparison.
"""

import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import structlog
from pydantic import AfterValidator

from diloco_shared.protocol.subjects import check_id

log = structlog.get_logger()

# What has been done and, a moment later, will have been done.
POINTS = {
    "before-append": "syncer: a record is made, and not yet on the tape",
    "after-append": "syncer: a record is on the tape, and nothing follows from it yet",
    "publication": "syncer: a publication's chunks are stored, its manifest is not",
    "after-manifest": "syncer: a publication is out, and the syncer does not know it yet",
    "snapshot": "syncer: a snapshot's arrays are written, what describes them is not",
    "archive": "syncer: records may leave the tape's stream, and their segment is not written yet",
    "archived": "syncer: the segment is written, and the stream still has its records",
    "replay": "syncer: has read a record and not executed it, while it catches up after its start",
    "follow": "syncer: has read a record and not executed it, as a standby",
    "takeover": "syncer: has the lease and all of the tape, and has not written its term",
    "contribution": "learner: a contribution's chunks are stored, its manifest is not",
    "donation": "learner: the inner state for a newcomer is stored, its manifest is not",
    "receiving": "learner: a newcomer has fetched a donor's inner state and does not use it yet",
    "checkpoint": "learner: a checkpoint of its own is being written",
    "run-record": "coordinator: a run's record is written, who submitted it has no answer",
}
# In a process's data folder: the entries that have been carried out, one per line.
DONE = "crashed-at"


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One death: of `member` ("" for whoever it may be), at a passage of a point."""

    text: str
    member: str
    point: str
    passage: int


@dataclass(slots=True)
class _Armed:
    entries: list[CrashPoint] = field(default_factory=list)
    passed: Counter[str] = field(default_factory=Counter)
    folder: Path = Path()


_armed = _Armed()


def parse(setting: str) -> list[CrashPoint]:
    """The entries of a setting; ValueError says which is wrong and what there is."""
    entries = []
    for text in filter(None, (part.strip() for part in setting.split(","))):
        member, _, place = text.rpartition("/")
        point, colon, passage = place.partition(":")
        if member:
            check_id(member, f"crash point {text!r}: the member")
        if point not in POINTS:
            raise ValueError(f"crash point {text!r}: there is no {point!r}; known: {known()}")
        if colon and not (passage.isdecimal() and int(passage) > 0):
            raise ValueError(f"crash point {text!r}: the passage is a number from 1 on")
        entries.append(CrashPoint(text, member, point, int(passage) if colon else 1))
    return entries


def known() -> str:
    return ", ".join(POINTS)


def _checked(setting: str) -> str:
    parse(setting)
    return setting


# A field of a process's settings.
CrashAt = Annotated[str, AfterValidator(_checked)]


def arm(setting: str, member: str, folder: Path) -> None:
    """From now on this process dies where `setting` says, unless an earlier life did."""
    done = done_in(folder) if setting else []
    _armed.folder = folder
    _armed.passed.clear()
    _armed.entries = [e for e in parse(setting) if e.member in ("", member) and e.text not in done]
    if _armed.entries:
        log.warning("will kill itself", at=[e.text for e in _armed.entries])


def done_in(folder: Path) -> list[str]:
    """What was carried out by processes of this data folder."""
    try:
        return (folder / DONE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def passing(point: str) -> None:
    """The process is at `point`; it ends here if it was armed for this passage."""
    if not _armed.entries:
        return
    assert point in POINTS, point
    _armed.passed[point] += 1
    for entry in _armed.entries:
        if (entry.point, entry.passage) == (point, _armed.passed[point]):
            with (_armed.folder / DONE).open("a", encoding="utf-8") as done:
                done.write(entry.text + "\n")
            os.kill(os.getpid(), signal.SIGKILL)
