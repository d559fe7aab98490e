"""A plan's figures (`planner.plan`) in words, for a terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What each figure is, by part and key.
WORDS = {
    "predicted": {
        "days": "days of training",
        "goodput": "share of the time that is useful (goodput)",
        "uptime": "share of the time that a learner trains",
        "step_s": "seconds of an inner step",
        "steps": "inner steps",
        "rounds": "rounds",
        "gbit_per_s_link": "Gbit/s on a data center's link, on average",
        "gbit_per_s_link_keyframes": "the same while keyframes go out",
        "link_load": "share of that link that is in use then",
        "bytes_up_per_step": "bytes that a learner sends a step",
        "bytes_down_per_step": "bytes that it fetches a step",
        "round_s": "seconds of a round",
        "keyframe_round_s": "seconds of one that publishes a keyframe",
        "staleness_steps": "steps that a round lasts",
        "grace_s": "seconds of the grace window",
        "loss_gap": "loss over data-parallel's, less one",
        "days_data_parallel": "days of data-parallel training instead",
        "utilisation_data_parallel": "share of the time that it would compute",
        "times_faster_than_data_parallel": "times that it would take longer",
    },
    "hub": {
        "gbit_per_s_each_way": "Gbit/s of the syncers, each way",
        "memory_gib": "GiB of memory that they take",
        "disk_gib": "GiB of disk that the streams take",
        "merging_cores": "cores that merge",
        "server_stores_gb_per_s": "GB/s that the message server stores",
        "server_cores": "cores that the message server takes",
    },
    "budget_gb": {
        "stream_UP": "stream UP, what learners contribute",
        "stream_DN": "stream DN, what syncers publish",
        "stream_TAPE": "stream TAPE, a record of each round",
        "stream_STATE": "stream STATE, for whoever joins",
        "memory_syncer": "memory of a syncer",
        "memory_learner": "memory of a learner",
        "memory_learner_device": "memory of each device of a learner",
        "memory_coordinator": "memory of the coordinator",
        "memory_hub": "memory of the message server",
        "disk_syncer": "disk of a syncer",
        "disk_syncer_gb_per_s": "GB/s that it must write, on average",
    },
}
TITLES = {
    "predicted": "What to expect",
    "hub": "What the hub needs, all syncers together",
    "budget_gb": "What streams, processes and disks need, in GB ('diloco budget' counts each)",
}
# The columns that tell what other circumstances would change: key, heading, width.
OTHERWISE = (
    ("days", "days", 8),
    ("goodput", "goodput", 9),
    ("gbit_per_s_link", "Gbit/s", 8),
    ("learners", "learners", 9),
    ("sync_every_steps", "H", 5),
    ("codec_up", "codec", 7),
)
# A wish, as it is called where it is changed.
CHANGED = {
    "params": "parameters",
    "link_gbit_per_s": "Gbit/s of a link",
    "chips": "chips",
    "mtbi_years": "years between failures",
    "round_trip_s": "round trip",
}
# Columns of what a figure is, of a figure, and of what would change.
NAME, FIGURE, CHANGE = 41, 13, 29
_EXTRAPOLATED = ": extrapolated"


def plan_lines(found: dict[str, Any], written: Path | None = None) -> list[str]:
    """The settings with their reasons, what to expect, and what would change it."""
    lines = [
        f"{name:<21}  {value!s:>6}  {found['reasons'].get(name, '')}".rstrip()
        for name, value in found["settings"].items()
    ]
    lines.append("H stands for sync_every_steps, the inner steps between two merges of a fragment")
    for part, words in WORDS.items():
        figures = found[part].items()
        lines += ["", f"{TITLES[part]}:"]
        lines += [f"  {words[key]:<{NAME}}{number(value):>{FIGURE}}" for key, value in figures]
    way_on = (
        f"{written} has these settings: put in your model and data, then 'diloco config {written}'"
        if written
        else "--write run.toml makes a file of these settings, to be completed and submitted"
    )
    return [*lines, "", *_otherwise(found["sensitivity"]), *_caveats(found["notes"]), "", way_on]


def _otherwise(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "What one other wish would change (Gbit/s of a link, codec of contributions):"
    yield f"  {'':<{CHANGE}}" + "".join(f"{name:>{width}}" for _, name, width in OTHERWISE)
    for row in rows:
        wish, _, factor = row["changed"].partition(" ")
        cells = "".join(f"{_short(row.get(key)):>{width}}" for key, _, width in OTHERWISE)
        yield f"  {f'{CHANGED[wish]} {factor}':<{CHANGE}}" + row.get("error", cells)


def _caveats(notes: list[str]) -> Iterator[str]:
    if notes:
        yield from ("", "Before you trust these figures:")
    for note in notes:
        yield "- " + note.replace(_EXTRAPOLATED, ", so that the loss above is extrapolated")


def number(value: float) -> str:
    """Four digits, and no power of ten that one would have to read."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
