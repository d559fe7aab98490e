"""Who holds how much memory and storage, and how long event loops were held: from outside.

Memory is what a process has for itself (RssAnon of /proc): pages of mapped files are the kernel's
to drop. The peak of each name is kept over all its lives.
"""

import re
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

# Between two looks at memory, in seconds: a buffer that lives shorter is missed.
LOOK_S = 0.1
# Looks at memory between two looks at a process's own metrics.
METRICS_EVERY = 20
LAG = re.compile(r'^diloco_loop_lag_seconds\{by="([^"]*)"\} (\S+)$', re.MULTILINE)


def anonymous_bytes(pid: int) -> int:
    """What a process holds for itself; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) << 10 if found else 0


def lag_of(address: str, token: str) -> tuple[float, str]:
    """Seconds for which a process's event loop was held longest, and by what, as it says itself.

    `token`: of the coordinator's API, which asks for one.
    """
    headers = {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            found = LAG.findall(answer.read().decode())
    except OSError:
        return 0.0, ""
    return max(((float(value), by) for by, value in found), default=(0.0, ""))


class Watching(threading.Thread):
    """Samples until `stop`. `members`: pid of each name; `addresses`: its health endpoint;
    `streams`: (bytes held, bytes that the budget says at most) by kind; `token`: the API's."""

    def __init__(
        self,
        members: Callable[[], dict[str, int]],
        addresses: Callable[[], dict[str, str]],
        streams: Callable[[], dict[str, tuple[int, int]]],
        token: str,
    ) -> None:
        super().__init__(name="watching", daemon=True)
        self.members = members
        self.addresses = addresses
        self.streams = streams
        self.token = token
        self.held: dict[str, tuple[int, int]] = {}  # the most, and the budget
        self.peak: dict[str, int] = {}
        self.lag: dict[str, tuple[float, str]] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        """The thread's body."""
        looks = 0
        pids: dict[str, int] = {}
        while not self.stopped.wait(LOOK_S):
            if looks % METRICS_EVERY == 0:
                pids = self.members()
                self._lags()
                self._streams()
            looks += 1
            for name, pid in pids.items():
                self.peak[name] = max(self.peak.get(name, 0), anonymous_bytes(pid))

    def _lags(self) -> None:
        for name, address in self.addresses().items():
            self.lag[name] = max(self.lag.get(name, (0.0, "")), lag_of(address, self.token))

    def _streams(self) -> None:
        for kind, (held, needed) in self.streams().items():
            self.held[kind] = (max(held, self.held.get(kind, (0, 0))[0]), needed)

    def stop(self) -> None:
        """Last look, and the end."""
        self._lags()
        self.stopped.set()
        self.join()
