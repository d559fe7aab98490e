"""A run of a model that compiles in a moment, and a text for it that is read in one."""

from pathlib import Path
from typing import Any


def tiny(**more: Any) -> dict[str, Any]:
    """The run `r` for two learners, which are missed soon and never evaluate; some of it changed.

    On loopback a round takes longer than two such steps, so it overlaps with more of them.
    """
    return {
        "name": "r",
        "seed": 5,
        "algorithm": {"fragments": 3, "sync_every_steps": 24, "overlap_steps": 8, "quorum": 1},
        "model": {"overrides": {"width": 16, "layers": 1, "hidden": 16}},
        "membership": {"learners_min": 2, "heartbeat_s": 0.5, "lease_s": 3.0},
        "evaluation": {"every_steps": 100_000, "sequences": 32},
        "budget": {"steps": 100_000},
        **more,
    }


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for n in range(40):
        (folder / f"text-{n:02d}.txt").write_text(f"file {n} is the {n}th of forty.\n" * 400)
    return folder
