"""A report's figures (`report.report`) in sentences, for a terminal."""

import time
from collections.abc import Iterator
from typing import Any

from diloco_cli.view import per_corpus
from diloco_cli.words import counted
from diloco_shared.budget.terms import shown

Figures = dict[str, Any]

# Above this share of the tokens, what was overwritten is explained.
OVERWRITTEN_TOLD = 0.1
# So many learners are named in a line, and the others counted.
NAMED = 5
OVERWRITTEN = (
    "  Overwritten is what learners did between sending their work and taking the merged "
    "parameters. It is much where a step takes less time than a merge, as with tiny models: larger "
    "batches make it less, and algorithm.overlap_steps may (docs/how-to/tuning.md)."
)


def report_lines(f: Figures) -> list[str]:
    """What a run achieved; a figure that it cannot have is left out."""
    return [
        f"run {f['run']}: {f['state']}, seed {f['seed']}",
        *_loss(f),
        f"rounds: {f['rounds_committed']} committed, {f['rounds_skipped']} skipped",
        *_tokens(f),
        *_network(f),
        *_victim(f),
        *(_recovery(r) for r in f["recoveries"]),
        f"measured by: {f['command']}, {f['machine']}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in f["versions"].items()),
    ]


def _loss(f: Figures) -> Iterator[str]:
    if f["val_loss_start"] is not None:
        start, end = f["val_loss_start"], f["val_loss_end"]
        yield (
            f"validation loss: {start:.4f} after {f['val_loss_start_steps']} steps, {end:.4f} "
            f"after {f['val_loss_end_steps']} (nats per token)"
        )
    if f["val_loss_by_corpus"]:
        yield f"  by corpus at the end: {per_corpus(f['val_loss_by_corpus'])}"


def _tokens(f: Figures) -> Iterator[str]:
    processed = f["tokens_processed"]
    if not processed:
        yield "tokens: none yet"
        return
    yield f"tokens: {processed:,} processed, {f['tokens_useful'] / processed:.1%} of them useful"
    became = [f"{name.replace('_', ' ')} {count:,}" for name, count in f["tokens"].items()]
    if f["tokens_reread"]:
        became.append(f"read again {f['tokens_reread']:,}")
    if became:
        yield f"  {', '.join(became)}"
    if f["tokens"].get("overwritten", 0) > OVERWRITTEN_TOLD * processed:
        yield OVERWRITTEN
    if f["refused"]:
        late = ", ".join(f"{why} {count}" for why, count in f["refused"].items())
        yield f"contributions refused: {late}"
    if f["goodput"] is not None:
        yield f"goodput: {f['goodput']:.1%} of the learners' time went into useful tokens"
        if f["goodput_since"] is not None:
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(f["goodput_since"]))
            yield f"  of their time since {since}: no events are left of what was before"
        yield from _without(f["goodput_without"])


def _without(learners: list[str]) -> Iterator[str]:
    """Whose time is in no figure."""
    if learners:
        more = len(learners) - NAMED
        names = ", ".join(learners[:NAMED]) + (f" and {more:,} more" if more > 0 else "")
        yield f"  without {names}: no event tells any more when they trained"


def _network(f: Figures) -> Iterator[str]:
    up, down = shown(f["bytes_up"]), shown(f["bytes_down"])
    line = f"network: {up} up, {down} down"
    if sockets := sum(f["bytes_socket"].values()):
        line += f" ({shown(sockets)} at the sockets, with all that was said)"
    yield line
    if instead := f["bytes_data_parallel_equivalent"]:
        yield f"  data-parallel training would have sent {shown(instead)}"


def _victim(f: Figures) -> Iterator[str]:
    waited = f["survivor_wait_s"]
    if f["victim"] is None:
        if waited is not None:
            yield f"waiting: no learner's training waited longer than {waited:.3f} s in all"
        return
    rounds = f["rounds_committed_while_down"]
    went_on = "" if rounds is None else f"; {counted(rounds, 'round')} went on without it"
    yield f"fault: {f['victim']} was taken away{went_on}"
    if f["seconds_kill_to_contributing"] is not None:
        back = counted(f["victim_contributions_after_return"], "contribution")
        after_s = f["seconds_kill_to_contributing"]
        yield f"  its work counted again after {after_s:.1f} s, {back} since"
    if waited is not None:
        yield f"  no other learner's training waited longer than {waited:.3f} s in all"


def _recovery(r: dict[str, Any]) -> str:
    phases = r["phases_s"]
    parts = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.1f} s"
        for name, seconds in phases.items()
        if name != "total" and seconds
    )
    whence = {"donor": f"moments of {r['donor']}", "fresh": "fresh moments"}.get(
        r["source"], f"moments of its {r['source']}"
    )
    line = f"recovery: {r['learner']} (life {r['incarnation']}), {whence}"
    if phases.get("total") is not None:
        line += f", {phases['total']:.1f} s in all"
    return f"{line}: {parts}" if parts else line
