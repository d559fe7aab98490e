"""What goes wrong for a user of the command: one sentence and an exit status."""

# Exit statuses, so that scripts need not read sentences. 2 is the parser's: wrong usage.
FAILED = 1
NO_CLUSTER = 3
REFUSED = 4
UNKNOWN = 5
INVALID = 6
CONFLICT = 7
INTERRUPTED = 130


class CliError(Exception):
    """Shown without a traceback; the process ends with `status`."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


def counted(number: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def why(error: Exception) -> str:
    """What the system says of a file, without number and path, which stand beside it."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
