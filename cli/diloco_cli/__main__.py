"""The `diloco` command."""

import os
import select
import signal
import sys
from contextlib import suppress

from diloco_cli.lines import columns, shaped
from diloco_cli.words import INTERRUPTED, CliError

STDOUT = 1


def main() -> None:
    """Run the command; whoever read its output may have gone meanwhile, as `head` does."""
    # A copy: rich puts nothing in the place of what nobody reads.
    copy = None
    with suppress(OSError):  # it was closed before the command began
        copy = os.dup(STDOUT)
    try:
        _run()
    except SystemExit as ended:
        # typer and rich make a failure of it. What broke may be another connection, too.
        if copy is None or not isinstance(ended.__context__, BrokenPipeError) or _is_read(copy):
            raise
        sys.exit(0)
    finally:
        _write_out()
        if copy is not None:
            os.close(copy)


def _run() -> None:
    """One sentence and a status for whatever goes wrong."""
    _end_in_order()
    try:
        # Takes most of the time until a command begins: Ctrl-C meanwhile is one like any other.
        from diloco_cli.commands import app_for

        app_for(sys.argv[1] if len(sys.argv) > 1 else "")()
    except CliError as error:
        _fail(error)
    except ExceptionGroup as group:
        foreseen, others = group.split(CliError)
        if foreseen is None or others is not None:
            raise
        _fail(_first(foreseen))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _end_in_order() -> None:
    """Told to end, or left by its terminal, a command clears up what it has begun, like a server
    over a folder, or a model in a temporary one. Not so where that is ignored (`nohup`)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            with suppress(ValueError):  # of another thread than the first
                signal.signal(number, _ends)


def _ends(number: int, _: object) -> None:
    sys.exit(128 + number)


def _is_read(pipe: int) -> bool:
    """Whether its other end is open, if it is a pipe."""
    ends = select.poll()
    ends.register(pipe, 0)  # that it is closed is told unasked
    return not ends.poll(0)


def _write_out() -> None:
    """Write what is left; to nowhere if nobody reads it: the end of the process would try it again,
    and call it a failure."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    except OSError:
        pass  # such as a full disk, which the end of the process tells of


def _first(group: ExceptionGroup[CliError]) -> CliError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


def _fail(error: CliError) -> None:
    for line in shaped([f"diloco: {error}"], columns(sys.stderr)):
        sys.stderr.write(line + "\n")
    sys.exit(error.status)


if __name__ == "__main__":
    main()
