"""The process that checks a run (`diloco_learner.preflight`): started, heard, and ended with us.

A process of its own, so that this command needs no JAX, and so that a model that takes all memory
or never comes back costs one check and not the command.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_learner.preflight.findings import CHECKS, SOFTWARE, Finding, read, wrong
from diloco_shared.process.stopping import how_ended
from diloco_shared.reach.checkpoint_roots import roots_of
from diloco_shared.spec.mesh import AUTO
from diloco_shared.spec.run import RunSpec

COMMAND = (sys.executable, "-m", "diloco_learner.preflight")
# One check without a sign of life, in seconds. Compiling takes minutes. Whoever prepares a text,
# reads weights or a file of tokens for its digest, or waits for another one that does, gives one
# each minute.
CHECK_S_MAX = 3600.0
# What to look at where there was none, by what was under way.
_SILENT = {
    "devices": "look at the driver: JAX waits for a device, or for other hosts",
    "weights": "look at the disk or the link that the weights lie on: nothing of them came",
    "corpus": "look at the disk or the link that the corpus, or DILOCO_CORPORA, lies on: nothing "
    "was read or written there",
    "compile": "look for what the compiler waits for; a smaller model tells whether this one is "
    "too large to be compiled in that time",
    "step": "look for what the model waits for: in a run no learner's step would end",
    SOFTWARE: "look at the disk or the link that Python's packages lie on: nothing was begun",
}
_WAITS = "look for what waits: a disk, a link, or a file that another process holds"
# A line holds one finding, whose texts are bounded: six times as much, escaped for JSON.
LINE_CHARS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Checker:
    """`data_root`: folders that a run may read, as DILOCO_DATA_ROOT says them. `cache`: where text
    is prepared, if not as usual. `checkpoints`: where run-wide checkpoints are, `checkpoint_roots`:
    where else. `factories`: whose modules model.factory may name, as DILOCO_FACTORIES says it.
    `mesh`: how devices share the work, as DILOCO_MESH says it. `kept_at`: where all hosts of an
    island keep its checkpoints, as DILOCO_HOSTS_CHECKPOINTS says it."""

    data_root: str
    cache: Path | None = None
    checkpoints: str = ""
    checkpoint_roots: str = ""
    factories: str = ""
    mesh: str = AUTO
    kept_at: str = ""
    command: Sequence[str] = COMMAND
    check_s_max: float = CHECK_S_MAX

    @property
    def places(self) -> tuple[str, ...]:
        """All where run-wide checkpoints may be. Raises ValueError for more than anybody needs."""
        return roots_of(self.checkpoints, self.checkpoint_roots)

    def findings(self, spec: RunSpec) -> Iterator[Finding]:
        """As they are made. A check that ends the process, or takes for ever, is one of them."""
        arguments = ["--data-root", self.data_root, "--factories", self.factories]
        arguments += ["--checkpoint-roots", self.checkpoint_roots, "--parent", str(os.getpid())]
        arguments += ["--checkpoints", self.checkpoints] if self.checkpoints else []
        arguments += ["--mesh", self.mesh, "--kept-at", self.kept_at]
        arguments += [] if self.cache is None else ["--cache", str(self.cache)]
        process = subprocess.Popen(
            [*self.command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        heard = _Heard(process, self.check_s_max)
        try:
            yield from heard.findings(spec)
        finally:
            heard.end()


class _Heard:
    """What the process says, one line after another."""

    def __init__(self, process: "subprocess.Popen[str]", check_s_max: float) -> None:
        self.process, self.check_s_max = process, check_s_max
        self.under_way, self.late = "", False
        self.watch: threading.Timer | None = None

    def findings(self, spec: RunSpec) -> Iterator[Finding]:
        last = ""
        for line in self._lines(spec):
            if "begins" in line:
                self.under_way = str(line["begins"])
                continue
            finding = read(line)
            self.under_way, last = "", finding.name
            yield finding
        self.process.wait()
        if last not in (CHECKS[-1], SOFTWARE):
            yield self._ended()

    def _lines(self, spec: RunSpec) -> Iterator[dict[str, Any]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self._wait_on()
        with suppress(BrokenPipeError):  # it ended before it read; what it said is there
            self.process.stdin.write(spec.model_dump_json())
            self.process.stdin.close()
        while text := self.process.stdout.readline(LINE_CHARS_MAX):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                self._wait_on()
                yield line

    def _wait_on(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        self.watch = threading.Timer(self.check_s_max, self._give_up)
        self.watch.daemon = True
        self.watch.start()

    def _give_up(self) -> None:
        self.late = True
        self.process.kill()

    def end(self) -> None:
        """Nothing is left of it."""
        if self.watch is not None:
            self.watch.cancel()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _ended(self) -> Finding:
        name = self.under_way or SOFTWARE
        if self.late:
            text = f"gave no sign for {self.check_s_max / 60:.0f} minutes"
            return wrong(name, text, _SILENT.get(name, _WAITS))
        how = how_ended(self.process.returncode)
        if how == "SIGKILL":
            how = "killed: memory may have run out"
        remedy = "look at what it said above; the system's log names a process that took too much"
        text = f"ended the process that made it ({how})"
        return wrong(name, text, remedy)
