"""The report as one self-contained page: figures, loss curve, learner lanes with the fault."""

import html
import json
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

_COLOURS = {"merged": "#2a7de1", "missed": "#e69f00", "refused": "#d62728", "ineligible": "#bbbbbb"}


def page(
    figures: dict[str, Any], rounds: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]]
) -> str:
    """HTML that needs nothing from elsewhere."""
    began = rounds[0]["at"] if rounds else 0.0
    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.6, 0.4],
        vertical_spacing=0.08,
        subplot_titles=(
            "Validation loss of the published parameters (nats per token)",
            "What became of each learner in each round",
        ),
    )
    _loss(figure, events, began)
    _lanes(figure, rounds, began)
    for e in events:
        if e["kind"] == "fault-applied":
            figure.add_vline(
                x=e["at"] - began,
                line={"color": "#d62728", "dash": "dash"},
                annotation_text=f"{e['data']['kind']} {e['data']['target']}",
            )
    figure.update_xaxes(title_text="seconds since the first round", row=2, col=1)
    figure.update_layout(height=720, template="plotly_white", legend={"orientation": "h"})
    chart = figure.to_html(full_html=False, include_plotlyjs=True)
    rows = "".join(
        f"<tr><th>{html.escape(k)}</th><td>{html.escape(_text(v))}</td></tr>"
        for k, v in figures.items()
    )
    title = html.escape(f"Run {figures['run']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:15px system-ui;margin:2rem auto;max-width:64rem;padding:0 1rem}"
        "th{text-align:left;padding-right:2rem;font-weight:500}"
        f"</style><h1>{title}</h1>{chart}<table>{rows}</table></html>"
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _loss(figure: Any, events: Sequence[dict[str, Any]], began: float) -> None:
    points = [(e["at"] - began, e["data"]["val_loss"]) for e in events if e["kind"] == "evaluation"]
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers",
            name="validation loss",
        ),
        row=1,
        col=1,
    )


def _lanes(figure: Any, rounds: Sequence[dict[str, Any]], began: float) -> None:
    for outcome, colour in _COLOURS.items():
        points = [
            (r["at"] - began, v["learner"], f"round {r['round']}: {v['reason']}")
            for r in rounds
            for v in r["verdicts"]
            if v["outcome"] == outcome
        ]
        if points:
            figure.add_trace(
                go.Scatter(
                    x=[p[0] for p in points],
                    y=[p[1] for p in points],
                    text=[p[2] for p in points],
                    mode="markers",
                    marker={"color": colour, "symbol": "line-ns-open", "size": 12},
                    name=outcome,
                ),
                row=2,
                col=1,
            )
