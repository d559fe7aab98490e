"""Step by step to the hub's message server: its name, its port, TLS, and being let in.

The same steps as those of any connection of the product (`bus.nats.lane_socket`), but each ends by
itself, in its own time, and says what came of it. Blocking, without threads that outlive it.
"""

import json
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from diloco_cli.doctor import judging
from diloco_cli.doctor.judging import Encrypted, Finding
from diloco_shared.bus.nats.access import Address, TlsFiles
from diloco_shared.bus.nats.wire import HEAD_BYTES_MAX, connect_line

# A resolver asks several servers for some seconds each; nobody waits longer for a name.
RESOLVE_S = 10.0
# As long as a lane waits for a connection; a handshake over a long link takes four round trips.
CONNECT_S, STEP_S = 3.0, 10.0
_FILE = "name the file that the hub gave to this site"
# Of one name: more are not tried, since each may take CONNECT_S.
ADDRESSES_MAX = 8


@dataclass(slots=True)
class Knocking:
    """What is known after each step; `findings` in their order."""

    address: Address
    server: int = 0  # which of those that the address names
    findings: list[Finding] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)  # what the server says of itself

    def steps(self) -> bool:
        """Make all, as far as they go; whether we were let in."""
        entered = self._steps()
        if not entered and all(finding.name != "credentials" for finding in self.findings):
            self._look_at_file()
        return entered

    def _look_at_file(self) -> None:
        """It can be told that a file cannot be used, however far from the hub one came."""
        try:
            self.address.identity()
        except ValueError as error:
            self.findings.append(judging.failed("credentials", str(error), _FILE))

    def _steps(self) -> bool:
        host, port = self.address.endpoints()[self.server]
        addresses = self._resolve(host, port)
        sock = self._reach(host, port, addresses) if addresses else None
        if sock is None:
            return False
        try:
            with sock:
                sock.settimeout(STEP_S)
                return self._enter(sock, host, port)
        except OSError as error:
            made = [finding.name for finding in self.findings]
            step = "credentials" if "TLS" in made else "TLS"
            self.findings.append(judging.failed(step, f"the connection broke: {error}", _LOST))
            return False

    @property
    def failure(self) -> str:
        """What it failed at; "" while nothing has."""
        return next((f"{f.name}: {f.text}" for f in self.findings if f.verdict == "FAIL"), "")

    def _correct(self, finding: Finding) -> None:
        """A step that looked well was not."""
        self.findings = [f for f in self.findings if f.name != finding.name] + [finding]

    def _resolve(self, host: str, port: int) -> list[str]:
        found, error = _addresses(host, port)
        self.findings.append(judging.resolved(host, found, error))
        return found

    def _reach(self, host: str, port: int, addresses: list[str]) -> socket.socket | None:
        refusals: dict[str, str] = {}
        for each in addresses[:ADDRESSES_MAX]:
            began = time.monotonic()
            try:
                sock = socket.create_connection((each, port), CONNECT_S)
            except OSError as error:
                refusals[each] = (error.strerror or str(error) or "no answer").lower()
                continue
            seconds = time.monotonic() - began
            self.findings.append(judging.reached(host, port, refusals, seconds))
            return sock
        self.findings.append(judging.reached(host, port, refusals, None))
        return None

    def _enter(self, sock: socket.socket, host: str, port: int) -> bool:
        try:
            line = _line(sock)
            self.info = json.loads(line.removeprefix(b"INFO ")) if line[:5] == b"INFO " else {}
        except (OSError, ValueError) as error:
            line = b""
            said = f"said nothing that one says ({error or 'no answer'})"
        else:
            said = f"said {line[:40]!r}"
        if not self.info:
            self._correct(judging.no_message_server(host, port, said))
            return False
        encrypted = self._encrypt(sock, host)
        if encrypted is None:
            return False
        with encrypted:
            return self._log_in(encrypted, host)

    def _encrypt(self, sock: socket.socket, host: str) -> socket.socket | None:
        required = bool(self.info.get("tls_required"))
        if self.address.wants_tls and not required:
            self.findings.append(judging.not_offered(host))
            return None
        try:
            context = self.address.context(required)
        except ValueError as error:
            self.findings.append(judging.failed("TLS", str(error), _FILES))
            return None
        if context is None:
            near = sock.getpeername()[0] in ("127.0.0.1", "::1")
            self.findings.append(judging.plain(host, near))
            return sock
        try:
            wrapped = context.wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as error:
            said = error.verify_message
            self.findings.append(judging.unbelieved(host, error.verify_code, said))
            return None
        except OSError as error:
            self.findings.append(self._refused(host, error))
            return None
        self.findings.append(judging.encrypted(_certified(wrapped, self.address), time.time()))
        return wrapped

    def _refused(self, host: str, error: OSError) -> Finding:
        tls = self.address.tls
        own = isinstance(tls, TlsFiles) and tls.certificate is not None
        return judging.handshake_failed(host, _said(error), bool(self.info.get("tls_verify")), own)

    def _log_in(self, sock: socket.socket, host: str) -> bool:
        try:
            identity = self.address.identity()
            options = {"verbose": False, "pedantic": False, "lang": "python", "version": "1"}
            options |= {"name": "diloco-doctor", "protocol": 1, "headers": True}
            sock.sendall(connect_line(options | self.address.login(self.info)) + b"PING\r\n")
            answer = _answer(sock)
        except ValueError as error:
            self.findings.append(judging.failed("credentials", str(error), _FILE))
            return False
        except OSError as error:
            # With TLS 1.3 a server looks at our certificate only when the handshake is over.
            if isinstance(sock, ssl.SSLSocket) and self.info.get("tls_verify"):
                self._correct(self._refused(host, error))
                return False
            answer = _said(error)
        name = identity.name if identity else ""
        self.findings.append(judging.let_in(name, answer, self._shown()))
        return not answer

    def _shown(self) -> str:
        """What proves who we are, where it is no identity."""
        with_ = self.address.login(self.info)
        for key, words in (("auth_token", "a token"), ("user", "a name and a password")):
            if key in with_:
                return words
        return "nothing"


