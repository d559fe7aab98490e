"""What this machine has, and whether it is enough: devices, memory, room on a disk."""

from dataclasses import dataclass
from pathlib import Path

import jax
import psutil

from diloco_learner.models.attention import has_cudnn
from diloco_learner.preflight.findings import Wrong
from diloco_learner.training import platforms
from diloco_shared.budget import Need
from diloco_shared.budget.terms import shown

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
    kernel: bool = False  # whether each device has cuDNN's attention


def machine_of(disk: Path) -> Machine:
    """This one; `disk`: a folder on the disk in question. RuntimeError if JAX finds no device."""
    platforms.check()
    found = jax.local_devices()
    stats = found[0].memory_stats() if found[0].platform != "cpu" else None
    device_bytes = None
    if stats and "bytes_limit" in stats:
        device_bytes = int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    kind = found[0].device_kind
    host = min([int(psutil.virtual_memory().available), *_left_to_group()])
    kernel, free = all(map(has_cudnn, found)), free_on(disk)
    return Machine(found[0].platform, kind, len(found), device_bytes, host, free, kernel)


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
            left = int(limit.read_text()) - int(used.read_text()) + _cached(folder)
            found.append(min(max(left, 0), int(limit.read_text())))
        except (OSError, ValueError):
            continue
    return found


def _cached(group: Path) -> int:
    """Bytes of files that were read, which the system gives up for whoever needs the room."""
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    stat = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return sum(int(stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def free_on(folder: Path) -> int | None:
    """Bytes, on the disk of a folder that need not be there yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        return int(psutil.disk_usage(str(there)).free)
    except OSError:
        return None


def room(where: str, need: Need, free: int) -> tuple[str, dict[str, float]]:
    """That there is enough, in words and figures. Raises Wrong where there is not."""
    if need.bytes <= free:
        text = f"{shown(need.bytes)} of {where}; {shown(free)} are free"
        return text, {"needed_bytes": need.bytes, "free_bytes": free}
    largest = max(need.terms, key=lambda term: term.bytes)
    raise Wrong(
        f"a learner needs {shown(need.bytes)} of {where}, and {shown(free)} are free; most of it "
        f"is for {largest.name} ({shown(largest.bytes)}: {largest.how})",
        f"make room, take a larger machine, or change {need.lower}; 'diloco budget' says what "
        "each part takes",
    )
