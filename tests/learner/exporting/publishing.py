"""A run of known parameters, as a syncer publishes them: keyframes, and deltas that add to them.

Also as syncers keep it in a run-wide checkpoint.
"""

from pathlib import Path
from typing import Any

import numpy as np

from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import StreamSpec
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array, flatten
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import CheckpointManifest, Object, reference
from diloco_shared.protocol.messages import PublicationManifest, Stamp
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_shared.spec.shapes import shape_of, tensors
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.checkpoints.parts_io import write_part
from diloco_syncer.merging.store import FragmentStore

Tensors = dict[str, np.ndarray[Any, np.dtype[np.float32]]]
# Of no family that others know: its tensors are written under their own names, bit for bit.
OWN_KIND = {"qkv_bias": True, "qk_norm": True}
NANO = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 4, "hidden": 8} | OWN_KIND


def spec(fragments: int = 3, **more: Any) -> RunSpec:
    """A run of a very small transformer."""
    return RunSpec.model_validate(
        {
            "name": "r",
            "id": "abc123",
            "algorithm": {"fragments": fragments, "sync_every_steps": 6 * fragments},
            "model": {"context_tokens": 8, "overrides": NANO},
            "budget": {"steps": 1000},
            **more,
        }
    )


def drawn(layout: Layout, seed: int) -> Tensors:
    """Tensors with values of their own."""
    rng = np.random.default_rng(seed)
    return {t.name: rng.normal(size=t.shape).astype(np.float32) for t in layout.tensors}


def kept(root: Path, of: RunSpec, shards: int = 1, *, lie: int = -1) -> Tensors:
    """A checkpoint of so many syncer shards; the tensors in it. `lie`: a digest that is wrong."""
    layout = Layout.build(tensors(shape_of(of.model)), of.algorithm.fragments)
    made, parts = drawn(layout, 1), list[Object]()
    for shard in range(shards):
        owned = range(shard, of.algorithm.fragments, shards)
        anchors = {p: flatten(layout, p, made) for p in owned}
        values = [anchors.get(p) for p in range(of.algorithm.fragments)]
        store = FragmentStore.init(layout, of.algorithm, values)
        digests = [digest_array(anchors[p]) if p in anchors else "" for p in range(len(values))]
        if lie in anchors:
            digests[lie] = "a" * 32
        history = {"anchor_digests": digests}
        arrays = store.state_arrays()
        parts.append(write_part(of, shard, str(root), 1, history, store.meta(), arrays))
    manifest = CheckpointManifest(
        run=of.name,
        run_id=of.id,
        number=1,
        reason="as the user asked",
        at=1.0,
        epoch=2,
        stamp=Stamp(round=9, steps=80, fraction=0.5, fraction_per_step=0.1),
        versions=(0,) * of.algorithm.fragments,
        parameters=sum(layout.sizes),
        spec=of.model_dump(mode="json"),
        shards=tuple(parts),
        learners={},
        missing={},
        leases=(),
        incarnations={},
        bytes=1,
    )
    RunCheckpoints(str(root)).seal(reference(of.folder, 1), manifest)
    return made


class Publisher:
    """What is published is what learners would hold: `tensors` follows it bit for bit."""

    def __init__(self, broker: MemoryBroker, of: RunSpec) -> None:
        self.spec = of
        self.bus = MemoryBus(broker, "syncer")
        self.layout = Layout.build(tensors(shape_of(of.model)), of.algorithm.fragments)
        self.anchors: dict[int, Any] = {}
        self.versions = [-1] * of.algorithm.fragments

    async def prepare(self) -> None:
        for bucket in subjects.BUCKETS:
            await self.bus.ensure_bucket(bucket)
        for name, captured in subjects.run_streams(self.spec.name).items():
            await self.bus.ensure_stream(StreamSpec(name, (captured,), 1 << 26))
        record = RunRecord(
            name=self.spec.name,
            spec=self.spec.model_dump(mode="json"),
            desired="running",
            quorum=1,
            created_at=0.0,
        )
        await self.bus.kv_put(subjects.RUNS, self.spec.name, encode(record))

    async def everything(self, seed: int) -> Tensors:
        """A keyframe of every fragment: the tensors that it makes."""
        made = drawn(self.layout, seed)
        for p in range(len(self.versions)):
            await self.keyframe(p, flatten(self.layout, p, made))
        return made

    async def keyframe(self, p: int, values_F: Any, *, epoch: int = 0, term: int = 1) -> None:
        self.anchors[p] = values_F
        self.versions[p] += 1
        payload = codec.encode("fp32", values_F)
        await self._put(p, payload, "fp32", prev=-1, epoch=epoch, term=term)

    async def delta(self, p: int, seed: int, name: str = "int8") -> None:
        """A step of the fragment, in so many bits as its codec has."""
        size = self.layout.sizes[p]
        step_F = np.random.default_rng(seed).normal(size=size).astype(np.float32)
        payload = codec.encode(name, step_F)
        self.anchors[p] = self.anchors[p] + codec.decode(name, payload, size)
        self.versions[p] += 1
        await self._put(p, payload, name, prev=self.versions[p] - 1)

    async def _put(
        self, p: int, payload: bytes, name: str, *, prev: int, epoch: int = 0, term: int = 1
    ) -> None:
        subject = subjects.publication(self.spec.name, epoch, p, self.versions[p], term)
        blob = await put_blob(self.bus, subject, payload, chunk_bytes=256)
        manifest = PublicationManifest(
            run=self.spec.name,
            epoch=epoch,
            term=term,
            round=self.versions[p] - 1,
            fragment=p,
            version=self.versions[p],
            prev_version=prev,
            codec=name,
            values=self.layout.sizes[p],
            anchor_digest=digest_array(self.anchors[p]),
            config_hash=config_hash(self.spec),
            participants=(),
            last_merged={},
            stamp=Stamp(
                round=self.versions[p],
                steps=8 * self.versions[p],
                fraction=0.1,
                fraction_per_step=0.1,
            ),
            layout=self.layout.tensors if prev < 0 else (),
            blob=blob,
        )
        await self.bus.append(subject + ".m", encode(manifest))

    async def purge(self, p: int, version: int) -> None:
        """A keyframe has replaced this version."""
        subject = f"dn.{self.spec.name}.*.{p}.{version}."
        await self.bus.purge(subjects.dn_stream(self.spec.name), f"{subject}>")