_LOST = "see whether something between this machine and the hub ends connections"
_FILES = "mend the file, or name another"


def _addresses(host: str, port: int) -> tuple[list[str], str]:
    """A resolver cannot be told to stop: it is asked in a thread that ends with the process."""
    answers: queue.SimpleQueue[tuple[list[str], str]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put(([], (getattr(error, "strerror", None) or str(error)).lower()))
        else:
            answers.put((list(dict.fromkeys(str(each[4][0]) for each in found)), ""))

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=RESOLVE_S)
    except queue.Empty:
        return [], f"no answer within {RESOLVE_S:g} s"


def _line(sock: socket.socket) -> bytes:
    """Up to the end of a line. Byte by byte: what follows it is not ours to read, but TLS's.

    Raises TimeoutError after STEP_S, and ConnectionError.
    """
    until, line = time.monotonic() + STEP_S, b""
    while not line.endswith(b"\r\n"):
        sock.settimeout(max(until - time.monotonic(), 0.001))
        some = sock.recv(1)
        if not some:
            raise ConnectionError("the connection was closed")
        line += some
        if len(line) > HEAD_BYTES_MAX:
            raise ConnectionError("a line without end")
    sock.settimeout(STEP_S)
    return line[:-2]


def _answer(sock: socket.socket) -> str:
    """To CONNECT and PING: what the server has against us, "" for nothing."""
    until = time.monotonic() + STEP_S
    while time.monotonic() < until:
        try:
            line = _line(sock)
        except TimeoutError:
            break
        if line == b"PONG":
            return ""
        if line.startswith(b"-ERR"):
            return line[5:].decode("utf-8", "replace").strip("'")
        if line == b"PING":
            sock.sendall(b"PONG\r\n")
    return f"no answer within {STEP_S:g} s"


def _said(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return str(reason or error.strerror or error or "no answer").replace("_", " ").lower()


def _certified(sock: ssl.SSLSocket, address: Address) -> Encrypted:
    certificate: dict[str, Any] = sock.getpeercert() or {}
    names = {k: v for part in certificate.get("issuer", ()) for k, v in part}
    issuer = str(names.get("commonName") or names.get("organizationName") or "?")
    ends = float(ssl.cert_time_to_seconds(str(certificate["notAfter"])))
    own = address.tls.certificate if isinstance(address.tls, TlsFiles) else None
    return Encrypted(sock.version() or "TLS", issuer, ends, _own_ends(own))


def _own_ends(certificate: Path | None) -> float | None:
    """Of this site's; None where there is none, or the package that reads it is not installed."""
    if certificate is None:
        return None
    try:
        from diloco_shared.hub.certificates import ends_at

        ends: datetime = ends_at(certificate.read_text("ascii"))
    except (ImportError, OSError, ValueError):
        return None
    return ends.astimezone(UTC).timestamp()
