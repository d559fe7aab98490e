"""The embedded nats-server: found, verified, configured, started, stopped, killed, restarted.

One NatsServer owns one folder (`store_dir`), held by a file lock that the server process inherits:
a second instance on the same folder is refused while its owner lives. A server that outlived its
owner (killed with SIGKILL, say) is stopped, and the folder taken over.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import structlog

from diloco_shared.bus.nats.hub_config import Routes, cluster, in_config
from diloco_shared.durable import begin_folder, free_bytes
from diloco_shared.hub.nats_binary import BinaryError, find_binary
from diloco_shared.hub.watch import (
    UNANSWERED_S,
    FirstReading,
    HubWatch,
    answers,
    read_by,
)
from diloco_shared.process.stopping import dies_with_parent

# One message may be a manifest of 1 MiB plus headers; chunks are half a MiB.
MAX_PAYLOAD_BYTES = 2 << 20
# Reservations, not use: the sum of the limits of all streams, which nobody could raise here. Each
# stream has its own limit, and the disk is full before this. The server counts with 63 bits.
MAX_FILE_BYTES = 1 << 62
# Nothing of ours is kept in memory but consumers' state.
MAX_MEMORY_BYTES = 256 << 20
# What the server has just stored stays in its memory as long as there is room: without a limit, ten
# learners' fragments made that 900 MB; with it, no slower. Not hard: what is needed is taken.
MEMORY_SOFT_LIMIT = "384MiB"
# The server rotates at this size and keeps one older file.
LOG_BYTES_MAX = 8 << 20
# A port chosen here may be taken before the server binds it.
_PORT_TRIES = 5
_POLL_S = 0.02
# For a start, in seconds in which it reads nothing more of its streams. Between two words about it.
START_S, START_SAY_S = UNANSWERED_S, 20.0
# For an abandoned server to write what it has and exit.
_ORPHAN_S = 10.0

_log = structlog.get_logger(__name__)


class NatsServer:
    """A nats-server with JetStream on loopback.

    `port` 0 chooses a free one at the first start and keeps it. `token`, or `user` and `password`,
    are demanded from clients when given; `url` contains them, so do not log it: use `address`.
    `dies_with_owner` ends the server with this process (Linux; start it from the main thread).
    `sync`: tape and buckets are on disk when acknowledged; False only to measure what that costs.
    `account`: whose streams they are, where several accounts share a store; of `user`.
    `routes`: to the other nodes of a hub of several, each of which has a `name` of its own.
    """

    def __init__(
        self,
        store_dir: Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        name: str = "diloco",
        token: str | None = None,
        user: str | None = None,
        password: str | None = None,
        binary: Path | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        dies_with_owner: bool = False,
        sync: bool = True,
        account: str = "",
        routes: Routes | None = None,
    ) -> None:
        self.store_dir = store_dir.resolve()
        self.port = port
        self.host = host
        self.name = name
        self._token = token
        self._user = user
        self._password = password
        self._binary = binary
        self._max_file_bytes = max_file_bytes
        self._dies_with_owner = dies_with_owner
        self._sync = sync
        self._account = account
        self._routes = routes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None
        self._read_up_to = 0  # of the log, for `ails`
        self._watch = HubWatch()
        self._paused = False

    @property
    def address(self) -> str:
        """host:port"""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        credentials = self._token or (f"{self._user}:{self._password}" if self._user else "")
        return f"nats://{credentials}@{self.address}" if credentials else f"nats://{self.address}"

    @property
    def pid(self) -> int | None:
        """Of the running server; None when it does not run."""
        return self._process.pid if self.running and self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the last server process; negative for a signal, None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def log_path(self) -> Path:
        return self.store_dir / "nats-server.log"

    @property
    def _config_path(self) -> Path:
        return self.store_dir / "nats-server.conf"

    async def start(self, *, timeout_s: float = START_S) -> None:
        """Start, or start again on the same port and store; returns when clients can connect.

        A server reads its streams first, which takes minutes or hours where a power cut left much
        of them to be read anew. `timeout_s` is for one that reads nothing more.

        Raises BinaryError: wrong or missing binary, folder in use, port taken, start failed.
        """
        if self.running:
            return
        binary = await asyncio.to_thread(find_binary, self._binary)
        await asyncio.to_thread(begin_folder, self.store_dir)
        await self._lock()
        chosen = self.port != 0
        try:
            for attempt in range(_PORT_TRIES):
                if not chosen:
                    self.port = free_port(self.host)
                _refuse_taken_port(self.host, self.port)
                self._spawn(binary)
                if await self._ready(timeout_s):
                    break
                reason = self._failure()
                if chosen or "address already in use" not in reason or attempt == _PORT_TRIES - 1:
                    raise BinaryError(f"nats-server on {self.address} did not start: {reason}")
        except BaseException:
            await self.kill()
            self._unlock()
            raise
        self._write_holder()
        _log.info("nats-server runs", address=self.address, pid=self.pid)

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Clean shutdown by SIGTERM, by SIGKILL after `timeout_s`; the folder is free then."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, timeout_s)
            except subprocess.TimeoutExpired:
                _log.warning("nats-server did not stop in time; killed", pid=process.pid)
                await self.kill()
        self._unlock()

    async def kill(self) -> None:
        """SIGKILL. The folder stays locked, for a `start` on the same port and store."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def pause(self) -> None:
        """SIGSTOP: the server stops answering and keeps its connections."""
        self._paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        self._paused = False
        self._signal(signal.SIGCONT)

    def ails(self) -> str:
        """Why it is to be started anew although it runs, "" if it is not; waits for its answer.

        Reads what its log has said since the last call. One that was told to stand still is well.
        """
        if self._paused or not self.running:
            return ""
        try:
            self._watch.said(self._read_log())
            free = free_bytes(self.store_dir) or 0
        except OSError:
            return ""
        heard = answers(self.host, self.port, self._token or "")
        now, read = time.monotonic(), read_by(self.pid or 0)
        return self._watch.look(now, answers=heard, free_bytes=free, read_bytes=read)

    def _read_log(self) -> bytes:
        size = self.log_path.stat().st_size
        with self.log_path.open("rb") as log:
            # A shorter one is new: the server rotates.
            log.seek(self._read_up_to if size >= self._read_up_to else 0)
            said = log.read(LOG_BYTES_MAX)
            # A line that is not whole yet is read again: where it begins says whose words it has.
            left = len(said) - 1 - said.rfind(b"\n")
            self._read_up_to = log.tell() - (left if left < LOG_BYTES_MAX else 0)
        return said

    async def terminate(self, *, timeout_s: float = 10.0) -> None:
        """SIGTERM; SIGKILL after `timeout_s`. The folder stays locked, for a `start`."""
        if self._process is not None and self.running:
            self._process.terminate()
            try:
                await asyncio.to_thread(self._process.wait, timeout_s)
            except subprocess.TimeoutExpired:
                await self.kill()

    async def wait(self) -> int:
        """Exit status of the server process, when it has ended by whatever cause."""
        if self._process is None:
            raise BinaryError("nats-server was never started")
        return await asyncio.to_thread(self._process.wait)

    # --- steps of a start ---------------------------------------------------------------------

    def _signal(self, number: int) -> None:
        if self._process is None or self._process.poll() is not None:
            raise BinaryError("nats-server does not run")
        self._process.send_signal(number)

    async def _lock(self) -> None:
        """Hold `store_dir`; raises BinaryError naming the process that does."""
        if self._lock_fd is not None:
            return
        fd = os.open(self.store_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _locked(fd) and not await self._end_orphan(fd):
                holder = _holder(fd)
                raise BinaryError(
                    f"the folder {self.store_dir} is in use by another instance (pid "
                    f"{holder.get('owner', 'unknown')}, its nats-server pid "
                    f"{holder.get('server', 'unknown')}); stop that one, or choose another folder"
                )
        except BaseException:
            os.close(fd)
            raise
        self._lock_fd = fd
        self._write_holder()

    async def _end_orphan(self, fd: int) -> bool:
        """Stop the server of an owner that is gone; True when the folder is ours then."""
        holder = _holder(fd)
        owner, server = holder.get("owner", 0), holder.get("server", 0)
        if not server or _alive(owner) or str(self._config_path) not in _command_line(server):
            return False
        _log.warning("stopping a nats-server without an owner", pid=server, owner=owner)
        os.kill(server, signal.SIGCONT)
        os.kill(server, signal.SIGTERM)
        deadline = time.monotonic() + _ORPHAN_S
        while time.monotonic() < deadline:
            if _locked(fd):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _write_holder(self) -> None:
        assert self._lock_fd is not None
        text = json.dumps({"owner": os.getpid(), "server": self.pid or 0}).encode()
        os.pwrite(self._lock_fd, text, 0)
        os.ftruncate(self._lock_fd, len(text))

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _spawn(self, binary: Path) -> None:
        self._watch, self._paused = HubWatch(), False
        if self.log_path.exists():
            self._read_up_to = self.log_path.stat().st_size
        config = self._config_path
        config.touch(mode=0o600)
        config.write_text(self._config(), "utf-8", "surrogateescape")
        errors = self.store_dir / "nats-server.err"
        assert self._lock_fd is not None
        with errors.open("wb") as stream:
            self._process = subprocess.Popen(
                [str(binary), "--config", str(config)],
                env={"GOMEMLIMIT": MEMORY_SOFT_LIMIT} | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                # Its own process group: Ctrl-C is for us, we stop the server last.
                start_new_session=True,
                pass_fds=(self._lock_fd,),
                preexec_fn=dies_with_parent(signal.SIGTERM) if self._dies_with_owner else None,
            )

    def _config(self) -> str:
        config: dict[str, Any] = {
            "server_name": self.name,
            "listen": self.address,
            "max_payload": MAX_PAYLOAD_BYTES,
            "ping_interval": "10s",
            "ping_max": 2,
            "log_file": str(self.log_path),
            "logfile_size_limit": LOG_BYTES_MAX,
            "logfile_max_num": 2,
            "jetstream": {
                "store_dir": str(self.store_dir),
                "max_mem": MAX_MEMORY_BYTES,
                "max_file": self._max_file_bytes,
                # On disk before it is acknowledged: the tape and all buckets. Streams of what can
                # be made again say otherwise (bus/nats/streams.py, docs/how-to/deploy.md).
                "sync_interval": "always" if self._sync else "2m",
            },
        }
        if self._routes is not None:
            config["cluster"] = cluster(self._routes)
        if self._account:
            login = {"user": self._user, "password": self._password}
            config["accounts"] = {self._account: {"jetstream": "enabled", "users": [login]}}
        elif self._token is not None:
            config["authorization"] = {"token": self._token}
        elif self._user is not None:
            config["authorization"] = {"user": self._user, "password": self._password or ""}
        return in_config(config, indent=2)

    async def _ready(self, timeout_s: float) -> bool:
        """Wait until the server says INFO; False when it exited."""
        began = said_at = time.monotonic()
        reading = FirstReading()
        while not reading.hangs(now := time.monotonic(), read_by(self.pid or 0), timeout_s):
            if not self.running:
                return False
            if now - said_at > START_SAY_S:
                said_at = now
                _log.info("nats-server still reads what it keeps", seconds=round(now - began))
            info = await _info(self.host, self.port)
            if info is not None:
                if info.get("server_name") != self.name or not info.get("jetstream"):
                    raise BinaryError(
                        f"another server ({info.get('server_name')!r}) answers on {self.address}"
                    )
                return True
            await asyncio.sleep(_POLL_S)
        raise BinaryError(
            f"nats-server on {self.address} was not ready after {now - began:.0f} s, and reads "
            f"nothing more: {self._failure()}"
        )

    def _failure(self) -> str:
        """The last words of the server."""
        words: list[str] = []
        for path in (self.store_dir / "nats-server.err", self.log_path):
            if path.exists():
                words += path.read_text("utf-8", "replace").splitlines()[-20:]
        fatal = [line for line in words if "[FTL]" in line or "nats-server:" in line]
        last = (fatal or words or ["it said nothing"])[-1]
        return f"{last.strip()} (exit status {self.returncode}, log {self.log_path})"


def _locked(fd: int) -> bool:
    """Try to lock; whether it is ours."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(fd: int) -> dict[str, int]:
    """What the lock's holder wrote; empty when that is unreadable."""
    try:
        found = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _command_line(pid: int) -> str:
    """Of a process, by /proc or `ps`; empty when there is no such process."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
    except OSError:
        found = subprocess.run(
            ["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return found.stdout


def free_port(host: str) -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _refuse_taken_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex((host, port)) == 0:
            raise BinaryError(
                f"port {port} on {host} is taken: something answers there; stop it or choose "
                "another port"
            )


async def _info(host: str, port: int) -> dict[str, Any] | None:
    """The server's INFO, or None while nothing answers."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return None
    if not line.startswith(b"INFO "):
        return None
    info: dict[str, Any] = json.loads(line[5:])
    return info
