"""When a message server that still runs is worth a new start.

Two things it never mends by itself (nats-server 2.15.1). After a full disk it refuses what it could
not write, whatever room there is later. And a write that fails may leave a lock held for ever: then
it keeps its connections and answers no question about its streams (nats-server issues 8231, 8386).

Only the standard library: the image of the message server has nothing else.
"""

import http.client
import json
import secrets
import socket
import time
from typing import Any

# So end its lines about a file that it cannot write for want of disk.
NO_SPACE = b": no space left on device"
# In lines about a client, a site's server or another node. They repeat what was sent, even by
# somebody who is not let in.
OF_OTHERS = (b" - cid:", b" - lid:", b" - rid:")
# What it says once it listens to clients: it has read what it keeps by then.
LISTENS = b"Listening for client connections on"
# Free disk with which a start anew is worth it: several of the server's 8 MiB blocks.
ROOM_BYTES = 64 << 20
# Between two looks, in seconds.
LOOK_S = 2.0
# For one answer about its streams, in seconds.
ANSWER_S = 5.0
# What its monitoring says: some 3 kB a stream, of the four of each of a thousand runs.
JSZ_BYTES_MAX = 16 << 20
# Without any answer it is started anew after this many seconds: a saturated disk holds up answers
# for 5 to 10 s. Sooner where it has said that a write failed: then the lock is what to expect.
SILENT_S, SILENT_FULL_S = 60.0, 10.0
# Before its first answer it may read what it keeps: hundreds of GB, where a power cut left much of
# it to be read anew. It is left to that while it reads on, and then for so many seconds.
UNANSWERED_S = 900.0
# Bytes that count as reading on: what it reads of our own questions, one each LOOK_S, is less.
READ_BYTES = 1 << 20
# Also while it reads on: a disk of 100 MB/s gives 4 TB in half a day. One that takes longer is not
# about to answer.
READING_S_MAX = 43_200.0


class FirstReading:
    """What a server does that has not answered yet. Pure."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.moved_at = 0.0  # when it had read on last
        self.read = 0  # bytes, by then

    def hangs(self, now: float, read_bytes: int | None, patience_s: float) -> bool:
        """Whether it has read next to nothing for so long; `read_bytes`: in all its life."""
        if self.began is None:
            self.began, self.moved_at, self.read = now, now, read_bytes or 0
        if read_bytes is not None and read_bytes - self.read >= READ_BYTES:
            self.moved_at, self.read = now, read_bytes
        return now - self.moved_at >= patience_s or now - self.began >= READING_S_MAX


class HubWatch:
    """Of one life of the server. Pure."""

    def __init__(self) -> None:
        self.no_space = False
        self.silent_since: float | None = None
        self.listened = self.answered = False
        self.reading = FirstReading()

    def said(self, log: bytes) -> None:
        """What its log says; lines may come in any portions that do not cut off where they begin.

        What others had it say counts for nothing: they could have it started anew for ever.
        """
        for line in log.splitlines():
            if not any(mark in line for mark in OF_OTHERS):
                self.no_space = self.no_space or line.endswith(NO_SPACE)
                self.listened = self.listened or LISTENS in line

    def look(
        self, now: float, *, answers: bool | None, free_bytes: int, read_bytes: int | None = None
    ) -> str:
        """Why it is to be started anew; "" if it is not.

        `answers`: as `answers` says it. `read_bytes`: what it has read so far; None where nobody
        can say.
        """
        if self.no_space and free_bytes >= ROOM_BYTES:
            return "it ran out of disk, and there is room again"
        self.listened = self.listened or answers is not None
        # One that refuses still reads. One that has listened listens elsewhere: nobody can ask it.
        if answers or (answers is None and self.listened):
            self.silent_since, self.answered = None, True
            return ""
        if self.silent_since is None:
            self.silent_since = now
        if self._hangs(now, self.silent_since, read_bytes):
            return f"it has answered nothing about its streams for {now - self.silent_since:.0f} s"
        return ""

    def _hangs(self, now: float, since: float, read_bytes: int | None) -> bool:
        if self.answered:
            return now - since >= self._silent_s
        return self.reading.hangs(now, read_bytes, self._silent_s)

    @property
    def _silent_s(self) -> float:
        if self.no_space:
            return SILENT_FULL_S
        return SILENT_S if self.answered else UNANSWERED_S


class Changes:
    """When a server is to read its configuration again. Pure.

    Twice for each change, a look apart: nats-server 2.15.1 leads an account that it meets for the
    first time nowhere until it reads the configuration once more.
    """

    def __init__(self, versions: tuple[object, ...]) -> None:
        """`versions`: of the files that its configuration includes, as the server read them."""
        self.versions = versions
        self.left = 0

    def look(self, versions: tuple[object, ...]) -> bool:
        """Whether it is to read now. What is not there is being replaced, and waits for a look;
        the others do not, since it may be away for long."""
        pairs = zip(versions, self.versions, strict=True)
        there = tuple(known if found is None else found for found, known in pairs)
        if there != self.versions:
            self.versions, self.left = there, 2
        if not self.left:
            return False
        self.left -= 1
        return True


def read_by(pid: int) -> int | None:
    """Bytes that a process has read so far, from disks and elsewhere; None where nobody can say."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as said:
            found = dict(line.split(": ") for line in said)
        return int(found["rchar"])
    except (OSError, ValueError, KeyError):
        return None


