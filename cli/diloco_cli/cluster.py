"""Which cluster a command speaks to: options, environment, or the data folder of `diloco up`."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.faults import CliError
from diloco_client import ApiError, Client, Unreachable


@dataclass(frozen=True, slots=True)
class Where:
    """As given on the command line; empty means not given."""

    url: str = ""
    token: str = ""
    token_file: str = ""
    data: Path = Path("diloco-data")


def connect(where: Where) -> Client:
    """A client; CliError says what is missing."""
    url = where.url or os.environ.get("DILOCO_URL", "")
    token = where.token or os.environ.get("DILOCO_TOKEN", "")
    token_file = where.token_file
    if not url:
        endpoint = _endpoint(where.data)
        url, token_file = endpoint["url"], token_file or endpoint["token_file"]
    if not token:
        if not token_file:
            raise CliError("give the token of that cluster with --token or DILOCO_TOKEN")
        try:
            token = Path(token_file).read_text(encoding="ascii").strip()
        except OSError as error:
            raise CliError(f"the token file cannot be read: {error}") from None
    return Client(url, token)


def _endpoint(data: Path) -> dict[str, str]:
    try:
        endpoint: dict[str, str] = json.loads((data / "endpoint.json").read_text("utf-8"))
    except (OSError, ValueError):
        raise CliError(
            f"no cluster runs in {data}: start one with 'diloco up', name its folder with --data, "
            "or give --url and --token of one elsewhere"
        ) from None
    return endpoint


def pid_of(data: Path) -> int:
    """The supervisor's process id."""
    return int(_endpoint(data)["pid"])


def explained(error: ApiError | Unreachable) -> CliError:
    """The server's own words, fault by fault."""
    if isinstance(error, Unreachable):
        return CliError(f"{error}: is it running? 'diloco up' starts one here")
    lines = [str(error)]
    lines += [f"  {fault['path']}: {fault['message']}" for fault in error.errors]
    return CliError("\n".join(lines))


def only_run(client: Client, name: str) -> dict[str, Any]:
    """The run of that name; without a name the newest, which is what people mean."""
    if name:
        return client.run(name)
    runs = sorted(client.runs(), key=lambda run: float(run["created_at"]))
    if not runs:
        raise CliError("there is no run: submit one with 'diloco submit run.toml'")
    return runs[-1]
