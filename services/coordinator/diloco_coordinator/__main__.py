"""`diloco-coordinator`: reads the environment, sets up the process, runs the app."""

import asyncio
import faulthandler
import sys

from diloco_shared.process.imported import importing


def main() -> None:
    """Exit status 0 when told to stop, 1 on a fault a restart may mend, 2 on a wrong set-up."""
    # A fault in compiled code, or of a mapped file, ends a process by a signal: not without a word.
    faulthandler.enable(2)
    with importing():
        import structlog

        from diloco_coordinator.app import Settings, serve
        from diloco_shared.process.faults import tell
        from diloco_shared.process.logs import configure
        from diloco_shared.process.set_up import WrongSetUp
        from diloco_shared.process.settings import said_of

    try:
        settings = Settings()
        configure(settings.log, json=settings.log_format == "json")
    except ValueError as error:
        print(f"diloco-coordinator: {said_of(error)}", file=sys.stderr)
        sys.exit(2)
    try:
        asyncio.run(serve(settings))
    except KeyboardInterrupt:
        pass
    except WrongSetUp as error:
        structlog.get_logger().error(str(error))
        sys.exit(error.status)
    except Exception as fault:
        tell(fault, settings.nats_url)
        sys.exit(1)


if __name__ == "__main__":
    main()
