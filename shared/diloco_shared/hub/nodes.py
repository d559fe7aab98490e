"""A hub of several message servers, its nodes: where they are, and what each finds in its folder.

    nodes.json          host and port of each, in the order given
    routes.pem, routes-key.pem    the authority of the nodes alone; the key is a secret
    routes-password     what a node says to another one; a secret
    node-1/nats-server.conf, accounts.conf, …    all that the first node needs: a folder of its own

Nodes trust each other wholly. So their certificates are of another authority than those of sites:
a site's must not make it a node.
"""

import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diloco_shared import ambient
from diloco_shared.bus.nats.hub_config import Routes
from diloco_shared.process.set_up import owner

NODES = "nodes.json"
ROUTES_AUTHORITY, ROUTES_AUTHORITY_KEY = "routes.pem", "routes-key.pem"
ROUTES_PASSWORD = "routes-password"
# In a node's folder, beside the files that a hub of one server has in its own.
ROUTE_CERTIFICATE, ROUTE_KEY = "route.pem", "route-key.pem"
# From the port of clients to those of routes and monitoring, so that several nodes can be on one
# machine: 4222, 6222 and 8222, as everybody has them.
ROUTES_PORT, MONITOR_PORT = 2000, 4000
# With an even number as many may be away as with one less; the server copies streams five times.
COUNTS = (3, 5)
_PORT = 4222
# Labels of letters, digits, - and _; the first may be * in a certificate.
_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class Node:
    """One of them. `host`: where clients and the other nodes reach it, on `port`."""

    name: str
    host: str
    port: int

    @property
    def server_name(self) -> str:
        """As its server calls itself, for good: the others know it by that name."""
        return f"hub-{self.name}"

    @property
    def routes_port(self) -> int:
        return self.port + ROUTES_PORT

    @property
    def monitor_port(self) -> int:
        return self.port + MONITOR_PORT


def nodes_at(places: Sequence[str]) -> list[Node]:
    """Those at HOST or HOST:PORT each. Raises ValueError."""
    if len(places) not in COUNTS:
        raise ValueError(
            f"{len(places)} nodes: a hub of several has 3 or 5, since more than half of them must "
            "be there"
        )
    found = [Node(f"node-{number}", *_place(text)) for number, text in enumerate(places, 1)]
    there: set[tuple[str, int]] = set()
    for node in found:
        for port in (node.port, node.routes_port, node.monitor_port):
            if (node.host, port) in there:
                raise ValueError(
                    f"two nodes at {node.host} need its port {port}: give each a port of its own, "
                    "as in 127.0.0.1:4222 and 127.0.0.1:4223"
                )
            there.add((node.host, port))
    return found


def _place(text: str) -> tuple[str, int]:
    """An IPv6 address with a port stands in brackets."""
    host, port = text, str(_PORT)
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise ValueError(f"node {text!r}: give HOST or HOST:PORT")
    if not 0 < int(port) <= 65535 - MONITOR_PORT:
        raise ValueError(f"node {text!r}: give a port from 1 to {65535 - MONITOR_PORT}")
    if "*" in host:
        raise ValueError(f"node {text!r}: give HOST or HOST:PORT")
    return checked_host(host), int(port)


def checked_host(text: str) -> str:
    """The same, if it can be the name or address of a host; else ValueError."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if _NAME.fullmatch(text) is None or len(text) > 253 or ".." in text:
            raise ValueError(
                f"{text[:80]!r} is no name or address of a host: write it as hub.example.org, "
                "without tls:// before it and without a port after it"
            ) from None
    return text


def nodes_of(folder: Path) -> list[Node]:
    """Of a hub's folder; none for a hub of one server. Raises ValueError naming the file."""
    path = folder / NODES
    try:
        return [Node(n["name"], n["host"], n["port"]) for n in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise ValueError(shut(path, error)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a list of nodes ({error}): take it from a backup of the folder"
        ) from None


def shut(path: Path, error: OSError, how: str = "with --hub") -> str:
    """What keeps this user from a hub's folder, or from a file in it, and what to do."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{path} is not there: name the hub's folder {how}"
    why = f"{path} cannot be opened ({(error.strerror or str(error)).lower()})"
    if isinstance(error, PermissionError):
        return f"{why}: run this as the owner of the folder, {owner(path)}"
    return why


def listed(nodes: Sequence[Node]) -> str:
    """The text of NODES."""
    return json.dumps([asdict(node) for node in nodes], indent=1) + "\n"


def new_password() -> str:
    """Of letters and digits: it stands in URLs."""
    return ambient.token(24)


def routes_of(
    node: Node, nodes: Sequence[Node], at: Path, address: str, password: str, *, encrypted: bool
) -> Routes:
    """From `node` to the others. `at`: its folder; `address`: of this machine, where it listens."""
    others = [(_bracketed(n.host), n.routes_port) for n in nodes if n != node]
    files = (ROUTE_CERTIFICATE, ROUTE_KEY, ROUTES_AUTHORITY)
    named = [str(at / file) for file in files] if encrypted else []
    return Routes(f"{address}:{node.routes_port}", others, password, *named)


def url_of(nodes: Sequence[Node], *, encrypted: bool) -> str:
    """What a process is told as DILOCO_NATS_URL."""
    scheme = "tls" if encrypted else "nats"
    return ",".join(f"{scheme}://{_bracketed(node.host)}:{node.port}" for node in nodes)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
