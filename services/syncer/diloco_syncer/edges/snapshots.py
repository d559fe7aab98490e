"""Durable snapshots of store and history in a local folder; a torn one is never taken for good."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# Two: the newest may be torn by a power cut that the file system did not survive.
KEEP = 2


class SnapshotStore:
    """Folders `snapshot-<tape sequence>`, each complete or absent (written aside, renamed)."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, covers: int, meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
        """Write and sync; returns its path. Raises OSError (disk full) and leaves no debris."""
        self.folder.mkdir(parents=True, exist_ok=True)
        final = self.folder / f"snapshot-{covers:012d}"
        aside = self.folder / f".writing-{covers:012d}"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir()
            save_file(arrays, aside / "arrays.safetensors")
            digest = _file_digest(aside / "arrays.safetensors")
            body = json.dumps({"covers": covers, "arrays": digest, "meta": meta}, allow_nan=False)
            (aside / "meta.json").write_text(body, encoding="utf-8")
            for name in ("arrays.safetensors", "meta.json"):
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
                body = json.loads((path / "meta.json").read_text(encoding="utf-8"))
                if _file_digest(path / "arrays.safetensors") != body["arrays"]:
                    raise ValueError("the arrays do not match their digest")
                return (body["meta"], load_file(path / "arrays.safetensors")), faults
            except (OSError, ValueError, KeyError, TypeError) as error:
                faults.append(f"{path.name}: {error}")
        return None, faults

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if p.name.startswith("snapshot-"))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
