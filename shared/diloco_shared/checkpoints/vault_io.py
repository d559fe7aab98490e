"""Objects under one address, a folder or a bucket: whatever tensorstore can reach.

Not for an event loop: every method waits. Imported when first needed, since tensorstore takes a
while and most processes never write a checkpoint.
"""

import os
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from diloco_shared import ambient
from diloco_shared.durable import make_folder

Buffer = bytes | bytearray | memoryview

# What these addresses are called where tensorstore can read and write them.
SCHEMES = ("file", "gs", "s3")
# As every AWS tool reads them: where stores other than Amazon's answer to s3:// (MinIO, Ceph).
S3_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
# Bytes that are read at a time, and written at once: tensorstore copies what it gets and gives
# while it keeps all other threads waiting, about 10 ms for so many.
PIECE_BYTES = 8 << 20
# Of what describes a checkpoint, at most: texts of some MB where there are thousands of tensors and
# learners. Arrays are read in pieces, as many bytes as their part says.
DESCRIPTION_BYTES_MAX = 64 << 20
# S3 takes no larger object at once, and tensorstore never gives it one in parts. What has more
# bytes becomes several objects there: KEY, KEY.1, KEY.2 …, each but the last one of this size.
S3_BYTES_MAX = 5 << 30
# Pieces that are asked for at a time: a bucket takes a while to answer, whatever it is asked.
ASKED_MAX = 4
# A bucket is opened anew after so long, in seconds. One that is open is asked with the keys that it
# was opened with, whatever their file says by then. Whoever changes keys leaves the old ones good
# for longer, and to open it takes milliseconds.
OPENED_S = 300.0


class VaultError(OSError):
    """Nothing can be read or written there; the text says why and what to do."""


