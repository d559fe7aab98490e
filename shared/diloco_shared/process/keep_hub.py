"""Runs nats-server, and starts it anew when it would never go on by itself (see hub/watch.py).

    python -m diloco_shared.process.keep_hub STORE COMMAND ...
    python -m diloco_shared.process.keep_hub --at 10.0.0.1:4222 STORE nats-server -c nats.conf

A server that wants TLS or credentials is asked at its monitoring, `http: 127.0.0.1:8222` in its
configuration, which only this machine reaches (--monitor says where it is elsewhere). One that
wants a token is asked with that of --token-file: it logs each connection that has none.
Where a file of --reload changes, such as accounts.conf of a hub's folder, the server reads its
configuration again: `diloco site revoke` counts within seconds, wherever it was typed. A server
that cannot read it goes on with what it knew, so it is asked until it says that it has. The log
says so then, with the first digits of each file's SHA-256, by which one knows a list from another.
Its log passes through; its exit status is ours. It ends with this process, however that ends. Only
the standard library: the image of the message server has nothing else.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from diloco_shared.hub import leaves as hub_leaves
from diloco_shared.hub.watch import (
    LOOK_S,
    Changes,
    HubWatch,
    answers,
    loaded_at,
    read_by,
)
from diloco_shared.process.stopping import dies_with_parent, stop_signals

# For a server that is told to end, in seconds; then it is killed. One that holds a lock never ends.
ENDS_S = 10.0
# Between two looks at the files of --reload, in seconds: a revoked site is to be out at once.
FILES_S = 1.0
# Until it has read its configuration again, in seconds: it takes milliseconds.
READS_S = 0.3
# Until it is said that it has not, in seconds: a busy machine may take one.
SAYS_S = 3.0
# Of a file's SHA-256: nobody mistakes so many for those of another list.
DIGITS = 12
# Until it is asked once more to read what it could not, in seconds: somebody has to mend the file.
AGAIN_S = 10.0
UNREAD = (
    "its configuration could not be read, so whoever was revoked is still let in: its own log says "
    "what is wrong, 'diloco site' and 'diloco hub' write those files anew. It is asked again"
)
# Nobody may take that for a revoked site that is out.
UNSAID = "its monitoring does not answer, so see in its own log whether it has read"
# Whoever reads it may have been told that a revoked site is out.
UNCUT = (
    "leaf nodes stay as they are, so a revoked site that has one is still let in until this "
    "server is started anew"
)


Place = tuple[str, int]


class Rereading:
    """Has a server read its configuration, and looks whether it did.

    One that does not answer for itself is taken to have done so: whether it lives is `HubWatch`'s.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        at: Place,
        monitor: Place | None,
        files: Sequence[str],
        config: str = "",
    ) -> None:
        self.process, self.port, self.monitor = process, at[1], monitor
        self.files, self.config = files, config
        self.asked_at: float | None = None  # of a reading that is under way
        self.before = ""  # when it had last read it until then; "" where it does not say
        self.told = False  # since it was asked
        self.last, self.digests = True, ""  # of the reading that is under way

    def ask(self, now: float, *, last: bool = True) -> None:
        """Its files have changed. `last`: it is asked no more for this change.

        Only what the last reading brought is said to be read: the one before it may have begun
        when the files were not yet new.
        """
        _say("it is told to read its configuration again")
        # Before it reads them: it then has read these files, or newer ones.
        self.last, self.digests = last, _digests(self.files)
        self.before = self._loaded_at()
        self._hang_up(now)
        time.sleep(READS_S)

    def look(self, now: float) -> None:
        """Ask again, if it has not read it."""
        if self.asked_at is None:
            return
        found = self._loaded_at()
        if not self.before or found not in ("", self.before):
            self.asked_at = None
            if self.last:
                _say(f"it has read {self.digests}" if self.before else f"{UNSAID} {self.digests}")
            _cut_leaves(self.files, self.config)
        elif now - self.asked_at >= AGAIN_S:
            self._hang_up(now)
        elif found and not self.told and now - self.asked_at >= SAYS_S:
            self.told = True
            _say(UNREAD)

    def _hang_up(self, now: float) -> None:
        self.asked_at, self.told = now, False
        self.process.send_signal(signal.SIGHUP)

    def _loaded_at(self) -> str:
        return loaded_at(self.monitor, self.port) if self.monitor else ""


