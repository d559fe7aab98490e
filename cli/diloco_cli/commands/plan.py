"""`diloco plan`: settings for hardware and links that one may not have yet."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from diloco_cli.commands.options import Json, show
from diloco_cli.plan_lines import plan_lines
from diloco_cli.run_file import of_plan
from diloco_cli.words import INVALID, CliError, why
from diloco_planner.plan_request import PlanRequest
from diloco_planner.planner import Infeasible, plan, sensitivity

app = typer.Typer()


def _planned(*, as_json: bool, write: Path | None, **given: Any) -> None:
    """Settings for a run from model, chips, links and failures, each with its reason.

    Closed forms: see docs/results/planner.md for what they rest on. Needs no cluster.
    """
    try:
        request = PlanRequest.model_validate(given)
        found = plan(request) | {"sensitivity": sensitivity(request)}
    except ValidationError as error:
        faults = [f"{_option(str(e['loc'][0]))}: {e['msg']}" for e in error.errors()]
        raise CliError("; ".join(faults), INVALID) from None
    except Infeasible as error:
        raise CliError(f"no settings do: {error}", INVALID) from None
    if write is not None:
        _written(write, of_plan(found, request.params))
    show(found, as_json, lambda: plan_lines(found, write))


def _written(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:  # nobody's file is overwritten
            file.write(text)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {why(error)}", INVALID) from None


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


_OPTIONS = [_parameter(name, field) for name, field in PlanRequest.model_fields.items()]
_JSON = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
_WRITE = inspect.Parameter(
    "write",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None, typer.Option("--write", help="Write a run of these settings to this new file.")
    ],
)
_ALL = (*_OPTIONS, _WRITE, _JSON)
_planned.__signature__ = inspect.Signature(list(_ALL))  # type: ignore[attr-defined]
_planned.__annotations__ = {p.name: p.annotation for p in _ALL}
app.command("plan")(_planned)
