"""A network of one's own: nobody else's traffic on the loopback, and no port that is taken."""

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

_CLONE_NEWNET = 0x40000000


def isolated() -> bool:
    """Move this thread, and all it starts from now on, to a fresh namespace with a loopback.

    False, and nothing changed, where that is not allowed: it needs Linux, root and `ip`.
    """
    if shutil.which("ip") is None:
        return False
    try:
        if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
            return False
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True, capture_output=True)
    except (OSError, AttributeError, subprocess.CalledProcessError):
        return False
    return True


def loopback_bytes() -> int:
    """Bytes of IP packets that crossed this namespace's loopback, headers and repeats included."""
    of_thread = Path(f"/proc/self/task/{threading.get_native_id()}/net/dev")
    line = next(row for row in of_thread.read_text().splitlines() if row.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])
