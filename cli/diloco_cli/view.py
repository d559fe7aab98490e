"""What is shown of a run: who does what, how the rounds go, what has been achieved."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diloco_cli.api import Unread
from diloco_cli.lines import shaped
from diloco_cli.report import data_parallel_bytes, goodput
from diloco_cli.seen import Seen
from diloco_cli.tally import activities
from diloco_cli.words import became, counted, plain, reason_of
from diloco_shared.budget.terms import shown

_STATE_STYLE = {
    "stepping": "green",
    "finished": "green",
    "down": "red",
    "recovering": "yellow",
    "joining": "yellow",
    "paused": "cyan",
    "draining": "cyan",
}
# Of the newest round, and of the supervisor's messages: what fits below the table.
_VERDICTS_SHOWN = 4
_MESSAGES_SHOWN = 6
# Of what happened to learners: below the table, where the longest text takes no room from a figure.
_EVENTS_SHOWN = 4
# Of an island's hosts: those that it waits for.
_HOSTS_SHOWN = 4


def state_line(run: dict[str, Any]) -> str:
    """A run's state and the reason for it, which may begin with the state."""
    state, reason = str(run["state"]), reason_of(str(run["reason"]))
    why = reason if reason.startswith(state) else f"{state} - {reason}"
    return f"run {run['name']}: {why}"


def run_lines(
    run: dict[str, Any],
    evaluations: Sequence[dict[str, Any]],
    last: dict[str, Any] | None,
    useful_time: float | None = None,
) -> list[str]:
    """The run in a few lines of plain text; `last` is its newest round, `useful_time` goodput."""
    status = run["status"]
    lines = [state_line(run)]
    if status is None:
        return lines
    if run.get("waiting"):
        lines.append(f"waiting: {run['waiting']}")  # its syncer may be silent, and not know
    lines += [*_progress_lines(status), _learners_line(status), *token_lines(status)]
    if run.get("syncers"):
        lines.append(_syncers_line(run, status))
    if len(run.get("releases") or ()) > 1:
        lines.append(releases_line(run["releases"]))
    if evaluations:
        # The first that is kept, which need not be the run's first.
        first, newest = evaluations[0], evaluations[-1]
        line = f"validation loss: it is {newest['val_loss']:.4f} after {newest['steps']} steps"
        was = f", and was {first['val_loss']:.4f} after {first['steps']}"
        lines.append(line + (was if first is not newest else ""))
        if each := evaluations[-1].get("each"):
            lines.append(f"  by corpus: {per_corpus(each)}")
    if run.get("speeds"):
        lines.append(speeds_line(run["speeds"]))
    lines.append(_bytes_line(status))
    if useful_time is not None:
        lines.append(
            f"goodput: {100 * useful_time:.1f} % of the learners' time went into useful tokens"
        )
    if status["refused"]:
        refused = ", ".join(f"{kind} {count}" for kind, count in status["refused"].items())
        lines.append(f"contributions refused: {refused}")
    if last is not None:
        lines += _round_lines(last)
    return lines


def unread_lines(unread: Unread | None) -> list[str]:
    """That the rounds could not be read, and why; none where they were."""
    if unread is None:
        return []
    return [f"the rounds cannot be read{' now' if unread.passes else ''}: {unread.why}"]


def per_corpus(each: dict[str, float]) -> str:
    """The losses on the corpora of a mixture."""
    return ", ".join(f"{name} {loss:.4f}" for name, loss in each.items())


