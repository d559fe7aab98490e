"""How many files this process may have open at once.

Each file of a corpus is open for as long as somebody may read it, and a corpus of a terabyte has
four thousand. Systems allow a process some thousand unless it asks for more (the soft limit), and
far more once it does (up to the hard one).
"""

import resource
from contextlib import suppress


def allow_most() -> None:
    """As many as the system lets this process ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Where even that is refused, what there is may do: whoever opens one too many says so.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def too_many() -> str:
    """What is wrong where one more cannot be opened, and what to do."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process has as many files open as it may, {most}, and each file of a corpus is one. "
        "Allow it more: 'ulimit -n' in a shell, LimitNOFILE= of systemd, '--ulimit nofile=' of "
        "Docker"
    )
