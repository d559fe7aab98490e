"""What names in a source stand for, under whichever of them they were imported."""

import ast
from collections.abc import Iterator


def dotted(node: ast.AST) -> str:
    """`a.b.c` as it is written; "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{within}.{node.attr}" if (within := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """The whole name of each that a source imports, by what it is called there."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                whole = name.name if name.asname else name.name.partition(".")[0]
                found[name.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
    return found


def meant(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Where a source uses what it imports, and its whole name: `np.pi` is numpy.pi."""
    names = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = dotted(node).partition(".")
            if first in names:
                yield node, f"{names[first]}.{rest}".removesuffix(".")
