"""What `diloco` and the services say of a command that a page shows: "" if it would be taken.

Nothing is executed. `diloco` reads the words as it does when they are typed, down to the type of
every value, and a service reads its environment.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import typer
from docs.shell import Typed
from docs.shown import ROOT, is_placeholder
from places import COMPOSE, FOREIGN, SETTINGS, names_of, understood
from pydantic import ValidationError

from diloco_cli.commands import whole_app
from diloco_cli.commands.budget import bits_per_s
from diloco_cli.commands.tokens import expiry_of, seconds_of
from diloco_cli.words import CliError
from diloco_shared.spec.mesh import AUTO, mesh_of
from diloco_shared.spec.shapes import SHAPES

# Of the parser, whichever module it is in.
WRONG_USAGE = typer.BadParameter.__mro__[1]
# Variables of shells and of what others wrote, that a page may set.
_OF_SHELLS = {"PATH", "PYTHONPATH"}
COMMANDS = typer.main.get_command(whole_app())
# What a command reads of a value besides its type, by the option or argument.
_READ: dict[tuple[str, str], Callable[[str], object]] = {
    ("token make", "expires"): expiry_of,
    ("token rotate", "overlap"): lambda said: seconds_of(said, "--overlap"),
    ("budget", "rate"): bits_per_s,
    ("budget", "mesh"): lambda said: said == AUTO or mesh_of(said),
    ("model describe", "mesh"): lambda said: said == AUTO or mesh_of(said),
    ("model describe", "what"): lambda said: said.endswith(".toml") or SHAPES[said],
    ("site add", "role"): ("learner", "syncer", "reader", "supervisor").index,
}
# A help that says the values, such as "dp | elastic | decoupled".
_ONE_OF = re.compile(r"\w+(?: (?:\||or) \w+)+")


# --------------------------------------------------------------------------------------------------
# diloco, and the services.


def path_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """The verb that a command begins with, such as ("hub", "init")."""
    command, path = COMMANDS, list[str]()
    for word in words[1:]:
        if word not in getattr(command, "commands", {}):
            break
        path.append(word)
        command = command.commands[word]  # type: ignore[attr-defined]
    return tuple(path)


def diloco(typed: Typed, whole: bool) -> str:
    path, command = path_of(typed.words), COMMANDS
    for word in path:
        command = command.commands[word]  # type: ignore[attr-defined]
    words = list(typed.words[1 + len(path) :])
    if words == ["--help"]:
        return ""
    if hasattr(command, "commands"):
        missing = f"there is no 'diloco {' '.join([*path, words[0]])}'" if words else ""
        return missing or ("it names no verb" if whole else "")
    try:
        _taken(command, " ".join(path), words, whole)
    except (WRONG_USAGE, CliError, ValueError, LookupError) as error:
        return getattr(error, "message", "") or str(error)
    return _unread(typed, of_commands_and_services())


def _taken(command: Any, path: str, words: list[str], whole: bool) -> None:
    """WRONG_USAGE, or what a value's own reader raises, if these words would be refused."""
    words = [word for word in words if word != "..."]
    if not whole and words and words[-1] in (o for p in command.params for o in p.opts):
        words.pop()  # an option that is named alone, for what it means
    context = command.context_class(command, info_name=path)
    given, rest, _ = command.make_parser(context).parse_args(args=words)
    if rest:
        raise typer.BadParameter(f"nobody takes {' '.join(rest)}")
    typed_whole = whole or any(
        p.param_type_name == "argument" and p.required and given.get(p.name) for p in command.params
    )
    for parameter in command.params:
        said = given.get(parameter.name)
        values = said if isinstance(said, list | tuple) else [said]
        values = [v for v in values if isinstance(v, str | bool)]
        if not values and parameter.required and typed_whole:
            raise typer.BadParameter(f"{parameter.name} is missing")
        for value in values:
            if isinstance(value, str) and not is_placeholder(value):
                _value(parameter, path, value, context)


def _value(parameter: Any, path: str, value: str, context: Any) -> None:
    several = getattr(parameter, "multiple", False) or parameter.nargs != 1
    parameter.process_value(context, [value] if several else value)
    help_ = getattr(parameter, "help", None) or ""
    if _ONE_OF.fullmatch(help_) and value not in re.findall(r"\w+", help_):
        raise typer.BadParameter(f"{parameter.name} is {help_}, not {value}")
    read = _READ.get((path, parameter.name))
    if read is not None:
        read(value)


@cache
def of_commands_and_services() -> frozenset[str]:
    """What a command reads itself, or hands to the processes that it starts."""
    found = set().union(*map(names_of, SETTINGS))
    for source in (ROOT / "cli").rglob("*.py"):
        found.update(re.findall(r"\bDILOCO_[A-Z_]+\b", source.read_text("utf-8")))
    return frozenset(found)


def _unread(typed: Typed, known: frozenset[str] | set[str]) -> str:
    wrong = {name for name in typed.environment if name.startswith("DILOCO_")} - known
    return f"it does not read {', '.join(sorted(wrong))}" if wrong else ""


def service(typed: Typed, whole: bool) -> str:
    """A service takes no options: everything is said by its environment."""
    if typed.words[1:]:
        return f"it takes no {typed.words[1]}"
    program = typed.program.removeprefix("diloco-")
    return _wrong_value(program, typed.environment) or _unread(typed, names_of(program))


def _wrong_value(program: str, environment: dict[str, str]) -> str:
    given = {
        name: value.partition(",")[0] if name == "DILOCO_NATS_URL" else value
        for name, value in environment.items()
        if not is_placeholder(value)
    }
    try:
        understood(program, {"DILOCO_ID": "a-name"} | given, Path(__file__))
    except ValidationError as error:
        return "; ".join(f"{e['loc']}: {e['msg']}" for e in error.errors())
    return ""


def operator(typed: Typed, whole: bool) -> str:
    """The command line in a container of the hub, where the folder of the hub is /hub."""
    return diloco(typed, whole and len(typed.words) > 1)


def export(typed: Typed, whole: bool) -> str:
    """Variables for what is typed later: each is one that somebody here reads, and has a value that
    those take who read it."""
    ours = {name for name in typed.environment if name.startswith("DILOCO_")}
    known = of_commands_and_services() | of_compose()
    if wrong := ours - known or {*typed.environment} - ours - of_compose() - FOREIGN - _OF_SHELLS:
        return f"nobody reads {', '.join(sorted(wrong))}"
    found = dict(typed.environment)
    readers = [program for program in SETTINGS if names_of(program) & found.keys()]
    return next(filter(None, (_wrong_value(p, found) for p in readers)), "")


@cache
def of_compose() -> frozenset[str]:
    """The variables that Compose's files read where they are started."""
    text = "".join(path.read_text("utf-8") for path in COMPOSE.glob("*.yaml"))
    return frozenset(re.findall(r"\$\{(\w+)", text) + re.findall(r"^  (\w+):$", text, re.MULTILINE))
