"""Processes of the product under a test's control: started, awaited, stopped and killed."""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from waiting import wait_until

from diloco_client import Client

# Starting jax in several processes on two busy cores takes its time.
PATIENCE_S = 180.0
# What a process may take to end once it is told to.
ENDING_S = 60.0
# One folder of compiled programs for all: compiling is most of what a learner's start takes.
COMPILED = Path(__file__).parents[2] / ".pytest_cache" / "compiled"

# A learner of a small model takes two hundred steps a second, and no test needs so many: what it
# does not compute is left to the tests beside this one.
STEPPING_SELDOM = {"DILOCO_DUTY_CYCLE": "0.5"}
# For those that train in earnest, with code that is optimised a little: it compiles sooner than
# what is optimised in full, and its steps are about as quick.
OPTIMISED = (
    "--xla_backend_optimization_level=1 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
ALWAYS = {"DILOCO_DUTY_CYCLE": "1", "XLA_FLAGS": OPTIMISED}


def environment(**more: str) -> dict[str, str]:
    return {"DILOCO_CACHE": str(COMPILED)} | STEPPING_SELDOM | os.environ | more


def diloco(
    *arguments: str, patience_s: float = PATIENCE_S, **more: str
) -> subprocess.CompletedProcess[str]:
    """A command as a user types it, carried out to its end."""
    return subprocess.run(
        [sys.executable, "-m", "diloco_cli", *arguments],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )


def diloco_says(*arguments: str, status: int = 0) -> str:
    """What a command prints on its standard output, if it ends with `status` as it shall."""
    done = diloco(*arguments)
    assert done.returncode == status, done.stderr + done.stdout[-2000:]
    return done.stdout


def family(pid: int) -> list[psutil.Process]:
    """A supervisor, its services and its message server."""
    supervisor = psutil.Process(pid)
    return [supervisor, *supervisor.children(recursive=True)]


def command(process: psutil.Process) -> str:
    """Its command line; "" once it is dead, also if nobody has taken note of that yet."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""


def tails(logs: Iterable[Path]) -> str:
    """What a failure is explained by."""
    return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-4000:]}" for p in logs)


class Process:
    """A module of the product in a process of its own, which prints into `log`."""

    def __init__(self, log: Path, module: str, *arguments: str, **more: str) -> None:
        self.log = log
        self.told = False  # to end
        with log.open("ab") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment(**more),
                stdout=out,
                stderr=out,
            )

    def ended(self) -> int:
        """Its exit status, once it has ended by itself."""
        return self.popen.wait(ENDING_S)

    def stop(self) -> int:
        """Ask it to end; its exit status. It is killed if it takes too long."""
        self.told = True
        self.popen.terminate()
        try:
            return self.ended()
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        self.told = True
        self.popen.kill()
        return self.popen.wait()


class Services:
    """Services around a message server, each started as its supervisor would."""

    def __init__(self, data: Path, nats_url: str, **more: str) -> None:
        self.data = data
        self.environment = {"DILOCO_NATS_URL": nats_url, "DILOCO_DATA": str(data), **more}
        self.all: list[Process] = []
        self.newest: dict[str, Process] = {}  # by name

    def start(self, module: str, name: str, **more: str) -> Process:
        shown = {"DILOCO_ID": name, "DILOCO_THREADS": "1", "OMP_NUM_THREADS": "1"}
        chosen = self.environment | shown | more
        started = Process(self.data / f"{name}.log", module, **chosen)
        self.all.append(started)
        self.newest[name] = started
        return started

    def coordinator(self, **more: str) -> Process:
        """Start one on a free port; `address` tells where it answers."""
        self._url.unlink(missing_ok=True)  # of the one before
        return self.start("diloco_coordinator", "coordinator", DILOCO_PORT="0", **more)

    @property
    def _url(self) -> Path:
        return self.data / "coordinator" / "url"

    def address(self) -> str:
        """Of the coordinator's API, as soon as it has written that and `token`."""

        def written() -> str:
            self.check()
            return self.token() and self._url.read_text().strip()

        address: str = wait_until(
            written, "the coordinator's address", patience_s=PATIENCE_S, tolerated=(OSError,)
        )
        return address

    def token(self) -> str:
        """The administrator's."""
        return (self.data / "admin-token").read_text().strip()

    @contextmanager
    def client(self) -> Iterator[Client]:
        """The administrator's, as soon as the coordinator answers."""
        with Client(self.address(), self.token()) as client:
            wait_until(client.ready, "the coordinator", patience_s=PATIENCE_S)
            yield client

    def check(self) -> None:
        """None has ended that was not told to."""
        lost = [p.log for p in self.all if not p.told and p.popen.poll() is not None]
        assert not lost, tails(lost)

    def logs(self) -> str:
        return tails(sorted({p.log for p in self.all}))


@contextmanager
def services(data: Path, nats_url: str, **more: str) -> Iterator[Services]:
    """None is left afterwards; a failure shows their logs."""
    found = Services(data, nats_url, **more)
    try:
        yield found
    except BaseException:
        print(found.logs())
        raise
    finally:
        for process in found.all:
            process.kill()
