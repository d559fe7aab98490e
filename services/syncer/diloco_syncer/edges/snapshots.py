"""Durable snapshots of store and history in a local folder; a torn one is never taken for good."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from diloco_shared.edges.crash_points import passing

# In a syncer's data folder: one folder per run.
SNAPSHOTS = "snapshots"
# Two: the newest may be torn by a power cut that the file system did not survive.
KEEP = 2
ARRAYS, META = "arrays.safetensors", "meta.json"


class SnapshotStore:
    """Folders `snapshot-<tape sequence>`, each complete or absent (written aside, renamed)."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, covers: int, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
        """Write and sync; returns its path. Raises OSError (disk full) and leaves no debris."""

        def write(aside: Path) -> None:
            save_file(arrays, aside / ARRAYS)
            passing("snapshot")
            digest = _file_digest(aside / ARRAYS)
            body = json.dumps({"covers": covers, "arrays": digest, "meta": meta}, allow_nan=False)
            (aside / META).write_text(body, encoding="utf-8")

        return self._keep(covers, write)

    def adopt(self, covers: int, meta: bytes, arrays: bytes | memoryview) -> Path:
        """Keep the two files of another's snapshot; raises OSError likewise."""

        def write(aside: Path) -> None:
            (aside / ARRAYS).write_bytes(arrays)
            (aside / META).write_bytes(meta)

        return self._keep(covers, write)

    def _keep(self, covers: int, write: Callable[[Path], None]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"snapshot-{covers:012d}"
        aside = self.folder / f".writing-{covers:012d}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            write(aside)
            for name in (ARRAYS, META):
                _sync(aside / name)
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def newest(self) -> tuple[tuple[dict[str, Any], dict[str, np.ndarray]] | None, list[str]]:
        """(meta, arrays) of the newest sound snapshot or None, and why others were passed over."""
        faults: list[str] = []
        for path in reversed(self._all()):
            try:
                return _load(path), faults
            except (OSError, ValueError, KeyError, TypeError) as error:
                faults.append(f"{path.name}: {error}")
        return None, faults

    def covers(self) -> list[int]:
        """The tape records that the snapshots here cover, ascending."""
        return [int(path.name.removeprefix("snapshot-")) for path in self._all()]

    def load(self, covers: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(meta, arrays) of one; OSError, ValueError, KeyError or TypeError if it is not sound."""
        return _load(self.folder / f"snapshot-{covers:012d}")

    def newest_bytes(self) -> int:
        """Size of the newest one's files; 0 when there is none."""
        paths = self._all()
        return sum(f.stat().st_size for f in paths[-1].iterdir()) if paths else 0

    def newest_files(self) -> tuple[int, bytes, bytes]:
        """(covers, meta, arrays) of the newest, as they lie on disk; ValueError for none."""
        paths = self._all()
        if not paths:
            raise ValueError(f"no snapshot in {self.folder}")
        covers = int(paths[-1].name.removeprefix("snapshot-"))
        return covers, (paths[-1] / META).read_bytes(), (paths[-1] / ARRAYS).read_bytes()

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if p.name.startswith("snapshot-"))


def _load(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body = json.loads((path / META).read_text(encoding="utf-8"))
    if _file_digest(path / ARRAYS) != body["arrays"]:
        raise ValueError("the arrays do not match their digest")
    return body["meta"], load_file(path / ARRAYS)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
