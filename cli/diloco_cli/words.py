"""Numbers and errors as people say them; sizes are `diloco_shared.budget.terms.shown`."""


def counted(number: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def why(error: Exception) -> str:
    """What the system says of a file, without number and path, which stand beside it."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
