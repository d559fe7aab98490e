"""A record of a run's tape in words: one line each, for people."""

from collections.abc import Sequence
from typing import assert_never

from diloco_cli.words import counted, reason_of
from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TapeEpoch,
    TapeInit,
    TapeRebirth,
    TapeRecord,
    TapeRestore,
    TapeRound,
    TapeSetting,
    TapeSnapshot,
    TapeTerm,
)


def record_line(seq: int, record: TapeRecord) -> str:
    """Its sequence, what it is, and what it says."""
    return f"{seq:>6}  {record.kind:<10}  {_said(record)}"


def _said(r: TapeRecord) -> str:
    match r:
        case TapeInit():
            parts = counted(len(r.anchor_digests), "fragment")
            return (
                f"the initial parameters of {r.learner} (life {r.incarnation}) are accepted: "
                f"{counted(len(r.layout), 'tensor')} in {parts}"
            )
        case TapeTerm():
            return f"{r.leader} leads in term {r.term}, epoch {r.epoch}"
        case TapeEpoch():
            return f"epoch {r.epoch} begins in term {r.term}: {r.reason}"
        case TapeRebirth():
            return (
                f"epoch {r.epoch} begins from what was published, {_versions(r.versions)}; "
                f"{r.leader} leads in term {r.term}: {r.reason}"
            )
        case TapeRound():
            return _round(r)
        case TapeCheckpoint():
            return f"checkpoint {r.number} is {r.outcome}, term {r.term}: {r.reason}"
        case TapeRestore():
            return (
                f"the run goes back to checkpoint {r.source}, {_versions(r.versions)}; epoch "
                f"{r.epoch} begins in term {r.term}, as wish {r.serial} of the user says"
            )
        case TapeSnapshot():
            return (
                f"a snapshot covers all records up to {r.covers}, and round {r.round}, term "
                f"{r.term}: {r.path}"
            )
        case TapeSetting():
            return f"{r.name} becomes {r.value}, term {r.term}: {r.reason}"
        case TapeEnd():
            return f"the run is {r.outcome}, {_versions(r.versions)}, term {r.term}: {r.reason}"
        case _:
            assert_never(r)


def _round(r: TapeRound) -> str:
    became = ", ".join(f"{v.learner} {v.outcome}" for v in r.verdicts)
    anchor = f", anchor {r.anchor_digest}" if r.anchor_digest else ""
    return (
        f"round {r.round} of fragment {r.fragment} was {r.outcome} in term {r.term}, version "
        f"{r.version}{anchor}: {became or reason_of(r.reason)}"
    )


def _versions(of_fragments: Sequence[int]) -> str:
    """Of the shard's fragments; -1 stands for another shard's."""
    own = [version for version in of_fragments if version >= 0]
    if not own:
        return "no version yet"
    low, high = min(own), max(own)
    return f"all fragments at version {low}" if low == high else f"versions {low} to {high}"
