"""Which cluster a command speaks to: options, environment, or the data folder of `diloco up`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.words import NO_CLUSTER, REFUSED, CliError, why

HERE = Path("diloco-data")
ENDPOINT = "endpoint.json"


@dataclass(frozen=True, slots=True)
class Where:
    """As given on the command line; empty means not given."""

    url: str = ""
    token: str = ""
    token_file: str = ""
    data: Path = HERE
    ca: str = ""


def token_of(where: Where) -> str:
    """The token as given, or the admin's of the cluster on this machine."""
    if where.token:
        token = where.token.strip()  # as of a secret that is kept with the end of its line
        if not token.isascii() or not token.isprintable() or " " in token:
            text = "the token has a space, the end of a line, or letters that no token has: give it"
            raise CliError(f"{text} as it was shown, by --token-file or DILOCO_TOKEN", REFUSED)
        return token
    path = where.token_file or ("" if where.url else endpoint_of(where.data)["token_file"])
    if not path:
        raise CliError(
            "give the token of that cluster with --token-file, DILOCO_TOKEN_FILE or DILOCO_TOKEN",
            REFUSED,
        )
    try:
        # While the administrator's token is changed over, the old one may be on a second line.
        lines = Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"the token file {path} cannot be read: {why(error)}", REFUSED) from None
    if not lines:
        raise CliError(f"the token file {path} is empty: put the token there, one line", REFUSED)
    return lines[0]


def endpoint_of(data: Path) -> dict[str, Any]:
    """What `diloco up` wrote: url, token_file, pid; CliError when nothing runs in `data`."""
    try:
        endpoint: dict[str, Any] = json.loads((data / ENDPOINT).read_text("utf-8"))
    except (OSError, ValueError):
        raise CliError(
            f"no cluster runs in {data}: start one with 'diloco up', name its folder with --data, "
            "or give --url and --token of one elsewhere",
            NO_CLUSTER,
        ) from None
    return endpoint
