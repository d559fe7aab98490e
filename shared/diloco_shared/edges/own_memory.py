"""How much memory this process needs by itself."""

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous resident memory: mapped files are left out, since the kernel can drop them.

    Where the system does not tell it apart, all that is resident.
    """
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return int(psutil.Process().memory_info().rss)
