"""Objects under one address, a folder or a bucket: whatever tensorstore can reach.

Not for an event loop: every method waits. Imported when first needed, since tensorstore takes a
while and most processes never write a checkpoint.
"""

import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# What these addresses are called where tensorstore can read and write them.
SCHEMES = ("file", "gs", "s3")
# As every AWS tool reads them: where stores other than Amazon's answer to s3:// (MinIO, Ceph).
S3_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


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

    @property
    def _kv(self) -> Any:
        if self._opened is None:
            import tensorstore as ts

            try:
                self._opened = ts.KvStore.open(self._spec()).result()
            except ValueError as error:
                raise VaultError(f"{self.root} cannot be opened: {error}") from None
        return self._opened

    def _spec(self) -> str | dict[str, str]:
        """How tensorstore calls it."""
        if self.path is not None:
            # An empty folder is a store without objects: nothing is created by opening it.
            return {"driver": "file", "path": f"{self.path}/"}
        address = urlsplit(f"{self.root.rstrip('/')}/")
        endpoint = next(filter(None, map(os.environ.get, S3_ENDPOINT)), "")
        if address.scheme != "s3" or not endpoint:
            return address.geturl()
        return {
            "driver": "s3",
            "bucket": address.netloc,
            "path": unquote(address.path).lstrip("/"),
            "endpoint": endpoint,
            "aws_region": os.environ.get("AWS_REGION", "us-east-1"),  # what such stores expect
        }

    def write(self, key: str, data: bytes | None) -> None:
        """Store an object, durably where the address can; None removes it."""
        try:
            self._kv.write(key, data).result()
        except ValueError as error:
            raise VaultError(
                f"{self.root} cannot be written ({error}): it must be a folder or bucket that "
                "every process of the run reaches and may write"
            ) from None

    def read(self, key: str) -> bytes | None:
        """An object, or None."""
        try:
            found = self._kv.read(key).result()
        except ValueError as error:
            raise VaultError(f"{self.root}/{key} cannot be read: {error}") from None
        return bytes(found.value) if found.state == "value" else None

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
            shutil.rmtree(self.path / folder, ignore_errors=True)

    @staticmethod
    def _range(prefix: str) -> Any:
        import tensorstore as ts

        if not prefix:
            return ts.KvStore.KeyRange()
        return ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