def _progress_lines(status: dict[str, Any]) -> list[str]:
    done, skipped = status["rounds_committed"], status["rounds_skipped"]
    return [
        f"progress: {100 * max(status['stamp']['fraction'], 0.0):.1f} % of the run is done; "
        f"{counted(done, 'round')} {_was(done)} committed, and {skipped} {_was(skipped)} skipped",
        f"fragments: {_versions(status['versions'])}; a merge of one needs contributions of "
        f"{counted(status['quorum'], 'learner')} (the quorum)",
    ]


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _learners_line(status: dict[str, Any]) -> str:
    """Alive is one thing, and to take part in merges another."""
    alive, part = len(status["alive"]), len(status["participating"])
    return (
        f"learners: {alive} {'is' if alive == 1 else 'are'} alive, and {part} "
        f"{'takes' if part == 1 else 'take'} part in merges"
    )


def token_lines(status: dict[str, Any]) -> list[str]:
    """How many were useful, what became of every one (docs/how-to/recover.md), and how many are
    read again."""
    processed = status["tokens_processed"]
    lines = [f"tokens: {processed:,} were processed"]
    if processed:
        lines[0] += f", and {100 * status['tokens_useful'] / processed:.1f} % were useful"
    became = [f"{k.replace('_', ' ')} {v:,}" for k, v in (status.get("tokens") or {}).items()]
    if became:
        again = status.get("tokens_reread", 0)
        told = f"; {again:,} are read again" if again else ""
        lines.append(f"  of them: {', '.join(became)}{told}")
    return lines


def _syncers_line(run: dict[str, Any], status: dict[str, Any]) -> str:
    """Who leads, and who could take over.

    The status is its leader's word, and a new leader works a moment before it has told one: then
    the status names the one before, or nobody. Of several shards it names the first one's.
    """
    named, syncers = status["leader"], run["syncers"]
    parts = [_syncer(s) for s in syncers if s["id"] != named]
    leading = [s["id"] for s in syncers if s["state"] == "leading"]
    if any(s["id"] == named and s["state"] == "gone" for s in syncers):
        parts.insert(0, f"{named} led in term {status['term']}, and is gone")
    elif named:
        parts.insert(0, f"{named} leads in term {status['term']}")
    elif not leading:
        parts.insert(0, "nobody leads yet")
    if all(s["id"] in (named, *leading) for s in syncers):
        parts.append("nobody stands by")
    return f"syncers: {'; '.join(parts)}"


def _syncer(s: dict[str, Any]) -> str:
    """One that the status does not name."""
    why = f" ({s['reason']})" if s["reason"] else ""
    if s["state"] == "leading":
        return f"{s['id']} leads shard {s['shard']}" if s.get("shard") else f"{s['id']} takes over"
    behind = f", {counted(s['lag_records'], 'record')} behind" if s["lag_records"] else ""
    does = f"stands by{behind}" if s["state"] == "standby" else f"is {s['state']}"
    return f"{s['id']} {does}{why}"


def releases_line(releases: Mapping[str, Sequence[str]]) -> str:
    """Who runs what, while an upgrade goes on."""
    each = (f"{version}: {', '.join(ids)}" for version, ids in sorted(releases.items()))
    return f"releases: {'; '.join(each)}"


def _bytes_line(status: dict[str, Any]) -> str:
    learner_steps = status["tokens_processed"] / max(status["tokens_per_step"], 1)
    instead = data_parallel_bytes(learner_steps, len(status["learners"]), status["parameters"])
    return (
        f"network: {shown(status['bytes_up'])} went up to the syncers, and "
        f"{shown(status['bytes_down'])} came down; data-parallel training would have sent "
        f"{shown(instead)}"
    )


def _round_lines(last: dict[str, Any]) -> list[str]:
    left_out = [v for v in last["verdicts"] if v["outcome"] != "merged"]
    return [
        f"round {last['round']} was {last['outcome']}: {reason_of(last['reason'])}",
        f"  {reason_of(last['quorum_reason'], past=True)}; it waited {last['grace_s']:.2f} s more "
        "for late learners (the grace window)",
        *(f"  {became(v)}" for v in left_out[:_VERDICTS_SHOWN]),
    ]