def run(
    store: str,
    at: Place,
    command: list[str],
    told: threading.Event,
    monitor: Place | None = None,
    files: Sequence[str] = (),
    token: str = "",
) -> int | None:
    """One life of the server: its exit status; None: it shall be started anew."""
    changes = Changes(_versions(files))
    if files:
        _say(f"it starts with {_digests(files)}")
    # It does not outlive this process: nobody would read what it says, or start it anew.
    ends = dies_with_parent(signal.SIGTERM)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=ends)
    watch = HubWatch()
    reading = Rereading(process, at, monitor, files, _config_of(command))
    threading.Thread(target=_pass_on, args=(process.stderr, watch), daemon=True).start()
    asked_at = time.monotonic()
    while True:
        try:
            return process.wait(FILES_S)
        except subprocess.TimeoutExpired:
            pass
        why = ""
        if changes.look(_versions(files)):
            reading.ask(time.monotonic(), last=not changes.left)
        reading.look(time.monotonic())
        if not told.is_set() and time.monotonic() - asked_at < LOOK_S:
            continue
        asked_at = time.monotonic()
        if not told.is_set():
            heard = answers(*at, token, monitor=monitor, listened=watch.listened)
            now, read = time.monotonic(), read_by(process.pid)
            why = watch.look(now, answers=heard, free_bytes=_free(store), read_bytes=read)
        if why or told.is_set():
            status = _ended(process)
            if told.is_set():
                return status
            _say(f"{why}: starting anew")
            return None


def _pass_on(log: Iterable[bytes], watch: HubWatch) -> None:
    """The server's log, to its end: a server whose log nobody takes waits with it for ever."""
    for line in log:
        watch.said(line)
        with suppress(OSError):  # a full disk loses lines
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def _say(text: str) -> None:
    """In the log, with the time, since logs are read long after; a full disk ends nobody."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with suppress(OSError):
        print(f"keep_hub: {now}: {text}", file=sys.stderr, flush=True)


def _versions(files: Sequence[str]) -> tuple[object, ...]:
    """Of each file something that is another once it is replaced; None where it is not there."""
    return tuple(_version(file) for file in files)


def _version(file: str) -> object:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _digests(files: Sequence[str]) -> str:
    """Names of files, each with the first digits that `sha256sum` shows of it."""
    return ", ".join(f"{os.path.basename(file)} ({_digest(file)})" for file in files)


def _digest(file: str) -> str:
    try:
        with open(file, "rb") as there:
            return hashlib.file_digest(there, "sha256").hexdigest()[:DIGITS]
    except OSError as error:
        return error.strerror or "it cannot be read"


def _config_of(command: Sequence[str]) -> str:
    """The configuration that the server is started with, which may lie elsewhere than the files
    that it includes; "" where its command names none."""
    found = ""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option in ("-c", "--c", "-config", "--config"):
            found = value if equals else after
    return found


def _cut_leaves(files: Sequence[str], config: str) -> None:
    """Sites' message servers come back with the rights that they have now, or not at all."""
    folders = sorted({os.path.dirname(file) for file in files})
    # A certificate that is not the hub's own may lie elsewhere, and be the only file. Then the
    # folder of the hub is that of the configuration.
    known = [*folders, *([os.path.dirname(config)] if config else [])]
    with_password = [f for f in known if os.path.exists(f"{f}/{hub_leaves.PASSWORD}")]
    folder = (with_password or folders)[0]
    try:
        ended = hub_leaves.cut(Path(folder), Path(config or f"{folder}/nats-server.conf"))
    except (OSError, ValueError) as error:
        _say(f"{UNCUT}: {error}")
        return
    if ended:
        _say(f"leaf nodes were cut off, {ended} in all: those that may be in come back")


def _free(store: str) -> int:
    """Bytes; none where nobody can say: this process must outlive whatever happens to the disk.

    As `durable.free_bytes`, which the image has not: a server that finds no inode for a file
    says that there is no space, however many bytes are left.
    """
    try:
        there = os.statvfs(store)
    except OSError:
        return 0
    return 0 if there.f_files and not there.f_favail else there.f_bavail * there.f_frsize


def _ended(process: "subprocess.Popen[bytes]") -> int:
    process.terminate()
    try:
        return process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _place(text: str) -> Place:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until it ends for good, and start it anew meanwhile; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--at", default="127.0.0.1:4222", help="where it listens: HOST:PORT")
    parser.add_argument(
        "--monitor", default="127.0.0.1:8222", help="where its monitoring listens: HOST:PORT, or ''"
    )
    parser.add_argument(
        "--reload",
        action="append",
        default=[],
        help="a file that the configuration includes or names; several times for several",
    )
    parser.add_argument("--token-file", default="", help="with the token that the server wants")
    parser.add_argument("store", help="its folder: `store_dir` in its configuration")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="nats-server and its options")
    args = parser.parse_args(arguments)
    at, monitor = _place(args.at), _place(args.monitor) if args.monitor else None
    token = Path(args.token_file).read_text("ascii").strip() if args.token_file else ""
    told_to_stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: told_to_stop.set())
    while True:
        status = run(args.store, at, args.command, told_to_stop, monitor, args.reload, token)
        if status is not None:
            return status


if __name__ == "__main__":
    sys.exit(main())
