"""What every claim's script writes: its figures, and how they came about."""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def write(file: Path, figures: dict[str, Any], seed: int, **more: Any) -> None:
    """One JSON object; `figures` are what a claim may quote."""
    names = ("numpy",)
    body = {
        "figures": figures,
        **more,
        "seed": seed,
        "command": " ".join(["python", f"bench/claims/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()} | {n: version(n) for n in names},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")
