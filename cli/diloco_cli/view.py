"""What is shown of a run: who does what, how the rounds go, what has been achieved."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from diloco_cli.report import activities, data_parallel_bytes, goodput
from diloco_cli.seen import Seen
from diloco_cli.words import became, counted, plain
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
    state, reason = str(run["state"]), str(run["reason"])
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
    stamp = status["stamp"]
    lines.append(
        f"progress {100 * max(stamp['fraction'], 0.0):.1f} %, rounds "
        f"{status['rounds_committed']} committed {status['rounds_skipped']} skipped, versions "
        f"{_range(status['versions'])}, quorum {status['quorum']}"
    )
    lines.append(_three_numbers(status))
    if status.get("tokens"):
        lines.append(ledger_line(status))
    if run.get("syncers"):
        lines.append(_syncers_line(run, status))
    if len(run.get("releases") or ()) > 1:
        lines.append(releases_line(run["releases"]))
    if evaluations:
        first, newest = evaluations[0]["val_loss"], evaluations[-1]["val_loss"]
        lines.append(
            f"validation loss {newest:.4f} after {evaluations[-1]['steps']} steps "
            f"(began at {first:.4f})"
        )
        if each := evaluations[-1].get("each"):
            lines.append(f"by corpus: {per_corpus(each)}")
    if run.get("speeds"):
        lines.append(speeds_line(run["speeds"]))
    lines.append(_bytes_line(status))
    if useful_time is not None:
        lines.append(f"goodput {100 * useful_time:.1f} % of the learners' time")
    if status["refused"]:
        refused = ", ".join(f"{kind} {count}" for kind, count in status["refused"].items())
        lines.append(f"refused: {refused}")
    if last is not None:
        lines += _round_lines(last)
    return lines


def per_corpus(each: dict[str, float]) -> str:
    """The losses on the corpora of a mixture."""
    return ", ".join(f"{name} {loss:.4f}" for name, loss in each.items())


def _three_numbers(status: dict[str, Any]) -> str:
    """Alive, participating and useful: three different things, told apart."""
    useful = status["tokens_useful"] / max(status["tokens_processed"], 1)
    return (
        f"alive {len(status['alive'])}, participating {len(status['participating'])}, useful "
        f"{100 * useful:.1f} % of {status['tokens_processed']:,} tokens"
    )


def ledger_line(status: dict[str, Any]) -> str:
    """What became of every token (docs/how-to/recover.md), and how many are read again."""
    became = ", ".join(f"{k.replace('_', ' ')} {v:,}" for k, v in status["tokens"].items())
    again = status.get("tokens_reread", 0)
    return f"tokens: {became}" + (f"; read again {again:,}" if again else "")


def _syncers_line(run: dict[str, Any], status: dict[str, Any]) -> str:
    """Who leads, and who could take over."""
    others = [s for s in run["syncers"] if s["id"] != status["leader"]]
    led = f"led by {status['leader']}, term {status['term']}"
    line = led if status["leader"] else "nobody leads yet"
    for s in others:
        behind = f", {counted(s['lag_records'], 'record')} behind" if s["lag_records"] else ""
        line += f"; {s['id']} {s['state']}{behind if s['state'] == 'standby' else ''}"
        line += f" ({s['reason']})" if s["reason"] else ""
    return line if others else f"{line}; nobody stands by"


def releases_line(releases: Mapping[str, Sequence[str]]) -> str:
    """Who runs what, while an upgrade goes on."""
    each = (f"{version}: {', '.join(ids)}" for version, ids in sorted(releases.items()))
    return f"releases: {'; '.join(each)}"


def _bytes_line(status: dict[str, Any]) -> str:
    learner_steps = status["tokens_processed"] / max(status["tokens_per_step"], 1)
    instead = data_parallel_bytes(learner_steps, len(status["learners"]), status["parameters"])
    return (
        f"bytes up {shown(status['bytes_up'])}, down {shown(status['bytes_down'])}; "
        f"data-parallel would have sent {shown(instead)}"
    )


def _round_lines(last: dict[str, Any]) -> list[str]:
    left_out = [v for v in last["verdicts"] if v["outcome"] != "merged"]
    return [
        f"round {last['round']} {last['outcome']}: {last['quorum_reason']}; "
        f"grace {last['grace_s']:.2f} s; {last['reason']}",
        *(f"  {became(v)}" for v in left_out[:_VERDICTS_SHOWN]),
    ]


def _range(versions: Sequence[int]) -> str:
    low, high = min(versions, default=-1), max(versions, default=-1)
    return "none" if high < 0 else str(low) if low == high else f"{low} to {high}"


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
            table.add_row(name, *cells[: len(table.columns) - 1])
        return table


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
    rate = "-" if tokens is None else f"{tokens:,.0f}"
    of = f" of {shown(limit)}" if limit else ""
    return [
        f"{_devices(speed)}: {rate} tokens/s, MFU {_mfu(speed)}, data wait "
        f"{share(speed['data_wait_ratio'])}",
        f"{speed['memory_of']} memory {shown(speed['memory_bytes'])}{of}, at most "
        f"{shown(speed['memory_peak_bytes'])} so far",
        *_late_hosts(speed.get("hosts") or {}),
    ]


def _late_hosts(late_s: Mapping[str, float]) -> list[str]:
    """Of an island of several hosts: how late each takes up a step, the latest first."""
    if not late_s:
        return []
    slowest = sorted(late_s.items(), key=lambda item: -item[1])[:_HOSTS_SHOWN]
    return ["begins a step late: " + ", ".join(f"{host} by {s:.3f} s" for host, s in slowest)]


def speeds_line(speeds: Mapping[str, dict[str, Any]]) -> str:
    """How fast all learners of a run train together; the worst use of devices with its learner."""
    rates = [s["tokens_per_s"] for s in speeds.values() if s["tokens_per_s"] is not None]
    known = {n: s["mfu"] for n, s in speeds.items() if s["mfu"] is not None}
    waits = {n: s["data_wait_ratio"] or 0.0 for n, s in speeds.items()}
    held = {n: s["memory_bytes"] for n, s in speeds.items()}
    slow, waits_most, holds_most = (
        min(known, key=known.__getitem__, default=""),
        max(waits, key=waits.__getitem__),
        max(held, key=held.__getitem__),
    )
    return (
        f"speed: {sum(rates):,.0f} tokens/s of {counted(len(speeds), 'learner')}; lowest MFU "
        + (f"{_mfu(speeds[slow])} ({slow})" if slow else "-")
        + f"; most data wait {share(waits[waits_most])} ({waits_most}); most memory "
        f"{shown(held[holds_most])} ({holds_most})"
    )


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
    spans = activities(seen.run, seen.rounds, seen.events)
    useful_time = goodput(seen.status, spans, seen.rounds)
    return run_lines(seen.run, seen.evaluations, last, useful_time)


def screen(seen: Seen | None, messages: Sequence[str] = ()) -> RenderableType:
    """Everything, for a terminal."""
    parts: list[RenderableType] = []
    if seen is not None and seen.run:
        parts += [Text(plain(line)) for line in lines(seen)]
        if seen.status:
            parts += [Text(""), learners_table(seen.run)]
            parts += [Text(""), *(Text(plain(line)) for line in event_lines(seen.events))]
    if messages:
        parts += [
            Text(""),
            *(Text(plain(m), style="dim") for m in list(messages)[-_MESSAGES_SHOWN:]),
        ]
    return Group(*parts)
