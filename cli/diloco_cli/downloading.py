"""Files of an export into a folder: piece by piece, on from where it was cut off, checked, renamed.

DIR.partial/export.json     whose files these are
           /model.safetensors, …
DIR                         `DIR.partial` once every digest is right, and not a moment before
.DIR.lock                   held by the one command that downloads into DIR
"""

import hashlib
import json
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from diloco_cli.api import passes
from diloco_cli.words import CONFLICT, FAILED, INVALID, CliError, why
from diloco_client import ApiError, Client, Unreachable
from diloco_shared.corpora.folders import Busy, locked
from diloco_shared.protocol.exports import ExportedFile

# Which export a partial folder is of; no file of an export is called so.
MARK = ".export.json"
# Without one more byte, or without an answer, for so long in seconds: given up. A coordinator that
# is restarted, or a link that is down for a moment, takes less.
PATIENCE_S = 120.0
RETRY_S = 1.0
# A file is fetched anew once, when its digest is wrong: twice is no accident.
ATTEMPTS = 2
# Of a file that is hashed at a time.
PART_BYTES = 8 << 20

Moved = Callable[[int], None]  # told how many more bytes are here


class Taken(CliError):
    """The folder has something in it, or another command downloads into it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, CONFLICT)


class Target:
    """Where an export goes, for one command at a time until the folder is in place.

    Taken for a folder that holds something or that another command downloads into, and CliError
    for one that cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.abspath(folder))
        if not self.folder.name:
            raise CliError(f"{folder} is no folder to make: name one below it", INVALID)
        self.partial = self.folder.with_name(f"{self.folder.name}.partial")
        with ExitStack() as held:
            try:
                held.enter_context(locked(self.folder, wait=False))
                self._look(folder)
            except Busy:
                text = f"another command downloads into {folder}: wait until it is done, or name "
                raise Taken(f"{text}another folder") from None
            except OSError as error:
                text = f"{folder} cannot be written: {why(error)}; name another folder"
                raise CliError(text, FAILED) from None
            # By `take_place`, or at the end of a command that came to none.
            self.let_go = weakref.finalize(self, held.pop_all().close)

    def _look(self, folder: Path) -> None:
        """CliError for what is there and is no download."""
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise CliError(f"{folder} is there and is no folder: name another one", INVALID)
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise Taken(f"{folder} holds something already: name another folder, or an empty one")
        if self.partial.exists() and not self.partial.is_dir():
            raise Taken(f"{self.partial} is there and is no folder: move it away first")
        if self.partial.exists() and self.begun() is None and any(self.partial.iterdir()):
            raise Taken(f"{self.partial} holds something that is no download: move it away first")

    def begun(self) -> dict[str, Any] | None:
        """What an earlier attempt was to download, if it left anything."""
        try:
            mark: dict[str, Any] = json.loads((self.partial / MARK).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return mark if isinstance(mark, dict) else None

    def begin(self, mark: dict[str, Any]) -> None:
        """From now on what is there is of this export. CliError where nothing can be written."""
        with self.writing():
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
            (self.partial / MARK).write_text(json.dumps(mark), encoding="utf-8")

    def take_place(self, files: Sequence[ExportedFile]) -> None:
        """Every file is here and right: the folder appears, with these and nothing else."""
        names = {file.name for file in files}
        with self.writing():
            for path in self.partial.iterdir():
                if path.name not in names:
                    path.unlink()
            os.rename(self.partial, self.folder)
        self.let_go()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A CliError of whatever the disk refuses."""
        try:
            yield
        except OSError as error:
            raise CliError(
                f"{self.folder} cannot be written: {why(error)}. What is in {self.partial} is "
                "kept, and the same command goes on from there",
                FAILED,
            ) from None


def listed(export: dict[str, Any]) -> list[ExportedFile]:
    """The files of a complete export. CliError for names that would lead out of a folder."""
    try:
        return [ExportedFile.model_validate(file) for file in export["files"]]
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise CliError(f"the coordinator tells of a strange file: {fault['msg']}", FAILED) from None


class Download:
    """The files of one export, into the partial folder of a target."""

    def __init__(self, client: Client, run: str, export: str, target: Target, moved: Moved) -> None:
        self.client = client
        self.run, self.export = run, export
        self.target = target
        self.moved = moved

    def file(self, file: ExportedFile) -> None:
        """One file, whole and right. CliError for a digest that is wrong twice; ApiError or
        Unreachable for what does not pass, or lasts `PATIENCE_S` without one more byte."""
        path = self.target.partial / file.name
        for _ in range(ATTEMPTS):
            self._fill(file, path)
            with self.target.writing():
                if _digest(path) == file.sha256:
                    return
                self.moved(-path.stat().st_size)
                path.unlink()
        raise CliError(
            f"{file.name} came {ATTEMPTS} times with another digest than the coordinator tells: "
            "its disk, or the link, damages data. Export again",
            FAILED,
        )

    def _fill(self, file: ExportedFile, path: Path) -> None:
        """The rest of a file, in as many attempts as it takes."""
        with self.target.writing():
            if path.exists() and path.stat().st_size > file.bytes:
                path.unlink()
            path.touch()
            here = path.stat().st_size
        self.moved(here)
        moved_at = time.monotonic()
        while here < file.bytes:
            before = here
            try:
                self._append(file, path, here)
                if (here := path.stat().st_size) < file.bytes:
                    raise Unreachable(f"{file.name} ends after {here} of {file.bytes} bytes")
            except (ApiError, Unreachable) as error:
                if not passes(error):
                    raise
                if (here := path.stat().st_size) > before:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > PATIENCE_S:
                    raise
                time.sleep(RETRY_S)

    def _append(self, file: ExportedFile, path: Path, here: int) -> None:
        """What comes in one answer, and no more than belongs to the file."""
        pieces = self.client.export_file(self.run, self.export, file.name, here)
        with self.target.writing(), path.open("ab") as out:
            for piece in pieces:
                part = piece[: file.bytes - here]
                out.write(part)
                here += len(part)
                self.moved(len(part))
                if here >= file.bytes:
                    break
            out.flush()
            os.fsync(out.fileno())


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            found.update(part)
    return found.hexdigest()
