"""Encoded contributions in memory, from arrival until the round that wanted them is closed."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

# Contributions fetched at once: enough to fill a link, few enough to bound memory.
FETCHES = 8


class PayloadsFull(Exception):
    """More bytes at once than this syncer may hold."""


class Payloads:
    """Bytes by blob subject, within a limit that may grow: asked for each time."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self.limit = limit
        self.held: dict[str, bytes] = {}
        self.norms: dict[str, NDArray[np.float64]] = {}  # of the pieces of what is held
        self.bytes = 0

    def room_for(self, size: int) -> None:
        """Raises PayloadsFull when `size` bytes more would exceed the limit."""
        if self.bytes + size > (limit := self.limit()):
            raise PayloadsFull(
                f"{size} bytes more would exceed the {limit} bytes for contributions "
                f"({self.bytes} held): raise DILOCO_PAYLOAD_BYTES_MAX or shard the syncer"
            )

    def put(self, key: str, payload: bytes, norms_P: NDArray[np.float64] | None = None) -> None:
        """Keep a payload, in place of what had the key. Raises PayloadsFull: then neither is kept.

        `norms_P`: lengths of the pieces of the contribution, where they are known already.
        """
        self.drop(key)
        self.room_for(len(payload))
        self.held[key] = payload
        if norms_P is not None:
            self.norms[key] = norms_P
        self.bytes += len(payload)

    def of(self, keys: Iterable[str]) -> tuple[dict[str, bytes], dict[str, NDArray[np.float64]]]:
        """Payloads and norms of contributions that are held. KeyError if one is not."""
        keys = list(keys)
        return {key: self.held[key] for key in keys}, {key: self.norms[key] for key in keys}

    def drop(self, key: str) -> bytes | None:
        """Forget; what it was, or None when absent."""
        payload = self.held.pop(key, None)
        self.norms.pop(key, None)
        if payload is not None:
            self.bytes -= len(payload)
        return payload