def answers(
    host: str,
    port: int,
    token: str = "",
    timeout_s: float = ANSWER_S,
    monitor: tuple[str, int] | None = None,
    *,
    listened: bool = False,
) -> bool | None:
    """Whether the server answers a question about its streams; None where it refuses to be asked:
    it does not listen yet, whatever its monitoring says by then, or not there.

    One that wants TLS, or credentials that we have not, is asked at `monitor`, where its monitoring
    listens (`http` in its configuration), which reads the state of every stream. True also where
    that cannot be asked. One whose monitoring says that it wants either is asked nowhere else once
    it is known to have `listened`: it logs each connection that comes without.
    """
    until = time.monotonic() + timeout_s
    if monitor is not None and (server_id := _closed(monitor, port, token, timeout_s / 2)):
        if not listened and _refuses(host, port, until):
            return None
        try:
            return _monitored(monitor, server_id, max(until - time.monotonic(), 0.001))
        except (OSError, ValueError, http.client.HTTPException):
            return False
    try:
        server = socket.create_connection((host, port), timeout_s)
    except ConnectionRefusedError:
        return None
    except OSError:
        return False
    try:
        with server:
            heard = _heard(server, b"\r\n", until)
            info = json.loads(heard[len(b"INFO ") :]) if heard.startswith(b"INFO ") else {}
            said = None if info.get("tls_required") else _asked(server, token, until)
        if said is None and monitor is not None:
            left_s = max(until - time.monotonic(), 0.001)
            return _monitored(monitor, str(info.get("server_id", "")), left_s)
    except (OSError, ValueError, http.client.HTTPException):  # it hangs, hangs up, talks no sense
        return False
    return said is not False


def loaded_at(monitor: tuple[str, int], port: int) -> str:
    """When the server of that port has last read its configuration; "" where this is not its
    monitoring, or there is none.

    One that could not read it goes on with the one of before, and tells its log alone.
    """
    try:
        body = _got(monitor, "/varz", ANSWER_S)
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    return str(body.get("config_load_time", "")) if body.get("port") == port else ""


def _refuses(host: str, port: int, until: float) -> bool:
    try:
        left_s = max(until - time.monotonic(), 0.001)
        socket.create_connection((host, port), left_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _asked(server: socket.socket, token: str, until: float) -> bool | None:
    """Over the connection itself; None: it does not let us in."""
    inbox = f"_INBOX.{secrets.token_hex(8)}"
    login = {"verbose": False, "auth_token": token, "headers": True, "no_responders": True}
    ask = f"CONNECT {json.dumps(login)}\r\nSUB {inbox} 1\r\nPUB $JS.API.INFO {inbox} 0\r\n\r\n"
    server.sendall(ask.encode())
    while True:
        line = _heard(server, b"\r\n", until)
        if line.startswith(b"MSG "):
            return True
        if line.startswith(b"-ERR"):
            return None
        if line.startswith(b"HMSG "):  # nobody listens: it has turned its streams off
            return False
        if line.startswith(b"PING"):
            server.sendall(b"PONG\r\n")


def _closed(monitor: tuple[str, int], port: int, token: str, timeout_s: float) -> str:
    """The id of the server of that port, if this is its monitoring, and it lets us in nowhere: it
    wants TLS, or to know who we are, and we have no `token`."""
    try:
        body = _got(monitor, "/varz", timeout_s)
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    wants = body.get("tls_required") or (body.get("auth_required") and not token)
    return str(body.get("server_id", "")) if wants and body.get("port") == port else ""


def _monitored(monitor: tuple[str, int], server_id: str, timeout_s: float) -> bool:
    """Over HTTP. Raises OSError, ValueError and HTTPException for what is no answer."""
    try:
        body = _got(monitor, "/jsz?accounts=true&streams=true", timeout_s)
    except ConnectionRefusedError:
        return True
    # Another server of this machine has the port: nobody can ask ours.
    return body.get("server_id") != server_id or not body.get("disabled")


def _got(monitor: tuple[str, int], path: str, timeout_s: float) -> dict[str, Any]:
    """What the monitoring says. Raises OSError, ValueError and HTTPException."""
    asked = http.client.HTTPConnection(*monitor, timeout=timeout_s)
    try:
        asked.request("GET", path)
        body = json.loads(asked.getresponse().read(JSZ_BYTES_MAX))
    finally:
        asked.close()
    if not isinstance(body, dict):
        raise ValueError(f"{path} is no object")
    return body


def _heard(server: socket.socket, end: bytes, until: float) -> bytes:
    """One line. Raises TimeoutError, or ConnectionError when the server hangs up."""
    line = b""
    while not line.endswith(end):
        server.settimeout(max(until - time.monotonic(), 0.001))
        some = server.recv(1)
        if not some:
            raise ConnectionError("the server hung up")
        line += some
    return line
