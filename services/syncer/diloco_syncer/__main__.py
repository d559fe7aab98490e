"""`diloco-syncer`: reads the environment, sets up the process, runs the app."""

import asyncio
import faulthandler
import os
import sys

from diloco_shared.process.imported import importing


def main() -> None:
    """Exit status 0 when told to stop, 1 on a fault a restart may mend, 2 on a wrong set-up."""
    # A fault in compiled code, or of a mapped file, ends a process by a signal: not without a word.
    faulthandler.enable(2)
    # The merge is memory-bound and deterministic; jax must find no accelerator to reserve.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with importing():
        import structlog
        import uvloop

        from diloco_shared.process.faults import tell
        from diloco_shared.process.logs import configure
        from diloco_shared.process.set_up import WrongSetUp
        from diloco_shared.process.settings import said_of
        from diloco_shared.process.stopping import until_stopped
        from diloco_syncer.app import Settings, serve

    try:
        settings = Settings()
        configure(settings.log, json=settings.log_format == "json")
    except ValueError as error:
        print(f"diloco-syncer: {said_of(error)}", file=sys.stderr)
        sys.exit(2)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_stopped(serve(settings)))
    except WrongSetUp as error:
        structlog.get_logger().error(str(error))
        sys.exit(error.status)
    except Exception as fault:
        tell(fault, settings.nats_url)
        sys.exit(1)


if __name__ == "__main__":
    main()
