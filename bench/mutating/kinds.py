"""Small ways to break one node of a syntax tree, and what of a module is not worth breaking.

Each way is something that people get wrong: a bound, a sign, a condition, a step left out. What a
type checker would refuse at once is not made, nor what nobody could notice: texts, logs, types.
"""

import ast
import copy
from collections.abc import Iterator

# (kind, what takes the node's place)
Change = tuple[str, str]

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# To change one of these is to negate it.
EXACT = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
ADDED: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
EXTREMES = {"min": "max", "max": "min"}
# What else a function of this type might return, by how the annotation begins.
DEFAULTS = {
    "list": "[]",
    "Sequence": "[]",
    "Iterable": "[]",
    "Iterator": "[]",
    "dict": "{}",
    "Mapping": "{}",
    "set": "set()",
    "frozenset": "frozenset()",
    "str": "''",
    "bytes": "b''",
    "int": "0",
    "float": "0.0",
}
NOTHING = ("None", "[]", "{}", "()", "set()", "frozenset()", "''", "b''", "0", "0.0")
LOGS = {"log", "logger", "logging", "structlog", "warnings"}
# Calls whose arguments are texts for people, or that only a type checker reads.
SPOKEN = {"Tell", "print", "assert_never", "TypeVar", "cast"}
# A keyword that checks what is never wrong, or shapes a class.
FORMAL = {"strict", "slots", "frozen"}
SHOWN = {"__repr__", "__str__"}


def compared(node: ast.Compare) -> Iterator[Change]:
    for n, operator in enumerate(node.ops):
        changed = copy.copy(node)
        changed.ops = [*node.ops[:n], COMPARED[type(operator)](), *node.ops[n + 1 :]]
        yield "compare", ast.unparse(changed)


def joined(node: ast.BoolOp) -> Iterator[Change]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and-or", f"({ast.unparse(ast.BoolOp(other, node.values))})"


def constant(node: ast.Constant) -> Iterator[Change]:
    if isinstance(node.value, bool):
        yield "flag", repr(not node.value)
    elif isinstance(node.value, int):
        yield "constant", repr(node.value + 1)


def added(node: ast.BinOp) -> Iterator[Change]:
    texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp)
    sides = (node.left, node.right)
    if any(isinstance(s, texts) or _is_text(s) for s in sides) or type(node.op) not in ADDED:
        return
    yield "sign", ast.unparse(ast.BinOp(node.left, ADDED[type(node.op)](), node.right))


def branched(test: ast.expr) -> Iterator[Change]:
    """The other branch, unless a smaller change says the same."""
    negation = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    exact = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], EXACT)
    if not (negation or exact or isinstance(test, ast.Constant)):
        yield "branch", f"not ({ast.unparse(test)})"


def returned(value: ast.expr, annotation: ast.expr | None) -> Iterator[Change]:
    """Something of the right type that says less; `value` is what is returned now."""
    if annotation is None or ast.unparse(value) in NOTHING:
        return
    kind = ast.unparse(annotation).strip("'")
    if kind == "bool" and not isinstance(value, ast.Constant | ast.Compare | ast.BoolOp):
        yield "return", f"not ({ast.unparse(value)})"
    elif "None" in kind.split(" | "):
        yield "return", "None"
    elif kind.startswith("tuple[") and kind.endswith(", ...]"):
        yield "return", "()"
    elif default := DEFAULTS.get(kind.partition("[")[0]):
        yield "return", default


def removed(node: ast.stmt, *, last: bool, constructing: bool) -> Iterator[Change]:
    """The statement left out; `last`: nothing in its function, or loop, comes after it."""
    match node:
        case ast.Expr(ast.Call() | ast.Await(ast.Call())):
            gone = "super().__init__" not in ast.unparse(node)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            gone = not constructing
        case ast.AugAssign() | ast.Break() | ast.Raise() | ast.Delete():
            gone = True
        case ast.Continue() | ast.Return():
            gone = not last
        case _:
            gone = False
    if gone:
        yield "removed", "pass"


def augmented(node: ast.AugAssign) -> Iterator[Change]:
    if other := ADDED.get(type(node.op)):
        yield "sign", ast.unparse(ast.AugAssign(node.target, other(), node.value))


def silent(node: ast.AST) -> bool:
    """What nobody could notice, or no program reads: not worth breaking, with all it contains."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name=name):
            return name in SHOWN
        case ast.Expr(ast.Constant()):
            return True
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Expr(ast.Call(func=function) | ast.Await(ast.Call(func=function))):
            return _is_log(function) or _named(function) in SPOKEN
        case ast.Call(func=function):
            return _named(function) in SPOKEN
        case ast.keyword(arg=name):
            return name in FORMAL
    return False


def _named(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _is_log(function: ast.expr) -> bool:
    return bool(LOGS & set(ast.unparse(function).split(".")[:-1]))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
