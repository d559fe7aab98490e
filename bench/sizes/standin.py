"""A learner without a model: sends and receives the real bytes, and holds one fragment at a time.

    python -m sizes.standin NAME NATS_URL TOKEN DATA STEP_S

It joins, sends initial parameters when it is named, steps by the clock, answers every pull with a
whole contribution in the run's codec, and fetches and checks every publication before it counts it
as adopted. What it contributes is noise; what travels, and what the syncer does with it, is real.
"""

import asyncio
import sys
import time
from pathlib import Path

import numpy as np

from diloco_learner.exchange.counters import Counters
from diloco_learner.recovery.incarnation_io import take_incarnation
from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import BusError
from diloco_shared.numerics import codec
from diloco_shared.process.membership import DataFolder, Registration
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Beat,
    ContributionManifest,
    Grant,
    InitManifest,
    Join,
    Progress,
    PublicationManifest,
    Pull,
    TensorSpec,
)
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model, RunSpec, config_hash, shared_keys
from sizes.model import Synthetic, shapes

# Noise of this size: a step of a real learner moves a value by about its rate.
DELTA = 1e-4
# A blob of a gigabyte on a busy disk, in seconds.
PATIENCE_S = 600.0
JOIN_S = 1.0


def layout_of(model: Model, fragments: int) -> Layout:
    """How the synthetic model of a specification is cut."""
    sizes = shapes(int(model.overrides["parameters"]), int(model.overrides["width"]))
    tensors = [
        TensorSpec(name=name, shape=shape, embedding=Synthetic.is_embedding(name))
        for name, shape in sizes.items()
    ]
    return Layout.build(tensors, fragments)


