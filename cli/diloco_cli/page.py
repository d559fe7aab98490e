"""The report as one self-contained page: figures, loss curve, learner lanes with the fault."""

import html
import json
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from diloco_cli.lanes import Span
from diloco_cli.tally import Rows, Tally, activities

_OUTCOMES = {"merged": "#2a7de1", "missed": "#e69f00", "refused": "#d62728", "ineligible": "#bbb"}
_ACTIVITIES = {
    "stepping": "#2ca02c",
    "paused": "#8c9eb2",
    "joining": "#bbbbbb",
    "recovering": "#e69f00",
    "hung": "#9467bd",
    "down": "#d62728",
}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#222}
h1{font-size:1.5rem}h2{font-size:1.15rem}ul{list-style:none;padding:0}li::before{margin-right:.6rem}
li.yes::before{content:"\\2713";color:#2ca02c}li.no::before{content:"\\2717";color:#d62728}
th{text-align:left;padding-right:2rem;font-weight:500;vertical-align:top}
td{font-variant-numeric:tabular-nums}
"""
# Figures that have a table of their own.
_TABLES = ("tokens", "tokens_by_fragment", "recoveries", "story")
_FORMULA = (
    "Data-parallel equivalent: a ring all-reduce of bf16 gradients at every step sends "
    "2 (M - 1) / M * N * 2 bytes per learner and step. Goodput: share of the allocated time in "
    "which learners were stepping, times the share of processed tokens that were merged."
)


def page(
    figures: dict[str, Any],
    run: dict[str, Any],
    tally: Tally,
    events: Rows,
    promises: Sequence[tuple[str, bool]] = (),
) -> str:
    """HTML that needs nothing from elsewhere."""
    title = html.escape(f"Run {figures['run']}")
    kept = "".join(
        f"<li class={'yes' if good else 'no'}>{html.escape(text)}</li>" for text, good in promises
    )
    rows = "".join(
        f"<tr><th>{html.escape(k)}<td>{html.escape(_text(v))}"
        for k, v in figures.items()
        if k not in _TABLES
    )
    chart = _chart(run, tally, events).to_html(full_html=False, include_plotlyjs=True)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>"
        f"<ul>{kept}</ul>{chart}{_left_out(tally)}<table>{rows}</table><p>{html.escape(_FORMULA)}</p>"
        f"{_ledger(figures)}{_recoveries(figures)}</html>"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A heading and a table; nothing if there are no rows."""
    if not rows:
        return ""
    names = "".join(f"<th>{html.escape(name)}" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_text(cell))}" for cell in row) for row in rows
    )
    return f"<h2>{html.escape(title)}</h2><table><tr>{names}{body}</table>"


def _ledger(figures: dict[str, Any]) -> str:
    """What became of every token: the run, then each fragment."""
    run = figures.get("tokens") or {}
    rows = [["the run", *run.values(), sum(run.values())]] if run else []
    for p, tokens in enumerate(figures.get("tokens_by_fragment", [])):
        rows.append([f"fragment {p}", *tokens.values(), sum(tokens.values())])
    head = ["", *(name.replace("_", " ") for name in run), "processed"]
    return _table("What became of every token", head, rows)


def _recoveries(figures: dict[str, Any]) -> str:
    """Seconds per phase of everybody who came back or came new."""
    found = figures.get("recoveries") or []
    names = list(found[0]["phases_s"]) if found else []
    rows = [
        [r["learner"], r["incarnation"], r["donor"] or r["source"], r["rounds"]]
        + [r["phases_s"][name] for name in names]
        for r in found
    ]
    head = ["learner", "life", "moments of", "rounds", *(f"{n.replace('_', ' ')} s" for n in names)]
    return _table("Recoveries", head, rows)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _left_out(tally: Tally) -> str:
    """Which points the chart of rounds lacks; nothing if it has them all."""
    thinned = {o: t for o, t in tally.verdicts.items() if t.every > 1}
    if not thinned:
        return ""
    shown = ", ".join(f"one in {t.every:,} of those {o}" for o, t in thinned.items())
    return f"<p>{html.escape(f'The run has many rounds: the chart shows {shown}.')}</p>"


