"""Every fault of a run's specification at once, each under the path of the value at fault.

Validation stops early: a check across fields is skipped when one of its fields is wrong. So what
is wrong is set aside and the rest is looked at again, until nothing new is found.
"""

import copy
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from diloco_shared.budget.refusing import faults
from diloco_shared.spec.faults import SpecFault, did_you_mean
from diloco_shared.spec.run import RunSpec

# Each pass sets aside at least one value, and a specification has fewer than a hundred.
PASSES_MAX = 100
# A specification of nothing but faults is a wrong file: the first of them say so.
FAULTS_MAX = 100
# Sections within sections, as deep as a document may have them.
DEPTH_MAX = 16
HALF = "holds half a character (a surrogate alone), which no file can hold: leave it out"
# What a required value is replaced with while the rest is checked.
_STAND_INS: dict[tuple[str, ...], Any] = {("name",): "unnamed", ("budget",): {"steps": 1}}

Path = tuple[str, ...]


class Invalid(ValueError):
    """A specification with `faults`, at least one; the text has a line for each."""

    def __init__(self, faults: Sequence[SpecFault]) -> None:
        super().__init__("\n".join(f"{f.path}: {f.message}" for f in faults))
        self.faults = tuple(faults)


def check(body: dict[str, Any]) -> RunSpec:
    """The specification that `body` describes; raises Invalid with every fault."""
    if unwritable := list(_unwritable(body, ())):
        raise Invalid(unwritable[:FAULTS_MAX])
    found: dict[tuple[str, str], SpecFault] = {}
    aside: set[Path] = set()
    rest = copy.deepcopy(body)
    for _ in range(PASSES_MAX):
        try:
            spec = RunSpec.model_validate(rest)
        except ValidationError as error:
            before = len(aside)
            for e in error.errors(include_url=False, include_context=False):
                path, mentioned = _where(_place(e["loc"]), e["msg"])
                if e["type"] == "missing" and path[:1] == ("algorithm",):
                    continue  # the preset fills it: the fault is the preset's, and told as such
                # Only if all its fields are the user's own: not one put in a wrong one's place.
                if not (mentioned & aside):
                    text, shown = _message(path, e["type"], e["msg"]), ".".join(path) or "(whole)"
                    found.setdefault((shown, text), SpecFault(shown, text))
                aside |= {path} | mentioned
                for each in {path} | mentioned:
                    _set_aside(rest, each)
            if len(aside) == before or len(found) >= FAULTS_MAX:
                break
            continue
        # What is right field by field may still be a run that cannot be.
        found |= {(f.path, f.message): f for f in faults(spec) if not _about(f, aside)}
        if not found:
            return spec
        break
    raise Invalid(list(found.values())[:FAULTS_MAX])


def _unwritable(value: Any, path: Path) -> Iterator[SpecFault]:
    """What could be validated and not be kept: of JSON alone, since TOML knows no such thing."""
    where = ".".join(path) or "(whole)"
    if len(path) > DEPTH_MAX:
        yield SpecFault(where, f"lies {DEPTH_MAX} levels deep: no setting does")
    elif isinstance(value, Mapping):
        for name, each in value.items():
            shown = str(name).encode("utf-8", "backslashreplace").decode()
            if shown != str(name):
                yield SpecFault(".".join((*path, shown)), HALF)
            yield from _unwritable(each, (*path, shown))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _unwritable(each, (*path, str(index)))
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        yield SpecFault(where, HALF)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        yield SpecFault(where, "is a whole number of more than 64 bits")


def load(text: str) -> RunSpec:
    """The specification in the text of a run.toml; raises ValueError (Invalid, if it is TOML)."""
    return check(tomllib.loads(text))


def _place(location: tuple[int | str, ...]) -> Path:
    """The location without the arms of a union, which users never wrote."""
    path = tuple(str(part) for part in location)
    return path[:3] if path[:2] == ("model", "overrides") else path


def _about(fault: SpecFault, aside: set[Path]) -> bool:
    """Whether a fault is of a value that stands in for a wrong one, or of a section without it."""
    path = tuple(fault.path.split("."))
    return any(gone[: len(path)] == path or gone[:1] == path[:1] for gone in aside)


def _message(path: Path, kind: str, message: str) -> str:
    if path[:2] == ("model", "overrides") and len(path) == 3:
        return "must be a number, a text, true or false"
    if kind == "extra_forbidden":
        section = _model_at(path[:-1])
        near = did_you_mean(path[-1], () if section is None else section.model_fields)
        return f"is no setting{near or _elsewhere(path)}"
    return message.removeprefix("Value error, ")


def _elsewhere(path: Path) -> str:
    """`here; there is a.x`, where other sections have a setting of this name."""
    sections = (name for name in RunSpec.model_fields if name != path[0])
    found = [f"{s}.{path[-1]}" for s in sections if _has(RunSpec, [s, path[-1]])]
    return f" here; there is {' and '.join(found)}" if found else ""


def _where(location: Path, message: str) -> tuple[Path, set[Path]]:
    """The value to name, and all values that a check across fields compared."""
    if not message.startswith("Value error, "):
        return location, {location}
    model = _model_at(location)
    if model is None:
        return location, {location}
    words = re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", message.removeprefix("Value error, "))
    named = [location + tuple(w.split(".")) for w in words if _has(model, w.split("."))]
    if not named:
        return location, {location}
    # A message that begins with a field is about that field; else about their whole section.
    leads = bool(words) and location + tuple(words[0].split(".")) == named[0]
    return (named[0] if leads else location), set(named)


def _model_at(location: Path) -> type[BaseModel] | None:
    model: type[BaseModel] = RunSpec
    for part in location:
        field = model.model_fields.get(part)
        kind = None if field is None else field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return None
        model = kind
    return model


def _has(model: type[BaseModel], parts: list[str]) -> bool:
    for index, part in enumerate(parts):
        field = model.model_fields.get(part)
        if field is None:
            return False
        kind = field.annotation
        if index + 1 < len(parts):
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                return False
            model = kind
    return True


def _set_aside(document: dict[str, Any], path: Path) -> None:
    """Remove the value at `path`, or the deepest thing above it that is there."""
    if path in _STAND_INS:
        document[path[0]] = copy.deepcopy(_STAND_INS[path])
        return
    if path[:1] == ("budget",):
        document["budget"] = copy.deepcopy(_STAND_INS[("budget",)])
        return
    here: Any = document
    for part in path[:-1]:
        if not isinstance(here, dict) or part not in here:
            return
        here = here[part]
    if isinstance(here, dict) and path:
        here.pop(path[-1], None)
