"""Options that many commands share, and how a result is shown."""

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.cluster import HERE, Where
from diloco_cli.lines import say
from diloco_cli.words import INVALID, CliError
from diloco_shared.reach.local import DataRoots, Factories, users_factories
from diloco_shared.spec.mesh import DEVICES_MAX

Url = Annotated[str, typer.Option(envvar="DILOCO_URL", help="Coordinator of a cluster elsewhere.")]
Token = Annotated[
    str,
    typer.Option(
        envvar="DILOCO_TOKEN", help="Its token; who may list this machine's processes sees it."
    ),
]
TokenFile = Annotated[
    str, typer.Option(envvar="DILOCO_TOKEN_FILE", help="File that holds the token.")
]
Authority = Annotated[
    str,
    typer.Option(
        envvar="DILOCO_CA", help="File with the certificate of the authority to trust, if your own."
    ),
]
Folder = Annotated[Path, typer.Option(help="Data folder of 'diloco up' on this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
DataRoot = Annotated[
    str,
    typer.Option(
        envvar="DILOCO_DATA_ROOT",
        help="Folders that a run may read, as for a learner; separated by commas.",
    ),
]
Checkpoints = Annotated[
    str,
    typer.Option(
        envvar="DILOCO_CHECKPOINTS", help="Where run-wide checkpoints are, as for a learner."
    ),
]
NatsUrl = Annotated[
    str,
    typer.Option(envvar="DILOCO_NATS_URL", help="Message server of a cluster elsewhere."),
]
NatsToken = Annotated[str, typer.Option(envvar="DILOCO_NATS_TOKEN", help="Its token.")]
NatsCredentials = Annotated[
    str,
    typer.Option(envvar="DILOCO_NATS_CREDENTIALS", help="File of an identity that it knows."),
]
Devices = Annotated[
    int,
    typer.Option(
        min=1,
        max=DEVICES_MAX,
        help="Devices that a learner has; of these, as many share its work on the axis fsdp as its "
        "sequences can be spread over.",
    ),
]
MeshSetting = Annotated[
    str, typer.Option("--mesh", help="In place of --devices: as DILOCO_MESH, fsdp=8,tensor=8.")
]
Run = Annotated[
    str,
    typer.Argument(
        help="Name of the run. If it is left out: the newest one that is going on, or else the "
        "newest one."
    ),
]

_WHERE: tuple[tuple[str, Any, Any], ...] = (
    ("url", Url, ""),
    ("token", Token, ""),
    ("token_file", TokenFile, ""),
    ("data", Folder, HERE),
    ("ca", Authority, ""),
)
_SEEN = (
    "diloco: whoever may list the processes of this machine sees --token: use --token-file, or set "
    "DILOCO_TOKEN\n"
)


def first_of(data_root: str) -> Path:
    """Where relative paths of a run's file begin."""
    try:
        return DataRoots.of(data_root).roots[0]
    except ValueError as error:
        raise CliError(str(error), INVALID) from None


def own_factories() -> str:
    """Whose modules runs may name on this machine, as the user says it or by where they are."""
    found = users_factories(os.environ, Path.cwd())
    try:
        Factories.of(found)
    except ValueError as error:
        raise CliError(str(error), INVALID) from None
    return found


def anywhere(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command`, which takes `where`, the options that say where the cluster is."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != "where"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, annotation=kind, default=default)
        for name, kind, default in _WHERE
    ]
    options.append(inspect.Parameter("context", keyword, annotation=typer.Context))

    def with_options(**given: Any) -> None:
        _warn_of_what_is_seen(given.pop("context"))
        where = Where(**{name: given.pop(name) for name, _, _ in _WHERE})
        command(where=where, **given)

    functools.update_wrapper(with_options, command)
    del with_options.__wrapped__  # type: ignore[attr-defined]
    parameters = [*(p.replace(kind=keyword) for p in own), *options]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _warn_of_what_is_seen(context: typer.Context) -> None:
    source = context.get_parameter_source("token")
    if source is not None and source.name == "COMMANDLINE":
        sys.stderr.write(_SEEN)


def show(value: Any, as_json: bool, text: Callable[[], list[str]]) -> None:
    """JSON on standard output, or lines for people."""
    if as_json:
        print(json.dumps(value))
    else:
        say(*text())