def _chart(run: dict[str, Any], tally: Tally, events: Rows) -> Any:
    """Three rows over one time axis."""
    spans = activities(run, tally.newest_at, events, tally.merged)
    began = min((s.began for lane in spans.values() for s in lane), default=0.0)
    height = 26 * max(len(spans), 1)
    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        row_heights=[340, height + 30, height + 30],
        vertical_spacing=0.09,
        subplot_titles=(
            "Validation loss of the published parameters (nats per token)",
            "What each learner was doing",
            "What became of each learner in each round",
        ),
    )
    _loss(figure, events, began)
    _lanes(figure, spans, began)
    _verdicts(figure, tally, began)
    for event in events:
        if event["kind"] == "fault-applied":
            _mark(figure, event, began)
    order = {"autorange": "reversed", "categoryorder": "array", "categoryarray": sorted(spans)}
    figure.update_yaxes(row=2, col=1, **order)
    figure.update_yaxes(row=3, col=1, **order)
    figure.update_xaxes(title_text="seconds since the first learner joined", row=3, col=1)
    figure.update_layout(
        height=560 + 2 * height,
        template="plotly_white",
        barmode="overlay",
        legend={"orientation": "h", "y": -0.14},
        margin={"l": 90, "r": 20, "t": 50},
    )
    return figure


def _mark(figure: Any, event: dict[str, Any], began: float) -> None:
    """A dashed line through all rows, named once."""
    data = event["data"]
    for row in (1, 2, 3):
        name = {"annotation_text": f"{data['kind']} {data['target']}"} if row == 1 else {}
        figure.add_vline(
            x=event["at"] - began, row=row, col=1, line={"color": "#d62728", "dash": "dash"}, **name
        )


def _loss(figure: Any, events: Rows, began: float) -> None:
    made = [(e["at"] - began, e["data"]) for e in events if e["kind"] == "evaluation"]
    trace = go.Scatter(
        x=[at for at, _ in made],
        y=[data["val_loss"] for _, data in made],
        mode="lines+markers",
        line={"color": "#222"},
        name="validation loss",
        showlegend=False,
    )
    figure.add_trace(trace, row=1, col=1)
    for name in dict.fromkeys(name for _, data in made for name in data.get("each", {})):
        points = [(at, data["each"][name]) for at, data in made if name in data.get("each", {})]
        trace = go.Scatter(
            x=[at for at, _ in points],
            y=[loss for _, loss in points],
            mode="lines",
            line={"dash": "dot"},
            name=f"validation loss, {name}",
        )
        figure.add_trace(trace, row=1, col=1)


def _lanes(figure: Any, spans: dict[str, list[Span]], began: float) -> None:
    everything = [s for lane in spans.values() for s in lane]
    for activity, colour in _ACTIVITIES.items():
        chosen = [s for s in everything if s.activity == activity]
        if chosen:
            trace = go.Bar(
                orientation="h",
                y=[s.learner for s in chosen],
                base=[s.began - began for s in chosen],
                x=[s.ended - s.began for s in chosen],
                marker={"color": colour},
                name=activity,
                hovertemplate="%{y} " + activity + " for %{x:.1f} s<extra></extra>",
            )
            figure.add_trace(trace, row=2, col=1)


def _verdicts(figure: Any, tally: Tally, began: float) -> None:
    for outcome, colour in _OUTCOMES.items():
        if points := tally.verdicts[outcome].kept:
            trace = go.Scatter(
                x=[at - began for at, _, _ in points],
                y=[learner for _, learner, _ in points],
                text=[text for _, _, text in points],
                mode="markers",
                marker={"color": colour, "symbol": "line-ns-open", "size": 14},
                name=outcome,
            )
            figure.add_trace(trace, row=3, col=1)
