"""Ends the connections of sites' own message servers; those that are still let in are back at once.

Whoever reads its configuration again cuts off the clients that it lets in no more, but not the
message servers of sites (leaf nodes): of nats-server 2.15.1 these stay as they came, with the key
and the rights of then, and go on hearing. Its system account can end them, whose password lies in
the hub's folder, for its owner.

Only the standard library: the image of the message server has nothing else.
"""

import json
import re
import secrets
import socket
import ssl
import time
from contextlib import closing
from pathlib import Path
from typing import Any

PASSWORD = "system-password"
# Account and user that may end connections.
SYSTEM = "SYS"
# What it presents where the hub demands certificates.
CERTIFICATE = "system.pem"
# For all of it, on the machine of the server.
PATIENCE_S = 5.0
# A thousand sites in its list, of some 300 bytes each.
ANSWER_BYTES_MAX = 4 << 20


def cut(folder: Path, config: Path) -> int:
    """End them all; how many there were. 0 where the hub takes none, or does not run.

    `folder`: of the hub, or of one of its nodes, or what has copies of its files; `config`: of the
    server that runs on this machine. Raises OSError, and ValueError for a server that does not
    understand, and where it takes leaf nodes and nobody can end them.
    """
    try:
        password = (folder / PASSWORD).read_text("ascii").strip()
    except FileNotFoundError:
        if not _takes_leaves(config):
            return 0
        raise ValueError(f"there is no {PASSWORD} in {folder}") from None
    until = time.monotonic() + PATIENCE_S
    try:
        server = socket.create_connection(place(config), PATIENCE_S)
    except ConnectionRefusedError:
        return 0
    with closing(_Asking(server, until)) as asking:
        name = asking.begin(password, folder / CERTIFICATE)
        found = asking.ask(f"$SYS.REQ.SERVER.{name}.LEAFZ", {})
        leaves = found.get("data", {}).get("leafs") or []
        for leaf in leaves:
            asking.ask(f"$SYS.REQ.SERVER.{name}.KICK", {"cid": leaf["id"]})
    return len(leaves)


class _Asking:
    """One connection, and one question at a time."""

    def __init__(self, server: socket.socket, until: float) -> None:
        self._server = server
        self._until = until
        self._held = b""

    def close(self) -> None:
        self._server.close()

    def begin(self, password: str, certificate: Path) -> str:
        """Log in; the server's id."""
        info = json.loads(self._line().removeprefix(b"INFO "))
        if info.get("tls_required"):
            # It is on this machine, and what it could learn from us is its own password.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            if certificate.exists():
                context.load_cert_chain(certificate)
            self._server = context.wrap_socket(self._server)
        login = {"user": SYSTEM, "pass": password, "verbose": False, "headers": True}
        self._say(f"CONNECT {json.dumps(login)}\r\n".encode())
        return str(info["server_id"])

    def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        """Its answer."""
        inbox, text = f"_INBOX.{secrets.token_hex(8)}", json.dumps(body)
        asked = f"PUB {subject} {inbox} {len(text)}\r\n{text}\r\n"
        self._say(f"SUB {inbox} 1\r\nUNSUB 1 1\r\n{asked}".encode())
        while True:
            line = self._line()
            if line.startswith(b"MSG "):
                answer: dict[str, Any] = json.loads(self._bytes(int(line.split()[-1])))
                if error := answer.get("error"):
                    raise ValueError(f"{subject}: {str(error)[:200]}")
                return answer
            if line.startswith((b"-ERR", b"HMSG ")):
                raise ValueError(f"{subject}: {line[:200].decode(errors='replace').strip()}")

    def _say(self, text: bytes) -> None:
        self._server.settimeout(max(self._until - time.monotonic(), 0.001))
        self._server.sendall(text)

    def _line(self) -> bytes:
        while b"\r\n" not in self._held:
            self._more()
        line, _, self._held = self._held.partition(b"\r\n")
        return line

    def _bytes(self, size: int) -> bytes:
        if size > ANSWER_BYTES_MAX:
            raise ValueError(f"an answer of {size} bytes")
        while len(self._held) < size + 2:
            self._more()
        found, self._held = self._held[:size], self._held[size + 2 :]
        return found

    def _more(self) -> None:
        self._server.settimeout(max(self._until - time.monotonic(), 0.001))
        some = self._server.recv(1 << 16)
        if not some:
            raise ConnectionError("the message server hung up")
        self._held += some


def _takes_leaves(config: Path) -> bool:
    """Whether a server of this configuration lets message servers of sites in. Raises OSError."""
    return re.search(r"^\s*\"?leafnodes\b", config.read_text("utf-8"), re.MULTILINE) is not None


def place(config: Path, what: str = "listen") -> tuple[str, int]:
    """Where the server listens, or has its monitoring (`http`), as this machine reaches it.

    Raises OSError and ValueError.
    """
    text = config.read_text("utf-8")
    said = re.search(rf'^\s*{what}: "?([^"\s]*):(\d+)"?\s*$', text, re.MULTILINE)
    if said is None:
        raise ValueError(f"{config} has no line {what}: ADDRESS:PORT")
    host = said[1].strip("[]")
    return ("127.0.0.1" if host in ("", "0.0.0.0") else host), int(said[2])
