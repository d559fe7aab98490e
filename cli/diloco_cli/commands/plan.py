"""`diloco plan`: settings for hardware and links that one may not have yet."""

import inspect
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from diloco_cli.commands.options import Json, show
from diloco_cli.faults import INVALID, CliError
from diloco_planner.planner import Infeasible, plan, sensitivity
from diloco_planner.wanted import Wishes

app = typer.Typer()

_SHOWN = ("days", "goodput", "gbit_per_s_link", "learners", "sync_every_steps", "codec_up")


def _planned(*, as_json: bool, **given: Any) -> None:
    """Settings for a run from model, chips, links and failures, each with its reason.

    Closed forms: see docs/claims.md for what they rest on. Needs no cluster.
    """
    try:
        wishes = Wishes.model_validate(given)
        found = plan(wishes) | {"sensitivity": sensitivity(wishes)}
    except ValidationError as error:
        faults = [f"{_option(str(e['loc'][0]))}: {e['msg']}" for e in error.errors()]
        raise CliError("; ".join(faults), INVALID) from None
    except Infeasible as error:
        raise CliError(f"no settings do: {error}", INVALID) from None
    show(found, as_json, lambda: _lines(found))


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{name:<18}{value!s:>8}  {found['reasons'].get(name, '')}"
        for name, value in found["settings"].items()
    ]
    for part in ("predicted", "hub", "budget_gb"):
        lines += ["", f"{part}:", *(f"  {k:<34}{v:>12.4g}" for k, v in found[part].items())]
    lines += ["", f"{'if instead':<24}" + "".join(f"{name:>17}" for name in _SHOWN)]
    for row in found["sensitivity"]:
        cells = "".join(f"{_short(row.get(name)):>17}" for name in _SHOWN)
        lines.append(f"{row['changed']:<24}" + row.get("error", cells))
    return [*lines, "", *found["notes"]]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """A wish as an option, with the wish's own text: neither can say what the other does not."""
    option = typer.Option(_option(name), help=field.description)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.is_required() else field.default,
        annotation=Annotated[field.annotation, option],
    )


_OPTIONS = [_parameter(name, field) for name, field in Wishes.model_fields.items()]
_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
_planned.__signature__ = inspect.Signature([*_OPTIONS, _JSON])  # type: ignore[attr-defined]
_planned.__annotations__ = {p.name: p.annotation for p in (*_OPTIONS, _JSON)}
app.command("plan")(_planned)
