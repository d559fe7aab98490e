"""Seeds that broke a promise, kept as files: the whole world, however options are drawn later."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_simulator.options import Options

# The first ones say what broke; the rest follow from them.
VIOLATIONS_KEPT = 4


def described(options: Options) -> dict[str, Any]:
    """What differs from a calm world."""
    calm = asdict(Options.calm())
    return {name: value for name, value in asdict(options).items() if value != calm[name]}


def keep(folder: Path, seed: int, options: Options, violations: Sequence[str]) -> Path:
    """Write one under its seed; returns where."""
    path = folder / f"seed-{seed}.json"
    write(path, seed, options, violations)
    return path


def write(
    path: Path,
    seed: int,
    options: Options,
    violations: Sequence[str],
    of: tuple[int, Options] | None = None,
) -> None:
    """Write one. `of`: the world that it was made of by shrinking."""
    body: dict[str, Any] = {
        "seed": seed,
        "options": described(options),
        "violations": list(violations)[:VIOLATIONS_KEPT],
    }
    if of is not None:
        body["shrunk_from"] = {"seed": of[0], "options": described(of[1])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[int, Options]:
    """Seed and options of a kept world."""
    body = json.loads(path.read_text(encoding="utf-8"))
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in body["options"].items()}
    return int(body["seed"]), Options.calm(**options)
