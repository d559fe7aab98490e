"""The emulated link: compiled, started, entered, stopped. See link.c for what it does."""

import ctypes
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HUB, SITE = "10.77.0.1", "10.77.0.2"
DEVICE = "wan"  # in either namespace, as link.c calls it
SOURCE = Path(__file__).with_name("link.c")
# From sysexits and automake: "this machine cannot run it", which is not a failure.
CANNOT = 77
_COMPILE_S = 60
_STOP_S = 10
_CLONE_NEWNET = 0x40000000


class LinkMissing(Exception):
    """This machine cannot emulate a link; the text says what it lacks."""


@dataclass(frozen=True)
class Shape:
    """One link. Rate in bits of IP packets per second, the round trip in seconds."""

    bits_per_s: float
    round_trip_s: float
    loss: float
    # In front of the transmitter, each way: what a router of that rate would have.
    queue_bytes: int
    seed: int = 1

    @property
    def bytes_per_s(self) -> float:
        return self.bits_per_s / 8


class Link:
    """A context: two namespaces joined by a link. Ends with this process, or after `seconds`."""

    def __init__(self, shape: Shape, seconds: float) -> None:
        self.shape = shape
        self.counts: dict[str, Any] = {}
        self._seconds = seconds
        self._folder = tempfile.TemporaryDirectory(prefix="wan-link-")
        self._program = Path(self._folder.name) / "link"
        self._process: subprocess.Popen[str] | None = None
        self._hub = self._site = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        shape = self.shape
        _compile(self._program)
        arguments = [
            shape.bytes_per_s, shape.round_trip_s / 2, shape.queue_bytes,
            shape.loss, shape.seed, self._seconds,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [str(self._program), "run", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout and self._process.stderr
        paths = self._process.stdout.readline().split()
        if len(paths) != 2:
            raise LinkMissing(self._process.stderr.read().strip() or "the emulator ended at once")
        self._hub, self._site = paths

    def enter_hub(self) -> None:
        """Move this thread, and all it starts from now on, to the hub's side."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(self._hub, "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise LinkMissing(f"cannot enter a namespace: {os.strerror(ctypes.get_errno())}")

    def at_site(self, command: list[str]) -> list[str]:
        """The command that runs `command` on the site's side."""
        return [str(self._program), "enter", self._site, *command]

    def stop(self) -> None:
        """Take the link away; `counts` says what crossed it."""
        process, self._process = self._process, None
        if process is not None:
            try:
                said, _ = process.communicate(input="", timeout=_STOP_S)
                self.counts = json.loads(said) if said.startswith("{") else {}
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self._folder.cleanup()


def _compile(program: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LinkMissing("there is no C compiler (cc, gcc or clang): install one")
    if os.geteuid() != 0:
        raise LinkMissing("network namespaces and TUN devices need root")
    command = [compiler, "-O2", "-o", str(program), str(SOURCE), "-lm", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if built.returncode:
        raise LinkMissing(f"the emulator does not compile: {built.stderr.strip()[:500]}")