def _versions(versions: Sequence[int]) -> str:
    low, high = min(versions, default=-1), max(versions, default=-1)
    if high < 0:
        return "they have no version yet"
    return f"all are at version {low}" if low == high else f"they are at versions {low} to {high}"


# Columns of a terminal from which on there is room for how well a learner's devices are used, and
# for what they are.
_WIDE, _WIDEST = 110, 150


@dataclass(frozen=True, slots=True)
class LearnersTable:
    """One line per learner: of at most 76 columns, or of more where the terminal has more."""

    learners: Mapping[str, dict[str, Any]]
    speeds: Mapping[str, dict[str, Any]]  # of those whose speed is known

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.of(options.max_width)

    def of(self, width: int) -> Table:
        """As it is in so many columns."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("learner", "state"):
            table.add_column(name, no_wrap=True)
        names = ["life", "step", "loss", "tokens/s", "waited s", "merged in"]
        names += ["MFU", "data wait", "memory"] if width >= _WIDE else []
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        if width >= _WIDEST:
            table.add_column("devices", no_wrap=True)
        for name, learner in sorted(self.learners.items()):
            speed = self.speeds.get(name, {})
            cells = [*_work(learner, speed), *_use(speed), _devices(speed)]
            table.add_row(*map(_cell, [name, *cells][: len(table.columns)]))
        return table


def _cell(shown: str | Text) -> Text:
    """A text as it stands, in one line: what sites send must give neither rich nor a terminal
    orders, and rich takes what stands in brackets for its own."""
    text, style = (shown.plain, shown.style) if isinstance(shown, Text) else (shown, "")
    return Text(" ".join(plain(text).split()), style)


def learners_table(run: dict[str, Any]) -> LearnersTable:
    """Of a run that has a status."""
    return LearnersTable(run["status"]["learners"], run.get("speeds") or {})


def _work(learner: dict[str, Any], speed: dict[str, Any]) -> list[str | Text]:
    state = str(learner.get("state", "?"))
    loss, merged = learner.get("loss"), learner.get("merged_round", -1)
    # Its own word is of its newest steps; without one there is what its syncer counts.
    tokens = speed.get("tokens_per_s") or learner.get("tokens_per_s") or 0.0
    return [
        Text(state, style=_STATE_STYLE.get(state, "")),
        str(learner.get("incarnation", "")),
        str(learner.get("step", "")),
        "" if loss is None else f"{loss:.3f}",
        f"{tokens:.0f}" if learner.get("alive") else "",
        f"{learner.get('wait_s', 0.0):.3f}",
        "" if merged < 0 else f"round {merged}",
    ]


def _use(speed: dict[str, Any]) -> list[str]:
    """How well its devices are used; "-" for what nobody knows."""
    return [
        _mfu(speed),
        share(speed.get("data_wait_ratio")),
        shown(speed["memory_bytes"]) if speed else "-",
    ]


def _mfu(speed: dict[str, Any]) -> str:
    about = "~" if speed.get("flops_estimated") and speed.get("mfu") is not None else ""
    return about + share(speed.get("mfu"))


def _devices(speed: dict[str, Any]) -> str:
    return f"{speed['devices']} x {speed['device']}" if speed else "-"


def share(ratio: float | None) -> str:
    """A share in percent; "-" if it is not known."""
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def speed_lines(speed: dict[str, Any]) -> list[str]:
    """How fast one learner trains, and in how much memory."""
    tokens, limit = speed["tokens_per_s"], speed["memory_limit_bytes"]
    waits, mfu = speed["data_wait_ratio"], speed["mfu"]
    unknown = "its speed is not known yet"
    parts = [unknown if tokens is None else f"it trains {tokens:,.0f} tokens/s"]
    parts += [] if waits is None else [f"it waits {share(waits)} of the time for data"]
    parts += [] if mfu is None else [f"it reaches {_mfu(speed)} of the devices' peak (MFU)"]
    of = f" of {shown(limit)}" if limit else ""
    return [
        f"{_devices(speed)}: {', '.join(parts)}",
        f"{speed['memory_of']} memory: {shown(speed['memory_bytes'])}{of} are in use, and at most "
        f"{shown(speed['memory_peak_bytes'])} were",
        *_late_hosts(speed.get("hosts") or {}),
    ]


def _late_hosts(late_s: Mapping[str, float]) -> list[str]:
    """Of an island of several hosts: how late each takes up a step, the latest first."""
    if not late_s:
        return []
    slowest = sorted(late_s.items(), key=lambda item: -item[1])[:_HOSTS_SHOWN]
    late = ", ".join(f"{host} by {s:.3f} s" for host, s in slowest)
    return [f"hosts that begin a step late: {late}"]


def speeds_line(speeds: Mapping[str, dict[str, Any]]) -> str:
    """How fast all learners of a run train together; the worst use of devices with its learner."""
    rates = [s["tokens_per_s"] for s in speeds.values() if s["tokens_per_s"] is not None]
    known = {n: s["mfu"] for n, s in speeds.items() if s["mfu"] is not None}
    waits = {n: s["data_wait_ratio"] or 0.0 for n, s in speeds.items()}
    held = {n: s["memory_bytes"] for n, s in speeds.items()}
    waits_most, holds_most = max(waits, key=waits.__getitem__), max(held, key=held.__getitem__)
    trains = "trains" if len(speeds) == 1 else "train"
    line = (
        f"speed: {counted(len(speeds), 'learner')} {trains} {sum(rates):,.0f} tokens/s; "
        f"{waits_most} waits most for data, {share(waits[waits_most])} of its time; "
        f"{holds_most} holds most memory, {shown(held[holds_most])}"
    )
    if not known:
        return f"{line}; what share of their devices' peak they reach (MFU) is not known"
    slow = min(known, key=known.__getitem__)
    return f"{line}; {slow} uses its devices least, {_mfu(speeds[slow])} of their peak (MFU)"


def event_lines(events: Sequence[dict[str, Any]]) -> list[str]:
    """What happened last to learners, newest last; evaluations are about the run."""
    told = [e for e in events if e["kind"] not in ("evaluation", "refused")]
    return [_event_line(e) for e in told[-_EVENTS_SHOWN:]]


def _event_line(event: dict[str, Any]) -> str:
    at, data, text = (
        time.strftime("%H:%M:%S", time.localtime(event["at"])),
        event["data"],
        event["text"],
    )
    about = str(data.get("learner") or data.get("target") or event["source"])
    return f"{at} {text}" if about in text else f"{at} {about}: {text}"


def lines(seen: Seen) -> list[str]:
    """Everything about the run but the learners, as plain text."""
    last = seen.rounds[-1] if seen.rounds else None
    newest_at = None if last is None else float(last["at"])
    participating = seen.status.get("participating", ())
    merged = {} if newest_at is None else dict.fromkeys(participating, newest_at)
    spans = activities(seen.run, newest_at, seen.events, merged)
    useful_time = goodput(seen.status, spans, newest_at)
    return [
        *run_lines(seen.run, seen.evaluations, last, useful_time),
        *unread_lines(seen.unread),
    ]


@dataclass(frozen=True, slots=True)
class Shaped:
    """Lines of text, cut between words as elsewhere."""

    lines: Sequence[str]
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in shaped(self.lines, options.max_width):
            yield Text(line, style=self.style)


def screen(seen: Seen | None, messages: Sequence[str] = ()) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = []
    if seen is not None and seen.run:
        parts.append(Shaped(lines(seen)))
        if seen.status:
            parts += [Text(""), learners_table(seen.run)]
            parts += [Text(""), Shaped(event_lines(seen.events))]
    if messages:
        parts += [Text(""), Shaped(list(messages)[-_MESSAGES_SHOWN:], style="dim")]
    return Group(*parts)
