"""An encoded fragment as the devices of several processes hold it, without any device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diloco_learner.exchange.encoding import sizes_of
from diloco_learner.hosts.parts import Span
from diloco_learner.hosts.shares import Lying
from diloco_shared.numerics import codec
from diloco_shared.spec.codecs import BLOCK

WIDTHS = {"fp32": (4,), "bf16": (2,), "int8": (2, 1), "int4": (2, 1)}


@dataclass(frozen=True)
class Fragment:
    """Of so many values, on so many devices of each of so many processes: an equal part of whole
    blocks on each device, and zeros behind the last value."""

    name: str
    values: int
    hosts: int
    devices: int = 1

    @property
    def payload(self) -> bytes:
        values_F = np.random.default_rng(self.values).standard_normal(self.values)
        return bytes(codec.encode(self.name, values_F.astype(np.float32)))

    @property
    def header(self) -> bytes:
        return bytes(codec.header(self.name, self.values))

    @property
    def lying(self) -> Lying:
        sizes, many = sizes_of(self.name, self.values), self.hosts * self.devices
        spans = []
        for whole in self._padded():
            each = whole // many
            cut: dict[int, Sequence[Span]] = {
                host: [
                    ((n * each, (n + 1) * each),)
                    for n in range(host * self.devices, (host + 1) * self.devices)
                ]
                for host in range(self.hosts)
            }
            spans.append(cut)
        return Lying(len(self.header), sizes, WIDTHS[self.name], tuple(spans))

    def _padded(self) -> list[int]:
        unit = BLOCK * self.hosts * self.devices
        padded = -(-self.values // unit) * unit
        if self.name in ("fp32", "bf16"):
            return [padded]
        return [padded // BLOCK, padded if self.name == "int8" else padded // 2]

    def parts(self, host: int) -> list[memoryview]:
        """Of every array, those of its devices, with what fills them up."""
        lying, at, found = self.lying, len(self.header), list[memoryview]()
        pairs = zip(lying.counts, lying.widths, lying.spans, self._padded(), strict=True)
        for count, width, spans, padded in pairs:
            whole: NDArray[np.uint8] = np.full(padded * width, 0xEE, np.uint8)
            size = count * width
            whole[:size] = np.frombuffer(self.payload, np.uint8)[at : at + size]
            found += [whole[a * width : b * width].data for ((a, b),) in spans[host]]
            at += size
        return found
