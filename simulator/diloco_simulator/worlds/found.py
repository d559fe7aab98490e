"""Worlds that broke a promise, kept as files: all that they are made of, however it is drawn."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from diloco_simulator.worlds.case import CAST, Case
from diloco_simulator.worlds.options import Options

# The first ones say what broke; the rest follow from them.
VIOLATIONS_KEPT = 4


def described(case: Case) -> dict[str, Any]:
    """The seed, and what differs from a calm world."""
    body: dict[str, Any] = {"seed": case.seed, "options": case.unlike}
    if case.constants:
        body["constants"] = dict(case.constants)
    return body | {name: getattr(case, name) for name in CAST if getattr(case, name)}


def again(path: Path) -> str:
    """The command that plays a kept world."""
    return f"python -m diloco_simulator.check --kept {path}"


def keep(folder: Path, case: Case, violations: Sequence[str], name: str = "") -> Path:
    """Write one under its name, or its seed; returns where."""
    path = folder / f"{name or f'seed-{case.seed}'}.json"
    write(path, case, violations)
    return path


def write(path: Path, case: Case, violations: Sequence[str], of: Case | None = None) -> None:
    """Write one. `of`: the world that it was made of by shrinking."""
    body = described(case) | {
        "violations": list(violations)[:VIOLATIONS_KEPT],
        "command": again(path),
    }
    if of is not None:
        body["shrunk_from"] = described(of)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Case:
    """A kept world."""
    body = json.loads(path.read_text(encoding="utf-8"))
    tuples = {f.name for f in fields(Options) if isinstance(f.default, tuple)}
    options = {n: tuple(v) if n in tuples else v for n, v in body["options"].items()}
    parts = {name: body[name] for name in ("constants", *CAST) if name in body}
    return Case(int(body["seed"]), Options.calm(**options), **parts)
