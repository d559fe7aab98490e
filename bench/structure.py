"""How the code is laid out, in figures: files, small files, packages, circles, lines.

    python bench/structure.py [--json FILE]

Counts the product: the folders in PACKAGES, without tests, benches and site. A *file* is a Python
module. A *marker* is an `__init__.py`, which makes a folder a package. A file is *small* below 70
lines, markers left out: small files are easily crumbs of one idea. A *circle* is a set of modules
each of which needs each other one, when it is imported or later; imports for types alone do not
count. nats is the client library of the message server, which only the bus should know.
"""

import argparse
import ast
import json
from collections import Counter
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "diloco_shared": "shared",
    "diloco_syncer": "services/syncer",
    "diloco_learner": "services/learner",
    "diloco_coordinator": "services/coordinator",
    "diloco_simulator": "simulator",
    "diloco_planner": "simulator",
    "diloco_client": "client",
    "diloco_cli": "cli",
}
SMALL_LINES = 70
MARKER = "__init__.py"


@cache
def modules() -> dict[str, Path]:
    """Where each module of the product lies, by its dotted name."""
    found = {}
    for package, root in PACKAGES.items():
        for path in sorted((ROOT / root / package).rglob("*.py")):
            dotted = ".".join(path.relative_to(ROOT / root).with_suffix("").parts)
            found[dotted.removesuffix(".__init__")] = path
    return found


def needed(source: str) -> set[str]:
    """Names that a module imports, at once or later; not for types alone. Of `from a import b` it
    is `a.b`, which may be a module or a name in one."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of the project that it needs."""
    names = needed(modules()[module].read_text("utf-8"))
    among = {name if name in modules() else name.rpartition(".")[0] for name in names}
    return frozenset((among & modules().keys()) - {module})


def circles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Sets of modules that need one another."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        to_see, seen = [*graph[module]], set[str]()
        while to_see:
            if (other := to_see.pop()) not in seen:
                seen.add(other)
                to_see += graph[other]
        reached[module] = seen
    found = {
        frozenset(other for other in seen if module in reached[other])
        for module, seen in reached.items()
        if module in seen
    }
    return sorted(sorted(circle) for circle in found)


def knows_nats(path: Path) -> bool:
    names = needed(path.read_text("utf-8"))
    return any(name.partition(".")[0] == "nats" for name in names)


def counted() -> dict[str, Any]:
    """All figures; `packages` by package, `inner` files of each folder of modules."""
    lines = {path: path.read_text("utf-8").count("\n") for path in modules().values()}
    packages: dict[str, Any] = {}
    for package, root in PACKAGES.items():
        mine = [p for p in lines if p.is_relative_to(ROOT / root / package)]
        packages[package] = {
            "files": len(mine),
            "markers": sum(p.name == MARKER for p in mine),
            "small": sum(p.name != MARKER and lines[p] < SMALL_LINES for p in mine),
            "lines": sum(lines[p] for p in mine),
        }
    inner = Counter(p.parent.relative_to(ROOT).as_posix() for p in lines if p.name != MARKER)
    return {
        "packages": packages,
        "total": {k: sum(row[k] for row in packages.values()) for k in packages["diloco_shared"]},
        "inner": dict(sorted(inner.items())),
        "circles": circles({module: imports(module) for module in modules()}),
        "nats": sorted(p.relative_to(ROOT).as_posix() for p in lines if knows_nats(p)),
    }


def table(found: dict[str, Any]) -> list[str]:
    """For a terminal."""
    rows = {**found["packages"], "all": found["total"]}
    heads = list(found["total"])
    yielded = [f"{'package':20}" + "".join(f"{head:>9}" for head in heads)]
    yielded += [
        f"{name:20}" + "".join(f"{row[h]:>9,}" for h in heads) for name, row in rows.items()
    ]
    inner = found["inner"]
    most = max(inner, key=inner.__getitem__)
    return [
        *yielded,
        f"folders with modules: {len(inner)}, files in each: {median(inner.values()):g} in the "
        f"middle, {inner[most]} at most ({most})",
        f"circles of imports: {len(found['circles'])}",
        *(f"  {', '.join(circle)}" for circle in found["circles"]),
        f"files that import nats: {len(found['nats'])} ({', '.join(found['nats'])})",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = counted()
    print("\n".join(table(found)))
    if args.json:
        body = {"command": "python bench/structure.py", **found}
        args.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
