"""What this machine has: devices, room on its disk, and what a run finds here."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import diloco_shared
from diloco_cli.doctor import judging
from diloco_cli.doctor.judging import Finding
from diloco_learner.preflight.findings import Finding as OfRun
from diloco_shared.budget import Need
from diloco_shared.durable import free_bytes
from diloco_shared.gpus import gpus_here

# Eight GPUs take a minute to be found the first time; a driver that hangs never answers.
DEVICES_S = 120.0
# A file system of a network that is slow, but of use, takes a small file in this time.
PLACE_S = 10.0
# The last check of a run that is made here: compiling and stepping are left to 'diloco check', and
# room on the disk is looked for where learners keep what they keep.
LAST = "host memory"
_DEVICES = "import json, jax; print(json.dumps([d.device_kind for d in jax.local_devices()]))"
# What a small file needs; a disk without a free block or inode refuses it.
_TRY_BYTES = 4096


def devices() -> Finding:
    """In a process of its own: the libraries of devices may hang, or end it."""
    if importlib.util.find_spec("jax") is None:
        return judging.devices(None, "")
    # A learner that runs here has the memory already, and must keep it.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEVICES_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return judging.late("devices", DEVICES_S, "look for a driver that hangs, in the system log")
    try:
        return judging.devices([str(kind) for kind in json.loads(done.stdout)], "", gpus_here())
    except ValueError:
        said = done.stderr.strip().rpartition("\n")[2]
        return judging.devices([], said or f"it ended with status {done.returncode}")


def disk(folder: Path, need: Need | None) -> Finding:
    """Where members keep what they keep; the folder need not be there yet."""
    free, error = _tried(folder)
    return judging.disk(str(folder), free, error, need)


def hosts_place(place: str, need: Need | None) -> Finding:
    """Where all hosts of an island keep its checkpoints: a file system of a network, which may not
    answer."""
    if "://" in place:
        return judging.bucket(place)
    folder, found = Path(place), list[Finding]()

    def look() -> None:
        free, error = _tried(folder)
        found.append(judging.hosts_place(place, folder.exists(), free, error, need))

    # One that hangs ends with the process.
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(PLACE_S)
    why = f"look at the file system of {place}: it does not answer"
    return found[0] if found else judging.late("hosts' checkpoints", PLACE_S, why)


def _tried(folder: Path) -> tuple[int | None, str]:
    """(bytes that are free, why no file can be written) of a folder, or of where it will be."""
    try:
        whole = folder.absolute()
        there = next(path for path in (whole, *whole.parents) if path.exists())
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(_TRY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as trouble:
        return None, (trouble.strerror or str(trouble)).lower()
    return free_bytes(there), ""


def of_run(made: Iterator[OfRun]) -> Iterator[Finding]:
    """What a run finds on this machine, by the checks of 'diloco check' up to LAST."""
    for each in made:
        verdict: judging.Verdict = "ok" if each.ok else "skipped" if each.skipped else "FAIL"
        name = each.name if each.name == "devices" else f"run: {each.name}"
        yield Finding(name, verdict, each.text, each.remedy, each.figures)
        if each.name == LAST:
            return


def release() -> str:
    """Of this software, as its processes say it."""
    return diloco_shared.VERSION
