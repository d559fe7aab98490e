"""Checkpoints that all hosts of an island write: any other island takes them, or says why not.

What each process does is in `keeping_hosts.py`.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# In fp32: sums of other orders differ in the last bits.
CLOSE = 1e-5
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
Prefix = Callable[[int], list[str]]


def island(
    hosts: int,
    mesh: str,
    devices: int,
    place: Path,
    task: str,
    notes: Path,
    prefix: Prefix = lambda index: [],
    meanwhile: Callable[[], None] = lambda: None,
    places: dict[int, Path] | None = None,
) -> dict[str, Any]:
    """What process 0 says. `prefix`: of the command of each; `places`: of some, their own."""
    script = Path(__file__).with_name("keeping_hosts.py")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    notes.mkdir(exist_ok=True)
    started, logs = [], [notes / f"{task}-{mesh}.{index}.log" for index in range(hosts)]
    for index in range(hosts):
        own = str((places or {}).get(index, place))
        words = [port, str(hosts), str(index), mesh, str(devices), own, task, str(notes)]
        with logs[index].open("w") as log:
            command = [*prefix(index), sys.executable, str(script), *words]
            out = subprocess.PIPE if index == 0 else log
            started.append(subprocess.Popen(command, stdout=out, stderr=log, text=True))
    try:
        meanwhile()
        said, _ = started[0].communicate(timeout=600)
        for process in started[1:]:
            process.wait(60)
    finally:
        for process in started:
            process.kill()
    assert started[0].returncode == 0, "\n".join(log.read_text()[-3000:] for log in logs)
    for log in logs:
        text = log.read_text()
        assert "orbax" not in text.lower() and "absl" not in text.lower(), text[-3000:]
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    return found


def check(found: dict[str, Any], saved: dict[str, Any]) -> None:
    assert found["first"] == "" and found["faults"] == []
    assert found["digest"] == saved["digests"][-1], "the same bits, whoever wrote them"
    np.testing.assert_allclose(found["losses"], saved["losses"], atol=CLOSE)


def test_what_two_hosts_write_is_taken_by_two_of_another_mesh_by_four_and_by_one(
    tmp_path: Path,
) -> None:
    place, notes = tmp_path / "place", tmp_path / "notes"
    saved = island(2, "data=2,fsdp=2", 2, place, "save", notes)
    assert saved["first"] == "" and saved["newest"] == 3
    folder = place / "r.0" / "l-1"
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"], "and nothing else"
    check(island(2, "fsdp=2", 1, place, "restore", notes), saved)
    check(island(2, "fsdp=2,tensor=2", 2, place, "restore", notes), saved)
    check(island(4, "fsdp=4", 1, place, "restore", notes), saved)

    # Every process of this one writes: one loses a byte, and the older one is taken.
    place = tmp_path / "other"
    folder = place / "r.0" / "l-1"
    saved = island(2, "fsdp=4", 2, place, "save", notes)
    own = [
        sum(f.stat().st_size for f in folder.glob(f"3/moments/*.process_{n}/d/*")) for n in (0, 1)
    ]
    assert 0.8 < own[0] / own[1] < 1.25, "each writes what it holds"
    (damaged, *_) = folder.glob("3/moments/*.process_1/d/*")
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 4
    damaged.write_bytes(data)
    found = island(2, "fsdp=2", 1, place, "restore", notes)
    (fault,) = found["faults"]
    assert "checkpoint 3 passed over: " in fault and "is not what was written" in fault
    assert found["digest"] == saved["digests"][1]


def mend(notes: Path, how: Callable[[], object]) -> Callable[[], None]:
    def wait_and_mend() -> None:
        until = time.monotonic() + 300
        while not (notes / "broken").exists() and time.monotonic() < until:
            time.sleep(0.1)
        how()
        (notes / "mend").touch()

    return wait_and_mend


def test_a_host_that_sees_another_folder_is_named_and_training_goes_on(tmp_path: Path) -> None:
    place, other, notes = tmp_path / "place", tmp_path / "other", tmp_path / "notes"
    (tmp_path / "elsewhere").mkdir()
    other.symlink_to(tmp_path / "elsewhere")
    notes.mkdir()

    def how() -> None:
        other.unlink()
        other.symlink_to(place)

    found = island(
        2,
        "fsdp=2",
        1,
        place,
        "mended",
        notes,
        meanwhile=mend(notes, how),
        places={1: other},
    )
    assert "host 1 (" in found["first"]
    assert "is not the folder that process 0 sees" in found["first"]
    assert len(found["said"]) == 2 and found["fault"] == "", "the third one finds it mended"
    assert found["newest"] == sequence(1, 5)
    assert not list((tmp_path / "elsewhere").rglob("*.ocdbt")), "nothing is written there"


def sequence(incarnation: int, step: int) -> int:
    return incarnation * 10**9 + step


def test_a_host_that_may_not_write_there_is_named_and_training_goes_on(tmp_path: Path) -> None:
    place, notes = tmp_path / "place", tmp_path / "notes"
    place.mkdir()
    notes.mkdir()
    read_only = f"mount --bind {place} {place} && mount -o remount,ro,bind {place}"
    words = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    can = subprocess.run([*words, read_only], capture_output=True, check=False)
    if can.returncode:
        pytest.skip("no mounts of one's own here")
    own = [*words, f'{read_only} && exec "$@"', "sh"]
    found = island(
        2,
        "fsdp=2",
        1,
        place,
        "mended",
        notes,
        prefix=lambda index: own if index else [],
        meanwhile=mend(notes, lambda: None),
    )
    assert "host 1 (" in found["first"] and "Read-only file system" in found["first"]
    assert len(found["said"]) == 5, "it is looked for again each time"
    assert all("Read-only" in text for text in found["said"]) and found["newest"] is None
