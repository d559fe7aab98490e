"""A tiny run of real text and a real (very small) model, and a syncer that follows a script."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.rig import Rig, rigs
from waiting import NotYet, until

from diloco_learner.training.trainer import Program
from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.port import StreamSpec
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Beat,
    ContributionManifest,
    Donate,
    Grant,
    InitManifest,
    Join,
    Progress,
    PublicationManifest,
    Pull,
    Stamp,
)
from diloco_shared.protocol.records import Assignment, Event, RunRecord
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

Values = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty small text files: enough for all three splits."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(40):
        text = f"file {n} says that {n} plus {n} makes {2 * n}.\n" * 200
        (folder / f"text-{n:02d}.txt").write_text(text)
    return folder


@pytest.fixture
def spec(corpus: Path) -> RunSpec:
    """A run whose model compiles in a moment."""
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": 3, "sync_every_steps": 6, "codec_up": "fp32"},
            "model": {
                "context_tokens": 8,
                "overrides": {
                    "width": 8,
                    "layers": 1,
                    "heads": 2,
                    "kv_heads": 2,
                    "head_width": 4,
                    "hidden": 8,
                },
            },
            "data": {"source": str(corpus), "virtual_shards": 8, "validation_fraction": 0.2},
            "inner": {"batch_sequences": 2, "warmup_steps": 0},
            "evaluation": {"every_steps": 100, "sequences": 4},
            "membership": {"lease_s": 4.0, "heartbeat_s": 0.2},
            "keeping": {"checkpoint_every_steps": 1_000_000},
            "budget": {"steps": 1000},
        }
    )


class ScriptedSyncer:
    """The syncer's side of the wire; does only what a test tells it to."""

    def __init__(self, broker: MemoryBroker, spec: RunSpec) -> None:
        self.spec = spec
        self.run = spec.name
        self.bus = MemoryBus(broker, "syncer")
        self.joins: list[Join] = []
        self.progress: dict[str, list[Progress]] = {}
        self.anchors: dict[int, Values] = {}
        self.versions = [-1] * spec.algorithm.fragments
        self.round = -1
        self.donor = ""  # to name in grants
        self.nonces: dict[str, str] = {}  # last granted
        self.state: Any = "waiting"
        self.fields: dict[str, Any] = {}  # of every beat
        self.refuses = ""  # why nobody is let in
        self.layout: Any = ()

    # --- set-up --------------------------------------------------------------------------------

    async def prepare(self) -> None:
        for bucket in subjects.BUCKETS:
            await self.bus.ensure_bucket(bucket)
        await self.bus.ensure_stream(
            StreamSpec(subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,), 1 << 20)
        )
        for name, captured in subjects.run_streams(self.run).items():
            await self.bus.ensure_stream(StreamSpec(name, (captured,), 1 << 24))
        record = RunRecord(
            name=self.run,
            spec=self.spec.model_dump(mode="json"),
            desired="running",
            quorum=1,
            created_at=0.0,
        )
        await self.bus.kv_put(subjects.RUNS, self.run, encode(record))

    async def assign(self, learner: str, run: str) -> None:
        value = encode(Assignment(member=learner, run=run, at=0.0))
        await self.bus.kv_put(subjects.ASSIGNMENTS, learner, value)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Take in joins and progress, grant everybody, beat."""
        tasks = [
            asyncio.create_task(work) for work in (self._joins(), self._progress(), self._beats())
        ]
        await asyncio.sleep(0)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            faults = [r for r in results if isinstance(r, Exception)]
            assert not faults, faults

    async def _joins(self) -> None:
        async with self.bus.subscribe(subjects.join(self.run, "*")) as deliveries:
            async for d in deliveries:
                join = decode(d.payload, Join)
                self.joins.append(join)
                self.nonces[join.learner] = join.nonce
                await self.grant(join)

    async def _progress(self) -> None:
        async with self.bus.subscribe(subjects.progress(self.run, "*")) as deliveries:
            async for d in deliveries:
                p = decode(d.payload, Progress)
                self.progress.setdefault(p.learner, []).append(p)

    async def _beats(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(0.02)

    # --- what a test says ----------------------------------------------------------------------

    @property
    def stamp(self) -> Stamp:
        steps = max(self.round + 1, 0) * self.spec.algorithm.steps_per_round
        return Stamp(
            round=self.round, steps=steps, fraction=steps / 1000, fraction_per_step=1 / 1000
        )

    async def beat(self) -> None:
        beat = Beat(
            run=self.run,
            epoch=0,
            term=1,
            state=self.state,
            reason="as scripted",
            versions=tuple(self.versions),
            stamp=self.stamp,
            live=tuple(sorted({j.learner for j in self.joins})),
            **self.fields,
        )
        await self.bus.publish(subjects.beat(self.run), encode(beat))

    async def grant(self, join: Join, donor: str | None = None) -> None:
        grant = Grant(
            learner=join.learner,
            incarnation=join.incarnation,
            nonce=join.nonce,
            accepted=not self.refuses,
            reason=self.refuses or "as scripted",
            epoch=0,
            term=1,
            versions=tuple(self.versions),
            donor=self.donor if donor is None else donor,
            stamp=self.stamp,
        )
        await self.bus.publish(subjects.grant(self.run, join.learner), encode(grant))

    async def donate(self, donor: Progress, newcomer: Join) -> None:
        donate = Donate(
            donor=donor.learner,
            donor_incarnation=donor.incarnation,
            newcomer=newcomer.learner,
            newcomer_incarnation=newcomer.incarnation,
            nonce=newcomer.nonce,
            epoch=0,
            versions=tuple(self.versions),
        )
        await self.bus.publish(subjects.donate(self.run, donor.learner), encode(donate))

    async def bootstrap(self, initializer: str) -> None:
        """Ask for initial parameters, and publish them as version 0."""
        self.state, self.fields = "bootstrapping", {"initializer": initializer}
        up = subjects.up_stream(self.run)
        async with self.bus.read(up, f"up.{self.run}.*.init.*.*.m") as messages:
            parts: dict[int, InitManifest] = {}
            async for stored in messages:
                m = decode(stored.payload, InitManifest)
                parts[m.fragment] = m
                if len(parts) == self.spec.algorithm.fragments:
                    break
        for p, m in sorted(parts.items()):
            payload = await get_blob(self.bus, up, m.blob, timeout_s=5)
            self.layout = m.layout
            await self.publish(p, codec.decode("fp32", payload, codec.count("fp32", payload)))
        self.state, self.fields = "running", {}

    async def publish(self, p: int, anchor_F: Values, last_merged: Any = None) -> None:
        """The next version of fragment p, as a keyframe."""
        self.versions[p] += 1
        self.anchors[p] = anchor_F
        subject = subjects.publication(self.run, 0, p, self.versions[p], 1)
        blob = await put_blob(self.bus, subject, codec.encode("fp32", anchor_F))
        manifest = PublicationManifest(
            run=self.run,
            epoch=0,
            term=1,
            round=self.round,
            fragment=p,
            version=self.versions[p],
            prev_version=-1,
            codec="fp32",
            values=len(anchor_F),
            anchor_digest=digest_array(anchor_F),
            config_hash=config_hash(self.spec),
            participants=(),
            last_merged=last_merged or {},
            stamp=self.stamp,
            layout=self.layout if self.versions[p] == 0 else (),
            blob=blob,
        )
        await self.bus.append(subject + ".m", encode(manifest))

    async def pull(self, p: int, learners: tuple[str, ...]) -> dict[str, tuple[Any, Values]]:
        """Open a round; everybody's manifest and pseudo-gradient."""
        self.round += 1
        pull = Pull(
            epoch=0, term=1, round=self.round, fragment=p, participants=learners, timeout_s=20
        )
        up = subjects.up_stream(self.run)
        answers: dict[str, tuple[Any, Values]] = {}
        await self.bus.publish(subjects.pull(self.run), encode(pull))
        subject = f"up.{self.run}.*.0.{p}.{self.round}.1.m"
        async with self.bus.read(up, subject) as messages:
            async for stored in messages:
                m = decode(stored.payload, ContributionManifest)
                payload = await get_blob(self.bus, up, m.blob, timeout_s=5)
                answers[m.learner] = (m, codec.decode(m.codec, payload, m.values))
                if len(answers) == len(learners):
                    return answers
        raise AssertionError("the stream ended")

    async def merge(self, p: int, learners: tuple[str, ...]) -> dict[str, Any]:
        """A whole round: pull, plain mean, publish. The manifests."""
        answers = await self.pull(p, learners)
        mean_F = np.mean([delta_F for _, delta_F in answers.values()], axis=0, dtype=np.float32)
        merged = {name: (m.incarnation, m.round, -1) for name, (m, _) in answers.items()}
        await self.publish(p, self.anchors[p] - mean_F, merged)
        return {name: m for name, (m, _) in answers.items()}

    # --- what a test sees ----------------------------------------------------------------------

    async def reported(self, learner: str, condition: Callable[[Progress], bool]) -> Progress:
        """The first report from now on, or the newest, that meets `condition`."""
        reports = self.progress.setdefault(learner, [])
        seen = max(len(reports) - 1, 0)

        def met() -> Progress:
            for p in reports[seen:]:
                if condition(p):
                    return p
            raise NotYet(f"last: {reports[-1:]}")

        found: Progress = await until(met, f"such a report of {learner}")
        return found

    async def events(self, kind: str) -> list[Event]:
        stored = await self.bus.fetch(subjects.EVENTS_STREAM, subjects.event(self.run, kind))
        return [decode(s.payload, Event) for s in stored]

    @property
    def hash(self) -> str:
        return config_hash(self.spec)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
def syncer(broker: MemoryBroker, spec: RunSpec) -> ScriptedSyncer:
    return ScriptedSyncer(broker, spec)


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {}


@pytest.fixture
def rig(spec: RunSpec, programs: dict[str, Program]) -> Rig:
    return rigs(programs.setdefault("compiled once", Program.build(spec)))
