"""Which cluster a command speaks to: options, environment, or the data folder of `diloco up`."""

import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.words import NO_CLUSTER, REFUSED, CliError, why

HERE = Path("diloco-data")
ENDPOINT = "endpoint.json"
# What that file is called while the cluster stops.
ENDING = "ending.json"
# Names a file of the administrator's token that something else writes, as to the coordinator.
TOKEN_FILE = "DILOCO_ADMIN_TOKEN_FILE"
# What names a cluster elsewhere, to commands that speak to its coordinator.
BY_REST = "--url and --token-file"
# `diloco up` listens nowhere else.
_HERE = re.compile(r"(https?://)?(127\.0\.0\.1|localhost|\[::1\]):\d{1,5}/?", re.ASCII)


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


def endpoint_of(data: Path, elsewhere: str = BY_REST) -> dict[str, Any]:
    """What `diloco up` wrote: url, nats, token_file, pid; CliError when nothing runs in `data`.

    And when somebody else may have written it: a folder of that name may lie wherever a command is
    typed, and would have it send the beginning of any file of the user's to any address.
    `elsewhere`: the options by which the command names another cluster.
    """
    path = data / ENDPOINT
    try:
        own(data, elsewhere=elsewhere)
        with path.open(encoding="utf-8") as file:
            own(path, file.fileno(), elsewhere=elsewhere)
            endpoint: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        raise CliError(
            f"no cluster runs in {data}: start one with 'diloco up', name its folder with --data, "
            f"or give {elsewhere} of one elsewhere",
            NO_CLUSTER,
        ) from None
    if why_not := _strange(endpoint, data, elsewhere):
        raise CliError(f"{path} is not believed: {why_not}", REFUSED)
    return endpoint


def own(path: Path, opened: int | None = None, *, elsewhere: str = BY_REST) -> None:
    """CliError unless it belongs to this user or to root, and nobody else may write it. OSError if
    there is none. `opened`: the file that was opened by this path. `elsewhere`: see
    `endpoint_of`."""
    found = path.stat() if opened is None else os.fstat(opened)
    if found.st_uid not in (os.geteuid(), 0):
        raise CliError(
            f"{path} belongs to somebody else (user {found.st_uid}), and is not believed: name a "
            f"folder of your own with --data, or give {elsewhere}",
            REFUSED,
        )
    if found.st_mode & stat.S_IWOTH:
        raise CliError(
            f"everybody may write {path}, so it is not believed: if it is yours, type "
            f"'chmod o-w {path}'; else name another folder with --data, or give {elsewhere}",
            REFUSED,
        )


def _strange(endpoint: Any, data: Path, elsewhere: str) -> str:
    """What no `diloco up` of this folder has written, and what to do; "" for nothing."""
    if not isinstance(endpoint, dict):
        return "it is not what 'diloco up' writes: start the cluster again"
    for name in ("url", "nats"):
        there = str(endpoint.get(name, ""))
        if there and not _HERE.fullmatch(there):
            return f"{there} is not on this machine: give {elsewhere} for one elsewhere"
    file = Path(str(endpoint.get("token_file", "")))
    given = os.environ.get(TOKEN_FILE, "")
    if given and file == Path(given).absolute():
        return ""
    if (file.parent.resolve() / file.name).is_relative_to(data.resolve()):
        return ""
    return f"the token file {file} lies outside {data}: if it is yours, set {TOKEN_FILE}={file}"