class StandIn:
    """One life in one run."""

    def __init__(self, spec: RunSpec, me: str, incarnation: int, bus: NatsBus, data: NatsBus):
        self.spec, self.me, self.incarnation = spec, me, incarnation
        self.bus, self.data = bus, data
        self.hash = config_hash(spec)
        self.layout = layout_of(spec.model, spec.algorithm.fragments)
        self.counters = Counters([-1] * spec.algorithm.fragments)
        self.epoch = 0
        self.answered: set[tuple[int, int, int]] = set()
        self.over = asyncio.Event()
        self.sent_initial = False
        self.granted = False
        self.encoded: dict[int, bytes] = {}  # one contribution, of the size asked for last
        self.received = 0

    async def run(self, step_s: float) -> None:
        """Until the run is over."""
        async with asyncio.TaskGroup() as tasks:
            working = [
                tasks.create_task(work)
                for work in (
                    self._beats(),
                    self._grants(),
                    self._pulls(tasks),
                    self._publications(),
                    self._steps(step_s),
                )
            ]
            await self.over.wait()
            for task in working:
                task.cancel()

    # --- control -------------------------------------------------------------------------------

    async def _grants(self) -> None:
        where = subjects.grant(self.spec.name, self.me)
        join = Join(
            learner=self.me,
            incarnation=self.incarnation,
            nonce=f"{self.me}-{self.incarnation}",
            config=shared_keys(self.spec) | {"layout": self.layout.digest()},
        )
        async with self.bus.subscribe(where) as grants:
            while not self.granted:
                await self.bus.publish(subjects.join(self.spec.name, join.learner), encode(join))
                try:
                    async with asyncio.timeout(JOIN_S):
                        grant = decode((await anext(grants)).payload, Grant)
                except TimeoutError:
                    continue
                if not grant.accepted:
                    raise SystemExit(f"{self.me} is refused: {grant.reason}")
                self.epoch, self.granted = grant.epoch, True

    async def _beats(self) -> None:
        async with self.bus.subscribe(subjects.beat(self.spec.name)) as beats:
            async for delivery in beats:
                beat = decode(delivery.payload, Beat)
                if beat.state in ("finished", "stopped"):
                    await self._progress("finished")
                    self.over.set()
                if beat.epoch > self.epoch:
                    self.epoch = beat.epoch
                    self.counters.void()
                if beat.initializer == self.me and not self.sent_initial:
                    self.sent_initial = True
                    asyncio.get_running_loop().create_task(self._initial())

    async def _steps(self, step_s: float) -> None:
        while True:
            await asyncio.sleep(step_s)
            if self.granted and self.counters.complete:
                self.counters.stepped(self.spec.tokens_per_step)
            await self._progress("stepping" if self.counters.complete else "recovering")

    async def _progress(self, state: str) -> None:
        if not self.granted:
            return
        c, fragments = self.counters, range(self.spec.algorithm.fragments)
        report = Progress.model_validate(
            {
                "run_id": self.spec.id,
                "learner": self.me,
                "incarnation": self.incarnation,
                "epoch": self.epoch,
                "state": state,
                "step": c.step,
                "tokens": c.tokens,
                "c_steps": tuple(c.c_steps(p) for p in fragments),
                "c_tokens": tuple(c.c_tokens(p) for p in fragments),
                "adopted": tuple(c.adopted_P),
                "adopted_at": tuple(c.step_at_P),
                "loss": 1.0,
                "step_s": 1.0,
                "wait_s": 0.0,
            }
        )
        await self.bus.publish(subjects.progress(self.spec.name, self.me), encode(report))

    # --- bytes ---------------------------------------------------------------------------------

    async def _initial(self) -> None:
        """Values of each fragment made when it is sent."""
        for p, size in enumerate(self.layout.sizes):
            subject = subjects.initial(self.spec.name, self.me, self.incarnation, p)
            payload = await asyncio.to_thread(self._values, p, size, "fp32", 0.02)
            blob = await put_blob(self.data, subject, payload)
            manifest = InitManifest(
                run=self.spec.name,
                learner=self.me,
                incarnation=self.incarnation,
                config_hash=self.hash,
                layout=self.layout.tensors,
                fragment=p,
                blob=blob,
            )
            await self._append(subject + ".m", encode(manifest))

    @staticmethod
    def _values(seed: int, size: int, name: str, scale: float) -> bytes:
        values_F = np.random.default_rng(seed).standard_normal(size, np.float32)
        values_F *= np.float32(scale)
        return codec.encode(name, values_F)

    async def _append(self, subject: str, payload: bytes) -> None:
        while True:
            try:
                await self.data.append(subject, payload, msg_id=subject)
                return
            except BusError:
                await asyncio.sleep(0.3)

    async def _pulls(self, tasks: asyncio.TaskGroup) -> None:
        async with self.bus.subscribe(subjects.pull(self.spec.name)) as pulls:
            async for delivery in pulls:
                pull = decode(delivery.payload, Pull)
                key = (pull.epoch, pull.term, pull.round)
                if self.me in pull.participants and key not in self.answered:
                    self.answered.add(key)
                    tasks.create_task(self._contribute(pull))

    async def _contribute(self, pull: Pull) -> None:
        c, p = self.counters, pull.fragment
        if pull.epoch != self.epoch or c.c_steps(p) < 1:
            return
        base, at = c.adopted_P[p], (c.step_at_P[p], c.step, c.tokens_at_P[p], c.tokens)
        size, name = self.layout.sizes[p], self.spec.algorithm.codec_up
        if size not in self.encoded:
            noise = await asyncio.to_thread(self._values, size, size, name, DELTA)
            self.encoded = {size: noise}
        subject = subjects.contribution(
            self.spec.name, self.me, pull.epoch, p, pull.round, pull.term
        )
        blob = await put_blob(self.data, subject, self.encoded[size])
        manifest = ContributionManifest(
            run=self.spec.name,
            learner=self.me,
            incarnation=self.incarnation,
            epoch=pull.epoch,
            term=pull.term,
            round=pull.round,
            fragment=p,
            base=base,
            step_from=at[0],
            step_to=at[1],
            tokens_from=at[2],
            tokens_to=at[3],
            cursor=None,
            codec=name,
            values=size,
            config_hash=self.hash,
            blob=blob,
        )
        await self._append(subject + ".m", encode(manifest))

    async def _publications(self) -> None:
        run = self.spec.name
        stream = subjects.dn_stream(run)
        async with self.data.read(stream, f"dn.{run}.*.*.*.*.m") as manifests:
            async for stored in manifests:
                m = decode(stored.payload, PublicationManifest)
                if m.config_hash != self.hash or m.epoch < self.epoch:
                    continue
                try:
                    payload = await get_blob(self.data, stream, m.blob, timeout_s=PATIENCE_S)
                except BusError:
                    continue  # a keyframe has replaced it
                codec.check(m.codec, payload, m.values)
                self.received += len(payload)
                del payload
                if m.version > self.counters.adopted_P[m.fragment]:
                    self.counters.adopt(m.fragment, m.version)


async def main(me: str, url: str, token: str, data: Path, step_s: float) -> None:
    """A member that works for one run after the other, until it is told to stop."""
    folder = DataFolder(data, me)
    bus = await NatsBus.connect(url, name=f"{me}-control", token=token)
    lane = await NatsBus.connect(url, name=f"{me}-data", token=token)
    membership = Registration(bus, me, "learner", folder.lock)
    await membership.register()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(membership.keep())
        async for run in membership.assignments():
            if not run:
                continue
            entry = await bus.kv_get(subjects.RUNS, run)
            assert entry is not None and entry.value is not None
            spec = RunSpec.model_validate(decode(entry.value, RunRecord).spec)
            incarnation = await take_incarnation(bus, run, me, membership.record.boot)
            membership.update(run=run, state="working")
            began = time.monotonic()
            standin = StandIn(spec, me, incarnation, bus, lane)
            await standin.run(step_s)
            seconds = time.monotonic() - began
            print(f"{me}: {standin.received} bytes received in {seconds:.0f} s", flush=True)
            membership.update(run="", state="idle")


if __name__ == "__main__":
    me, url, token, data, step_s = sys.argv[1:]
    asyncio.run(main(me, url, token, Path(data), float(step_s)))
