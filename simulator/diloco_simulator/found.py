"""Seeds that broke a promise, kept as files: the whole world, however options are drawn later."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco_simulator.options import Options


def described(options: Options) -> dict[str, Any]:
    """What differs from a calm world."""
    calm = asdict(Options.calm())
    return {name: value for name, value in asdict(options).items() if value != calm[name]}


def keep(folder: Path, seed: int, options: Options, violations: Sequence[str]) -> Path:
    """Write one; returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{seed}.json"
    body = {"seed": seed, "options": described(options), "violations": list(violations)[:4]}
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> tuple[int, Options]:
    """Seed and options of a kept world."""
    body = json.loads(path.read_text(encoding="utf-8"))
    options = {n: tuple(v) if isinstance(v, list) else v for n, v in body["options"].items()}
    return int(body["seed"]), Options.calm(**options)
