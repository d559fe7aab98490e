"""All faults that can be made in one file, each with a name that outlives changes elsewhere."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mutants

from mutating import kinds

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Fault:
    """One change of one place; `first` and `last` are the lines of the statement it is in."""

    id: str
    file: str
    line: int
    column: int
    kind: str
    old: str
    new: str
    scope: str  # the function, "" for the module itself
    called: bool  # in the code of a function, not in a default
    first: int
    last: int
    span: tuple[int, int] = field(repr=False)  # in bytes of the file
    root: Path = field(repr=False)

    @property
    def module(self) -> str:
        return mutants.dotted(self.file)

    def source(self) -> str:
        """The file with the fault."""
        raw = (self.root / self.file).read_bytes()
        begin, end = self.span
        return (raw[:begin] + self.new.encode() + raw[end:]).decode()

    def told(self) -> dict[str, Any]:
        names = ("id", "file", "line", "column", "kind", "scope", "old", "new")
        return {name: getattr(self, name) for name in names}


def faults(root: Path, file: str) -> list[Fault]:
    """In the order of the file."""
    raw = (root / file).read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: Counter[tuple[str, ...]] = Counter()
    found = []
    for place in _Walk().places(ast.parse(raw)):
        node, old = place.node, ast.unparse(place.node)
        assert node.end_lineno is not None and node.end_col_offset is not None
        # A comment belongs to no node: what is removed is known by what it says and where.
        key = (file, place.scope, place.kind, old, place.new)
        seen[key] += 1
        digest = hashlib.sha256("\0".join([*key, str(seen[key])]).encode()).hexdigest()[:10]
        found.append(
            Fault(
                id=digest,
                file=file,
                line=node.lineno,
                column=node.col_offset,
                kind=place.kind,
                old=old,
                new=place.new,
                scope=place.scope,
                called=place.called,
                first=place.first,
                last=place.last,
                span=(
                    starts[node.lineno - 1] + node.col_offset,
                    starts[node.end_lineno - 1] + node.end_col_offset,
                ),
                root=root,
            )
        )
    return sorted(found, key=lambda f: f.span)


def sampled(found: Sequence[Fault], sample: int, seed: int) -> list[Fault]:
    """Some of them. What else changes in the file leaves the others in the sample."""

    def rank(fault: Fault) -> str:
        return hashlib.sha256(f"{seed}:{fault.id}".encode()).hexdigest()

    chosen = sorted(found, key=rank)[:sample] if sample else found
    return sorted(chosen, key=lambda f: f.span)


@dataclass(frozen=True)
class _Place:
    node: ast.expr | ast.stmt
    kind: str
    new: str
    scope: str
    called: bool
    first: int
    last: int


class _Walk:
    """Goes through a module and knows where it is."""

    def __init__(self) -> None:
        self.scope: list[str] = []
        self.function: Function | None = None
        self.generates = False
        self.called = False
        # Of the statement that is being looked at.
        self.lines = (0, 0)

    def places(self, tree: ast.Module) -> Iterator[_Place]:
        yield from self._block(tree.body, last=False)

    def _block(self, body: Sequence[ast.stmt], *, last: bool) -> Iterator[_Place]:
        for n, statement in enumerate(body):
            if not kinds.silent(statement):
                yield from self._statement(statement, last=last and n == len(body) - 1)

    def _statement(self, node: ast.stmt, *, last: bool) -> Iterator[_Place]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self._within(node)
            return
        self.lines = (node.lineno, node.end_lineno or node.lineno)
        if self.function:
            constructing = self.function.name == "__init__"
            yield from self._made(node, kinds.removed(node, last=last, constructing=constructing))
        yield from self._whole(node)
        loop = isinstance(node, ast.For | ast.AsyncFor | ast.While)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "type_comment"):
                continue
            if name in ("body", "orelse", "finalbody"):
                yield from self._block(value, last=(loop and name == "body") or last)
            elif name in ("handlers", "cases"):
                for part in value:
                    if isinstance(part, ast.match_case) and part.guard:
                        self.lines = (part.guard.lineno, part.guard.lineno)
                        yield from self._made(part.guard, kinds.branched(part.guard))
                        yield from self._expression(part.guard)
                    yield from self._block(part.body, last=last)
            else:
                # A body that was just seen has moved the lines; its head has lines of its own.
                self.lines = (node.lineno, self._head(node))
                for part in value if isinstance(value, list) else [value]:
                    if isinstance(part, ast.AST):
                        yield from self._expression(part)

    def _whole(self, node: ast.stmt) -> Iterator[_Place]:
        """What is particular to one sort of statement."""
        match node:
            case ast.If(test=test):
                self.lines = (node.lineno, self._head(node))
                yield from self._made(test, kinds.branched(test))
            case ast.AugAssign():
                yield from self._made(node, kinds.augmented(node))
            case ast.Return(value=ast.expr() as value) if self.function and not self.generates:
                yield from self._made(value, kinds.returned(value, self.function.returns))

    def _head(self, node: ast.stmt) -> int:
        """Its last line, or that before the first of its body."""
        body = getattr(node, "body", None)
        return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno

    def _within(self, node: Function | ast.ClassDef) -> Iterator[_Place]:
        outer = self.function, self.generates, self.called
        self.scope.append(node.name)
        if isinstance(node, ast.ClassDef):
            self.function, self.called = None, False
            yield from self._block(node.body, last=False)
        else:
            self.function = node
            self.generates = any(isinstance(n, ast.Yield | ast.YieldFrom) for n in ast.walk(node))
            # A default is set when the function is made, and matters when it runs.
            self.lines, self.called = (node.lineno, node.end_lineno or node.lineno), False
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if default is not None:
                    yield from self._expression(default)
            self.called = True
            yield from self._block(node.body, last=True)
        self.scope.pop()
        self.function, self.generates, self.called = outer

    def _expression(self, node: ast.AST) -> Iterator[_Place]:
        if kinds.silent(node):
            return
        match node:
            case ast.Compare():
                yield from self._made(node, kinds.compared(node))
            case ast.BoolOp():
                yield from self._made(node, kinds.joined(node))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield from self._made(node, [("not", f"({ast.unparse(operand)})")])
            case ast.Constant() if self.function:  # what a module sets is tuning
                yield from self._made(node, kinds.constant(node))
            case ast.BinOp():
                yield from self._made(node, kinds.added(node))
            case ast.IfExp(test=test):
                yield from self._made(test, kinds.branched(test))
            case ast.comprehension(ifs=ifs):
                for test in ifs:
                    yield from self._made(test, kinds.branched(test))
            case ast.Name(id="min" | "max"):
                yield from self._made(node, [("min-max", kinds.EXTREMES[node.id])])
        for child in ast.iter_child_nodes(node):
            yield from self._expression(child)

    def _made(
        self, node: ast.expr | ast.stmt, changes: Iterator[kinds.Change] | list[kinds.Change]
    ) -> Iterator[_Place]:
        for kind, new in changes:
            yield _Place(node, kind, new, ".".join(self.scope), self.called, *self.lines)
