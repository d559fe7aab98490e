"""Reference pages, made of what they describe: commands, settings, REST, messages, the client."""

import inspect
import sys
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from diloco_cli.commands import whole_app
from diloco_coordinator.app import Settings as CoordinatorSettings
from diloco_coordinator.app import create_app
from diloco_coordinator.exports.child_io import ChildExporter
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.exports.sampling_io import ChildSampler
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_coordinator.runs.registry_io import Registry
from diloco_learner.settings import Settings as LearnerSettings
from diloco_shared.protocol import messages, records
from diloco_shared.protocol.messages import Message
from diloco_shared.spec.algorithm import PRESETS
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.app import Settings as SyncerSettings
from diloco_syncer.rounds.round import MOVES, Phase

# What helps here lies beside this file, wherever it is run from.
sys.path.insert(0, str(Path(__file__).parent))

import python_client
import rest_answers
from round_diagram import diagram
from wire_fields import meanings

MADE = "This page is made from the program itself.\n"


def pages() -> dict[str, str]:
    """Text by place in the site."""
    return {
        "reference/commands.md": commands(),
        "reference/settings.md": settings(),
        "reference/processes.md": processes(),
        "reference/rest.md": rest(),
        "reference/client.md": python_client.page(MADE),
        "reference/messages.md": wire(),
        "reference/rounds.md": rounds(),
        "reference/round.svg": diagram([p.value for p in Phase], moves()),
    }


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in row) + " |" for row in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# --- commands -----------------------------------------------------------------------------------


def commands() -> str:
    """Every verb of `diloco`, with its options."""
    root = typer.main.get_command(whole_app())
    parts = ["# Commands", MADE, *_of_command(root, root.context_class(root, info_name="diloco"))]
    return "\n\n".join(parts) + "\n"


def _of_command(found: Any, context: Any) -> Iterator[str]:
    if hasattr(found, "commands"):
        for name, inner in sorted(found.commands.items()):
            below = inner.context_class(inner, info_name=name, parent=context)
            yield from _of_command(inner, below)
        return
    yield f"## {context.command_path}"
    yield inspect.cleandoc(found.help or "")
    usage = " ".join(found.collect_usage_pieces(context))
    yield f"```\n{context.command_path} {usage}\n```"
    rows = []
    for parameter in found.params:
        names = parameter.name or ""
        if parameter.param_type_name == "option":
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        default = parameter.default
        shown = "" if default in (None, False, "", (), []) or callable(default) else f"`{default}`"
        rows.append((f"`{names}`", shown, getattr(parameter, "help", "") or ""))
    if rows:
        yield table(("argument or option", "default", "meaning"), rows)


# --- settings -----------------------------------------------------------------------------------


def settings() -> str:
    """Every setting of a run, by its section of the file."""
    parts = [
        "# Settings of a run",
        MADE + "A run is a TOML file. `diloco config FILE` checks one and shows all defaults.",
        *_of_model("(top level)", RunSpec),
        "## Presets",
        "`algorithm.preset` fixes several settings together; each may still be given by itself.",
    ]
    for name, fixed in PRESETS.items():
        rows = [(f"`{key}`", f"`{value}`") for key, value in fixed.items()]
        parts += [f"### {name}", table(("setting", "value"), rows)]
    return "\n\n".join(parts) + "\n"


def _of_model(title: str, model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    rows, inner = [], []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner.append((f"{prefix}{name}", kind))
            continue
        rows.append((f"`{name}`", _default(field), f"`{_kind(field)}`", field.description or ""))
    yield f"## {title}"
    yield inspect.cleandoc(model.__doc__ or "")
    if rows:
        yield table(("setting", "default", "values", "meaning"), rows)
    for name, found in inner:
        yield from _of_model(f"[{name}]", found, f"{name}.")


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "empty"
    if field.default is PydanticUndefined:
        return "by preset, or required"
    return f"`{field.default}`" if field.default != "" else "empty"


def _kind(field: FieldInfo) -> str:
    """Type and limits, as a reader of the file needs them."""
    limits = " ".join(
        f"{sign} {getattr(limit, attribute)}"
        for limit in field.metadata
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(limit, attribute, None) is not None
    )
    return f"{_type(field.annotation)} {limits}".strip()


def _type(kind: Any) -> str:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (tuple, list, dict) and arguments:
        inner = ", ".join("…" if a is Ellipsis else _type(a) for a in arguments)
        return f"{origin.__name__} of ({inner})"
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in arguments)
    if type(None) in arguments:
        return " or ".join(_type(a) for a in arguments if a is not type(None))
    return (
        getattr(kind, "__name__", str(kind)) if not arguments else str(kind).replace("typing.", "")
    )


