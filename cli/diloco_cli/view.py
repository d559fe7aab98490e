"""The live view: who does what, how the rounds go, what has been achieved."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_STATE_STYLE = {"stepping": "green", "down": "red", "recovering": "yellow", "joining": "yellow"}


def human_bytes(count: float) -> str:
    """1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def learners_table(status: dict[str, Any]) -> Table:
    """One line per learner."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("learner", "state", "life", "step", "loss", "tokens/s", "waited s", "merged in"):
        table.add_column(name, justify="left" if name in ("learner", "state") else "right")
    for name, shown in sorted(status["learners"].items()):
        state = str(shown.get("state", "?"))
        loss = shown.get("loss")
        merged = shown.get("merged_round", -1)
        table.add_row(
            name,
            Text(state, style=_STATE_STYLE.get(state, "")),
            str(shown.get("incarnation", "")),
            str(shown.get("step", "")),
            "" if loss is None else f"{loss:.3f}",
            f"{shown.get('tokens_per_s', 0.0):.0f}",
            f"{shown.get('wait_s', 0.0):.3f}",
            "" if merged < 0 else f"round {merged}",
        )
    return table


def run_lines(
    run: dict[str, Any], evaluations: Sequence[dict[str, Any]], last: dict[str, Any] | None
) -> list[str]:
    """The run in a few lines of plain text."""
    status = run["status"]
    lines = [f"run {run['name']}: {run['state']} - {run['reason']}"]
    if status is None:
        return lines
    stamp = status["stamp"]
    lines.append(
        f"progress {100 * stamp['fraction']:.1f} %, rounds {status['rounds_committed']} committed "
        f"{status['rounds_skipped']} skipped, versions {'/'.join(map(str, status['versions']))}"
    )
    useful = status["tokens_useful"] / max(status["tokens_processed"], 1)
    lines.append(
        f"alive {len(status['alive'])}, participating {len(status['participating'])}, useful "
        f"{100 * useful:.1f} % of {status['tokens_processed']:,} tokens"
    )
    lines.append(
        f"bytes up {human_bytes(status['bytes_up'])}, down {human_bytes(status['bytes_down'])}"
    )
    if evaluations:
        first, newest = evaluations[0]["val_loss"], evaluations[-1]["val_loss"]
        lines.append(f"validation loss {newest:.4f} (began at {first:.4f})")
    if last is not None:
        left_out = [v for v in last["verdicts"] if v["outcome"] != "merged"]
        lines.append(
            f"round {last['round']} {last['outcome']}: {last['quorum_reason']}; grace "
            f"{last['grace_s']:.3f} s"
        )
        lines += [f"  {v['learner']} {v['outcome']}: {v['reason']}" for v in left_out[:4]]
    return lines


def screen(
    run: dict[str, Any],
    evaluations: Sequence[dict[str, Any]],
    last: dict[str, Any] | None,
    messages: Sequence[str],
) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = [Text(line) for line in run_lines(run, evaluations, last)]
    if run["status"] is not None:
        parts += [Text(""), learners_table(run["status"])]
    if messages:
        parts += [Text(""), *(Text(m, style="dim") for m in list(messages)[-6:])]
    return Group(*parts)
