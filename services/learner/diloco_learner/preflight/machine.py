"""What this machine has: devices and their memory, memory of the host, room on a disk."""

from dataclasses import dataclass
from pathlib import Path

import jax
import psutil

from diloco_shared.process.disk_watch import free_bytes

# Where Linux keeps the limits of a group of processes, such as a container.
GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes are those that are free now. `device_bytes`: none where the device shares the host's
    memory, or does not tell. `disk_bytes`: none where the file system does not tell."""

    platform: str
    device: str
    devices: int
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int | None


def machine_of(disk: Path) -> Machine:
    """This one; `disk`: a folder on the disk in question. RuntimeError if JAX finds no device."""
    found = jax.local_devices()
    stats = found[0].memory_stats() if found[0].platform != "cpu" else None
    device_bytes = None
    if stats and "bytes_limit" in stats:
        device_bytes = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    kind = found[0].device_kind
    host = min([int(psutil.virtual_memory().available), *_left_to_group()])
    return Machine(found[0].platform, kind, len(found), device_bytes, host, free_bytes(disk))


def _left_to_group() -> list[int]:
    """Bytes that the group of this process may still take, where it has a limit."""
    try:
        name = OWN_GROUP.read_text(encoding="ascii").strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return []
    found = []
    for folder in (GROUPS / name, GROUPS):
        try:
            limit, used = (folder / "memory.max", folder / "memory.current")
            # "max", where there is no limit, is no number.
            found.append(max(int(limit.read_text()) - int(used.read_text()), 0))
        except (OSError, ValueError):
            continue
    return found