class Vault:
    """`root`: a folder's path, or file://, gs:// or s3://. Every object is whole or absent."""

    def __init__(self, root: str) -> None:
        scheme, _, _ = root.partition("://")
        if "://" in root and scheme not in SCHEMES:
            raise VaultError(
                f"{root}: give a folder, or an address that begins with "
                + ", ".join(f"{s}://" for s in SCHEMES)
            )
        # A local folder is removed with what it holds; elsewhere there are no folders.
        self.path: Path | None = None
        if "://" not in root:
            self.path = Path(root).absolute()
        elif scheme == "file":
            self.path = Path(unquote(urlsplit(root).path)).absolute()
        self.root = root
        self._opened: Any = None
        self._opened_at = 0.0
        self._made: Path | None = None  # the folder that was written to last

    @property
    def _kv(self) -> Any:
        now = ambient.monotonic()
        stale = self.path is None and now - self._opened_at >= OPENED_S
        if self._opened is None or stale:
            import tensorstore as ts

            try:
                self._opened, self._opened_at = ts.KvStore.open(self._spec()).result(), now
            except ValueError as error:
                raise VaultError(f"{self.root} cannot be opened: {error}") from None
        return self._opened

    def _spec(self, key: str = "") -> dict[str, Any]:
        """How tensorstore calls it, or one object in it."""
        if self.path is not None:
            # An empty folder is a store without objects: nothing is created by opening it.
            # What the tape's archive holds is removed from the stream at once: so it is synced.
            return {"driver": "file", "path": f"{self.path}/{key}", "file_io_sync": True}
        address = urlsplit(f"{self.root.rstrip('/')}/")
        there = {"bucket": address.netloc, "path": unquote(address.path).lstrip("/") + key}
        return {"driver": "gcs", **there} if address.scheme == "gs" else {**_s3(), **there}

    def write(self, key: str, data: bytes | None) -> None:
        """Store an object, durably where the address can; None removes it."""
        if data is not None:
            self._make_folder(key)
        try:
            self._kv.write(key, data).result()
        except ValueError as error:
            raise self._unwritten(error) from None

    def _make_folder(self, key: str) -> None:
        """Where an object will be: tensorstore makes it, too, and leaves its name to the disk."""
        folder = None if self.path is None else (self.path / key).parent
        if folder is None or folder == self._made:
            return
        try:
            make_folder(folder)
        except OSError as error:
            raise self._unwritten(error) from None
        self._made = folder

    def _unwritten(self, error: ValueError | OSError) -> VaultError:
        return VaultError(
            f"{self.root} cannot be written ({error}): it must be a folder or bucket that every "
            "process of the run reaches and may write"
        )

    def write_pieces(self, key: str, size: int, pieces: Iterable[Buffer]) -> None:
        """Store an object of `size` bytes like `write`, which never has all of it in one piece.

        Beside the pieces it takes memory for the object once, in tensorstore. One that is larger
        than S3 takes is not whole or absent there: whoever names it does so once it is written.
        """
        if size <= S3_BYTES_MAX or not self.root.startswith("s3://"):
            self._write_pieces(key, size, pieces)
            return
        left = _uncrossed(pieces)
        for part, _, bytes_ in _parts(key, 0, size):
            self._write_pieces(part, bytes_, _first(left, bytes_))

    def _write_pieces(self, key: str, size: int, pieces: Iterable[Buffer]) -> None:
        """One object."""
        if size <= PIECE_BYTES:
            self.write(key, b"".join(pieces))
            return
        import numpy as np
        import tensorstore as ts

        self._make_folder(key)
        try:
            whole = ts.open(self._one_chunk(key, size)).result()
            writing = ts.Transaction()
            at = 0
            for piece in pieces:
                end = at + len(piece)
                part = whole.with_transaction(writing)[at:end]
                part.write(np.frombuffer(piece, np.uint8)).result()
                at = end
            assert at == size, f"{at} bytes of {size}"
            writing.commit_async().result()
        except ValueError as error:
            raise self._unwritten(error) from None

    def _one_chunk(self, key: str, size: int) -> dict[str, Any]:
        """The object as the only chunk, not compressed, of an array of bytes.

        So it can be handed over piece by piece: tensorstore takes objects whole, but not arrays.
        """
        only = {"exact": "0", "strip_prefix": 1, "base": self._spec(key)}  # "0": of the first chunk
        return {
            "driver": "zarr",
            "kvstore": {"driver": "kvstack", "layers": [only]},
            "metadata": {
                "zarr_format": 2,
                "shape": [size],
                "chunks": [size],
                "dtype": "|u1",
                "order": "C",
                "compressor": None,
                "filters": None,
                "fill_value": None,
            },
            "assume_metadata": True,  # none is read, and none is written
            "open": True,
            "store_data_equal_to_fill_value": True,
        }

    def pieces(self, key: str, first: int, size: int) -> Iterator[bytes]:
        """`size` bytes of an object from byte `first` on, in order; fewer where it ends before.

        No piece at all where it does not exist. It may lie in several, wherever it was copied to.
        """
        parts = [(key, first, size)]
        if first + size > S3_BYTES_MAX and any(self._pieces(f"{key}.1", 0, 1)):
            parts = _parts(key, first, size)
        for part in parts:
            yield from self._pieces(*part)

    def _pieces(self, key: str, first: int, size: int) -> Iterator[bytes]:
        """Of one object."""
        end, step, asked = first + size, PIECE_BYTES, deque[Any]()
        starts = iter(range(first, end, step))
        while True:
            for at in starts:
                asked.append(self._kv.read(key, byte_range=slice(at, min(at + step, end))))
                if len(asked) == ASKED_MAX:
                    break
            if not asked:
                return
            try:
                found = asked.popleft().result()
            except ValueError as error:
                if "OUT_OF_RANGE" in str(error):
                    return  # whoever knows how much there was sees that it is not
                raise VaultError(f"{self.root}/{key} cannot be read: {error}") from None
            if found.state != "value":
                return
            yield found.value

    def read(self, key: str, *, bytes_max: int = DESCRIPTION_BYTES_MAX) -> bytes | None:
        """An object, or None. VaultError, before it is read, where it has more than `bytes_max`."""
        self._check_size(key, bytes_max)
        try:
            found = self._kv.read(key).result()
        except ValueError as error:
            raise VaultError(f"{self.root}/{key} cannot be read: {error}") from None
        return bytes(found.value) if found.state == "value" else None

    def _check_size(self, key: str, bytes_max: int) -> None:
        """Asks for one byte behind the largest size: tensorstore tells none of what it has."""
        if any(self.pieces(key, bytes_max, 1)):
            raise VaultError(
                f"{self.root}/{key} has more than {bytes_max} bytes: nobody who works for a run "
                "writes so much there, and it is not read"
            )

    def keys(self, prefix: str = "") -> list[str]:
        """Keys that begin with `prefix`, sorted."""
        try:
            found = self._kv.list(self._range(prefix)).result()
        except ValueError as error:
            raise VaultError(f"{self.root} cannot be listed: {error}") from None
        return sorted(key.decode() for key in found)

    def remove(self, folder: str) -> None:
        """Everything below `folder`, and the folder itself where there are any."""
        try:
            self._kv.delete_range(self._range(f"{folder}/")).result()
        except ValueError as error:
            raise VaultError(f"{self.root}/{folder} cannot be removed: {error}") from None
        if self.path is not None:
            self._made = None
            shutil.rmtree(self.path / folder, ignore_errors=True)

    @staticmethod
    def _range(prefix: str) -> Any:
        import tensorstore as ts

        if not prefix:
            return ts.KvStore.KeyRange()
        return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))


def _parts(key: str, first: int, size: int) -> list[tuple[str, int, int]]:
    """(key, first byte, bytes) in each of the objects that have `size` bytes from `first` on."""
    found, end = [], first + size
    while first < end:
        n, at = divmod(first, S3_BYTES_MAX)
        bytes_ = min(S3_BYTES_MAX - at, end - first)
        found.append((f"{key}.{n}" if n else key, at, bytes_))
        first += bytes_
    return found


def _uncrossed(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes, in pieces of which none lies in two objects."""
    at = 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part = rest[: S3_BYTES_MAX - at % S3_BYTES_MAX]
            yield part
            at, rest = at + len(part), rest[len(part) :]


def _first(pieces: Iterator[Buffer], size: int) -> Iterator[Buffer]:
    """The next ones, of `size` bytes together."""
    while size > 0 and (piece := next(pieces, None)) is not None:
        yield piece
        size -= len(piece)


def _s3() -> dict[str, Any]:
    """How tensorstore calls S3, but for the bucket."""
    # It looks for a profile only if it is told which: without a name it finds none in any file,
    # and asks as nobody.
    profile = os.environ.get("AWS_PROFILE") or "default"
    spec = {"driver": "s3", "aws_credentials": {"type": "default", "profile": profile}}
    endpoint = next(filter(None, map(os.environ.get, S3_ENDPOINT)), "")
    if not endpoint:
        return spec
    # Such stores expect some region, whichever it is.
    region = os.environ.get("AWS_REGION", "us-east-1")
    return {**spec, "endpoint": endpoint, "aws_region": region}