def processes() -> str:
    """Settings of each service's process, from its environment."""
    parts = [
        "# Settings of processes",
        MADE + "Each is read from the environment when the process starts.",
    ]
    for title, found in (
        ("diloco-coordinator", CoordinatorSettings),
        ("diloco-syncer", SyncerSettings),
        ("diloco-learner", LearnerSettings),
    ):
        rows = [
            (f"`DILOCO_{name.upper()}`", _default(f), f"`{_kind(f)}`", f.description or "")
            for name, f in found.model_fields.items()
        ]
        parts += [f"## {title}", table(("variable", "default", "values", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


# --- REST ---------------------------------------------------------------------------------------


def openapi() -> dict[str, Any]:
    """The OpenAPI description of a coordinator that offers everything."""
    registry = Registry(MemoryBus(MemoryBroker(), "reference"))
    exports = Exports(registry, Shelf(Path()), ChildExporter({}), kept_max=1, at_once=1)
    described: dict[str, Any] = create_app(
        registry,
        "token",
        chaos=True,
        checkpoints="",
        exports=exports,
        sampler=ChildSampler({}),
    ).openapi()
    return described


def rest() -> str:
    """Every route of the coordinator, from its OpenAPI description."""
    described = openapi()
    if wrong := rest_answers.unlike(described):
        raise LookupError(f"routes that site/rest_answers.py does not know, or alone: {wrong}")
    parts = [
        "# REST interface",
        MADE
        + "A coordinator serves the same as OpenAPI at `/openapi.json`. Bodies and answers are "
        "JSON unless another form is named. Errors are problem details (RFC 9457): `title`, "
        "`status`, and a `detail` that says what is wrong and what to do. "
        "[What answers are made of](#what-answers-are-made-of) stands at the end.",
    ]
    for path, verbs in described["paths"].items():
        for verb, route in verbs.items():
            parts.append(f"## {verb.upper()} {path}")
            parts.append(inspect.cleandoc(route.get("description") or route.get("summary", "")))
            rows = [
                (f"`{p['name']}`", p["in"], f"`{p.get('schema', {}).get('type', '')}`", _about(p))
                for p in route.get("parameters", [])
            ]
            if rows:
                parts.append(table(("parameter", "in", "type", "meaning"), rows))
            parts += _body(route, described["components"]["schemas"])
            answer = rest_answers.ANSWERS.get(f"{verb.upper()} {path}", "nothing")
            statuses = ", ".join(sorted(route.get("responses", {})))
            parts.append(f"Answer: {answer}. Statuses: {statuses}.")
    parts.append("## What answers are made of")
    for title, fields in rest_answers.things():
        parts += [f"### {rest_answers.titled(title)}", table(("field", "meaning"), fields)]
    for title, text in rest_answers.RECORDS.items():
        parts += [f"### {rest_answers.titled(title)}", text]
    return "\n\n".join(parts) + "\n"


def _body(route: dict[str, Any], schemas: dict[str, Any]) -> Iterator[str]:
    """What a request carries, if it carries anything."""
    for content in route.get("requestBody", {}).get("content", {}).values():
        options = content["schema"].get("anyOf", [content["schema"]])
        schema, name = options[0], options[0].get("$ref", "").rpartition("/")[2]
        schema = schemas[name] if name else schema
        if "properties" not in schema:
            yield "Body: [the settings of a run](settings.md), as a JSON object."
            continue
        about = schema.get("description", "")
        yield f"Body{' (may be left out)' if len(options) > 1 else ''}: {about}"
        required = schema.get("required", [])
        rows = [
            (
                f"`{field}`",
                f"`{_json_type(f)}`",
                _field_default(f, field in required),
                f.get("description", ""),
            )
            for field, f in schema["properties"].items()
        ]
        yield table(("field", "values", "default", "meaning"), rows)


def _json_type(schema: dict[str, Any]) -> str:
    """Type and limits, in the words of JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_json_type(s) for s in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    inner = f" of {_json_type(schema['items'])}" if "items" in schema else ""
    signs = (
        ("minimum", ">="),
        ("exclusiveMinimum", ">"),
        ("maximum", "<="),
        ("exclusiveMaximum", "<"),
    )
    limits = "".join(f" {sign} {_number(schema[key])}" for key, sign in signs if key in schema)
    return f"{schema.get('type', 'any')}{inner}{limits}"


def _number(value: float) -> str:
    return f"{int(value)}" if value == int(value) and value < 10**16 else f"{value:g}"


def _field_default(schema: dict[str, Any], required: bool) -> str:
    default = schema.get("default")
    if required:
        return "required"
    return "none" if default is None else "empty" if default in ("", []) else f"`{default}`"


def _about(parameter: dict[str, Any]) -> str:
    text = parameter.get("description") or rest_answers.PARAMETERS.get(parameter["name"], "")
    default = parameter.get("schema", {}).get("default")
    return text if default in (None, "") else f"{text} (default: {default})".strip()


# --- messages -----------------------------------------------------------------------------------


def wire() -> str:
    """Every message and record that crosses the wire."""
    parts = [
        "# Messages",
        MADE + "Each is msgpack of the wire version, the name and the fields, in this order. "
        "`protocol/wire.py` turns them into bytes and back.",
    ]
    for title, module in (("Messages", messages), ("Records of the control room", records)):
        parts.append(f"## {title}")
        said = meanings(module)
        for name, found in vars(module).items():
            mine = isinstance(found, type) and found.__module__ == module.__name__
            if mine and issubclass(found, Message) and found is not Message:
                parts += [f"### {name}", inspect.cleandoc(found.__doc__ or "")]
                rows = [
                    (f"`{field}`", f"`{_kind(f)}`", said[name][field])
                    for field, f in found.model_fields.items()
                ]
                parts.append(table(("field", "values", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


# --- rounds --------------------------------------------------------------------------------------


def rounds() -> str:
    """Phases of a round, from the table that the code runs on."""
    rows = [(f"`{a}`", f"`{b}`", why) for a, b, why in moves()]
    parts = [
        "# A round",
        MADE + "A round is one merge of one fragment. It begins as `collecting`, and moves only as "
        "this table says. It is gone once its record says that it was skipped, or once its "
        "publication is out.",
        "![The phases of a round, and what leads from one to the next](round.svg)",
        table(("from", "to", "when"), rows),
        "What each phase is for stands in [the algorithm](../explanation/algorithm.md).",
    ]
    return "\n\n".join(parts) + "\n"


def moves() -> list[tuple[str, str, str]]:
    """Which phase follows which, and when."""
    return [(a.value, b.value, why) for (a, b), why in MOVES.items()]
