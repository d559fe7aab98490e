"""The reference page about the Python client, made of its signatures and docstrings."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import diloco_client
from diloco_client import Client, answers

EXAMPLE = Path(__file__).parent / "client_example.py"
# As the source cuts the class into parts.
_PART = re.compile(r"    # --- (.+?) -+\n")
# Of whom else a caller hears.
_ANSWERS = "Told", "ApiError", "Unreachable", "Unanswered", "Silent", "Lost", "Untrusted"


def page(made: str) -> str:
    """All that a script needs. `made`: says where the page comes from."""
    parts = [
        "# Python client",
        made + "`diloco_client` speaks to a coordinator from a Python program. It is part of every "
        "installation, and needs no JAX. Each method asks for a route of the "
        "[REST interface](rest.md), where you find "
        "[what answers are made of](rest.md#what-answers-are-made-of).",
        "## A script",
        "This one submits a run to the cluster that `diloco up` runs here, waits, reads events, "
        "and begins another run with a checkpoint. To a cluster elsewhere give its address and a "
        "[token](../how-to/access.md) with the scopes that it needs: here `read` and `operate`.",
        f"```python\n{EXAMPLE.read_text('utf-8')}```",
        "A run that lies in a file is what `tomllib.load` reads of it.",
        "## Client",
        _code(_signature(_methods()["__init__"], "Client")),
        inspect.cleandoc(Client.__doc__ or ""),
        *_of_methods(),
        "## What is raised and told",
        *_of_answers(),
    ]
    return "\n\n".join(parts) + "\n"


def _methods() -> dict[str, ast.FunctionDef]:
    """Of the client, in their order."""
    (found,) = ast.parse(inspect.getsource(Client)).body
    assert isinstance(found, ast.ClassDef)
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def _of_methods() -> Iterator[str]:
    source = inspect.getsource(Client)
    # Names of parts and methods, in the order in which they stand there.
    for title, name in re.findall(rf"{_PART.pattern}|    def ([a-z]\w*)\(", source):
        if title:
            yield f"## {title[0].upper()}{title[1:]}"
        else:
            made = _methods()[name]
            yield f"### {name}"
            yield _code(_signature(made, name))
            yield ast.get_docstring(made) or ""


def _of_answers() -> Iterator[str]:
    for name in _ANSWERS:
        found = getattr(diloco_client, name)
        yield f"### {name}"
        base = found.__base__
        if base is not None and base.__module__ == answers.__name__:
            yield f"A kind of [{base.__name__}](#{base.__name__.lower()})."
        yield inspect.cleandoc(found.__doc__ or "")


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _signature(made: ast.FunctionDef, name: str) -> str:
    """As it is called."""
    made.args.args = [one for one in made.args.args if one.arg != "self"]
    arguments = ast.unparse(made.args).replace("'", '"')
    arguments = re.sub(r"(?<=\S)=(?=\S)", " = ", arguments)
    gives = "" if made.returns is None or name == "Client" else f" -> {ast.unparse(made.returns)}"
    return f"{name}({arguments}){gives}"
