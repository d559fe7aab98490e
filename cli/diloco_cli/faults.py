"""What goes wrong for a user of the command: one sentence and an exit status."""


class CliError(Exception):
    """Shown without a traceback; the process ends with `status`."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status
