"""`diloco-learner`: reads the environment, sets up jax and the process, runs the app."""

import asyncio
import os
import sys


def main() -> None:
    """Exit status 0 when told to stop, 1 on a fault a restart may mend, 2 on a wrong set-up."""
    import structlog
    from pydantic import ValidationError

    from diloco_learner.settings import Settings
    from diloco_shared.edges.bus import BusError
    from diloco_shared.edges.logs import configure
    from diloco_shared.edges.membership import FolderTaken
    from diloco_shared.edges.stopping import until_stopped

    try:
        settings = Settings()
        configure(settings.log)
    except (ValidationError, ValueError) as error:
        sys.exit(f"diloco-learner: {error}")
    _set_up_jax(settings.threads, str(settings.cache) if settings.cache else "")
    from diloco_learner.app import serve

    try:
        asyncio.run(until_stopped(serve(settings)))
    except FolderTaken as error:
        structlog.get_logger().error(str(error))
        sys.exit(2)
    except BusError as error:
        structlog.get_logger().error("no bus", url=settings.nats_url, error=str(error))
        sys.exit(1)
    sys.stdout.flush()
    # The train thread may be in the middle of a step: nothing of it is worth waiting for.
    os._exit(0)


def _set_up_jax(threads: int, cache: str) -> None:
    """Before jax is imported: threads, memory, and where compiled programs are kept."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if threads:
        flags = os.environ.get("XLA_FLAGS", "")
        limit = f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'}"
        os.environ["XLA_FLAGS"] = f"{flags} {limit} intra_op_parallelism_threads={threads}".strip()
    import jax

    if cache:
        for name, value in (
            ("jax_compilation_cache_dir", cache),
            ("jax_persistent_cache_min_compile_time_secs", 0.0),
            ("jax_persistent_cache_min_entry_size_bytes", 0),
        ):
            jax.config.update(name, value)  # type: ignore[no-untyped-call]
    # The train thread gives up the interpreter quickly: the other side has little to do.
    sys.setswitchinterval(0.001)


if __name__ == "__main__":
    main()
