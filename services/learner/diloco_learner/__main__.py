"""`diloco-learner`: reads the environment, sets up jax and the process, runs the app."""

import asyncio
import faulthandler
import os
import platform
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_shared.process.imported import importing

# Of the C library: large arrays get large pages, where the kernel gives them to those who ask.
TUNABLES, LARGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

if TYPE_CHECKING:
    from diloco_learner.hosts.leading_io import Hosts
    from diloco_learner.hosts.place import HostPlace
    from diloco_learner.settings import Settings


def main() -> None:
    """Exit status 0 when told to stop, 1 on a fault a restart may mend, 2 on a wrong set-up."""
    if _wants_large_pages():
        os.environ[TUNABLES] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    # A fault in compiled code, or of a mapped file, ends a process by a signal: not without a word.
    faulthandler.enable(2)
    from diloco_learner.hosts.place import place_of
    from diloco_learner.settings import Settings
    from diloco_shared.process.logs import configure
    from diloco_shared.process.settings import said_of

    try:
        settings = Settings()
        configure(settings.log, json=settings.log_format == "json")
        place = place_of(settings.hosts, settings.host_index, settings.host_address, os.environ)
    except ValueError as error:
        print(f"diloco-learner: {said_of(error)}", file=sys.stderr)
        sys.exit(2)
    with importing():
        _set_up_jax(settings, alone=place is None)
        import_module("diloco_learner.app")  # the largest part, which `_live` begins with
    hosts = None if place is None else _hosts(place, settings)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_live(settings, hosts))


def _hosts(place: "HostPlace", settings: "Settings") -> "Hosts":
    """The other processes of an island. Of those that follow it never returns."""
    import jax
    import structlog

    # Else processors of several hosts cannot compute together; devices have their own ways.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    from diloco_learner.hosts.computing_io import followed, gathered

    try:
        if place.leads:
            carried = settings.hosts_carry == "all"
            return gathered(place, settings.host_silence_s, carried=carried)
        followed(place, settings)
    except (OSError, RuntimeError) as error:
        structlog.get_logger().error("no island", error=str(error))
    os._exit(1)


async def _live(settings: "Settings", hosts: "Hosts | None") -> None:
    """Never returns: the train thread may be in the middle of a step, another thread of a long
    compilation, and nothing of either is worth waiting for."""
    import structlog

    from diloco_learner.app import serve
    from diloco_shared.process.faults import tell
    from diloco_shared.process.set_up import WrongSetUp
    from diloco_shared.process.stopping import CLOSES_S, until_stopped

    log, status, signals = structlog.get_logger(), 0, frozenset[int]()
    try:
        # Where all of an island are told to stop, each of the others tells this one so, too.
        signals = await until_stopped(serve(settings, hosts), once=hosts is not None)
    except WrongSetUp as error:
        log.error(str(error))
        status = error.status
    except (Exception, BaseExceptionGroup) as fault:
        tell(fault, settings.nats_url)
        status = 1
    if hosts is not None:
        from diloco_learner.hosts.computing_io import in_time

        await in_time(hosts.close, CLOSES_S)
        # Where another host alone was told, this one is to come back, as the others are.
        if hosts.lost or (hosts.stopped_by and signal.SIGTERM not in signals):
            status = status or 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a full disk takes nothing, and this process must end all the same
            stream.flush()
    os._exit(status)


def _wants_large_pages() -> bool:
    """Whether this process is to be started over: the C library reads its settings once.

    On a CPU each step takes its working memory anew: of 11 million parameters, 42,000 pages of 4 kB
    or a few hundred of 2 MB. The kernel clears each, in the time of the step.
    """
    if sys.platform != "linux" or TUNABLES in os.environ:
        return False
    library, version = platform.libc_ver()
    known = library == "glibc" and tuple(int(n) for n in version.split(".")[:2]) >= (2, 35)
    return known and THP.exists() and "[never]" not in THP.read_text("ascii")


def _set_up_jax(settings: "Settings", *, alone: bool = True) -> None:
    """Before jax is imported: threads and memory. Then who computes, and where compiled programs
    are kept. `alone`: this process is a learner by itself."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if threads := settings.threads:
        # The first bounds XLA's pool of threads, the flags what a single operation uses of it.
        os.environ["NPROC"] = str(threads)
        flags = os.environ.get("XLA_FLAGS", "")
        limit = f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'}"
        os.environ["XLA_FLAGS"] = f"{flags} {limit} intra_op_parallelism_threads={threads}".strip()
    import jax

    from diloco_learner.training import platforms
    from diloco_shared.numerics.compiled import use_at_most

    if threads:  # what copies moments has no thread of XLA's pool
        use_at_most(threads)
    platforms.settle()
    # On a CPU each thread computes what it asks for. Otherwise XLA's pool does: where that has one
    # thread, the next step would always come before an evaluation beside training.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if not alone:
        # Of several processes jax writes programs for the first one alone. Started again, that one
        # would be ready in seconds, and wait in a program for all others, which compile: half a
        # minute among processors, and for ever where GPUs find the fastest kernels together.
        jax.config.update("jax_enable_compilation_cache", False)
    elif settings.compiled is not None:
        import structlog

        from diloco_learner.training.compilation_cache import keep_on_disk

        if why := keep_on_disk(settings.compiled, settings.cache_bytes_max):
            structlog.get_logger().warning(why)
    # The train thread gives up the interpreter quickly: the other side has little to do.
    sys.setswitchinterval(0.001)


if __name__ == "__main__":
    main()
