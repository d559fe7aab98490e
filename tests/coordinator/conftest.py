"""A coordinator on a memory bus, and the cluster around it as its buckets tell."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from diloco_coordinator.api.admin_token_io import AdminToken
from diloco_coordinator.api.audit_io import Audit
from diloco_coordinator.api.sse_io import EventStreams
from diloco_coordinator.app import create_app, fed
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.exports.sampling_io import ChildSampler
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.port import StreamSpec
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol import subjects
from diloco_shared.protocol.checkpoints import CheckpointManifest, Object, reference
from diloco_shared.protocol.messages import Message, Stamp, TapeRound, TapeTerm, Verdict
from diloco_shared.protocol.records import Event, MemberRecord, RunStatus, TokenCounts
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

TOKEN = "secret-of-the-admin"


def spec(name: str = "demo", **membership: Any) -> dict[str, Any]:
    return {"name": name, "budget": {"steps": 96}, "membership": membership}


def member(name: str, role: str = "learner", boot: str = "1") -> MemberRecord:
    return MemberRecord.model_validate(
        {
            "id": name,
            "role": role,
            "boot": boot,
            "host": "here",
            "pid": 1,
            "lock": "l",
            "started_at": 1.0,
        }
    )


def status(run: str = "demo", state: str = "running", **changes: Any) -> RunStatus:
    fields: dict[str, Any] = {
        "run": run,
        "state": state,
        "settled": state in ("finished", "stopped"),
        "reason": "2 of 2 ready",
        "epoch": 0,
        "term": 1,
        "leader": "syncer-1",
        "quorum": 1,
        "versions": (1, 0),
        "stamp": Stamp(round=1, steps=8, fraction=0.1, fraction_per_step=0.01),
        "rounds_committed": 1,
        "rounds_skipped": 0,
        "contributions_merged": 2,
        "refused": {"non-finite": 3},
        "alive": ("a", "b"),
        "participating": ("a",),
        "parameters": 100,
        "tokens_per_step": 512,
        "tokens_processed": 4096,
        "tokens_useful": 2048,
        "tokens": TokenCounts(merged=2048, overwritten=40, in_flight=2008),
        "tokens_reread": 8,
        "bytes_up": 10,
        "bytes_down": 20,
        "learners": {"a": {"state": "stepping", "step": 8, "loss": 2.5}},
        "at": 100.0,
    }
    return RunStatus.model_validate(fields | changes)


def closed(number: int, *verdicts: Verdict) -> TapeRound:
    return TapeRound.model_validate(
        {
            "epoch": 0,
            "term": 1,
            "round": number,
            "fragment": 0,
            "outcome": "committed",
            "reason": "merged",
            "quorum_reason": "2 of 2 ready",
            "quorum": 1,
            "version": number + 1,
            "verdicts": verdicts,
            "keyframe": False,
            "anchor_digest": "",
            "master_digest": "",
            "payload_digest": "",
            "stamp": Stamp(round=number, steps=8, fraction=0.1, fraction_per_step=0.01),
            "quorum_s": 0.1,
            "grace_s": 0.0,
            "sync_s": 0.1,
            "at": 5.0,
        }
    )


class World:
    """One broker; what processes other than the coordinator write to it."""

    def __init__(self, folder: Path = Path("/nonexistent")) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "world")
        self.checkpoints = "/nonexistent/checkpoints"
        self.places: tuple[str, ...] = ()  # where else they may be
        self.folder = folder
        self.exporter: Any = None  # nothing is exported, unless a test says how
        self.sampler: Any = ChildSampler({})
        self.admin: AdminToken | str = TOKEN
        self.export_limits = {"kept_max": 3, "at_once": 2}

    async def joins(
        self,
        *names: str,
        role: str = "learner",
        ttl_s: float | None = None,
        key: str = "",
        **shown: Any,
    ) -> None:
        for name in names:
            record = encode(member(name, role).model_copy(update=shown))
            await self.bus.kv_put(subjects.MEMBERS, key or name, record, ttl_s=ttl_s)

    async def dies(self, name: str) -> None:
        await self.bus.kv_delete(subjects.MEMBERS, name)

    async def says(self, reported: RunStatus) -> None:
        await self.bus.kv_put(subjects.STATUS, reported.run, encode(reported))

    async def tells(self, kind: str, run: str = "demo", /, **data: Any) -> None:
        event = Event(run=run, kind=kind, source="a", text=kind, data=data, at=time.time())
        await self.bus.append(subjects.event(run, kind), encode(event))

    async def tape(self, run: str, *records: Message) -> None:
        name, filter_ = subjects.tape_stream(run), f"tape.{run}.>"
        await self.bus.ensure_stream(StreamSpec(name, (filter_,), 1 << 20))
        for record in records:
            await self.bus.append(subjects.tape(run, 0), encode(record))

    @asynccontextmanager
    async def coordinator(self, *, chaos: bool = True) -> AsyncIterator["Desk"]:
        """One life of a coordinator."""
        bus = MemoryBus(self.broker, "coordinator")
        registry = Registry(bus)
        shelf = Shelf(self.folder / "exports")
        exports = Exports(registry, shelf, self.exporter, **self.export_limits)
        app = create_app(
            registry,
            self.admin,
            chaos=chaos,
            checkpoints=self.checkpoints,
            places=self.places,
            exports=exports,
            sampler=self.sampler,
            audit=Audit(self.folder if self.folder.exists() else None),
        )
        streams: EventStreams = app.state.streams
        async with fed(registry, exports):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://c") as http:
                yield Desk(registry, http, streams, exports, app)
        await bus.close()


class Desk:
    """A coordinator to ask."""

    def __init__(
        self,
        registry: Registry,
        http: httpx.AsyncClient,
        streams: EventStreams,
        exports: Exports,
        app: FastAPI,
    ) -> None:
        self.app = app
        self.exports = exports
        self.registry = registry
        self.streams = streams
        self.http = http
        self.token = TOKEN

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.request(method, path, json=body, headers=sent)

    async def makes(self, name: str, *scopes: str, **limits: Any) -> str:
        """A new token, as the one in use makes it."""
        made = await self.ask("POST", "/v1/tokens", {"name": name, "scopes": scopes} | limits)
        assert made.status_code == 201, made.text
        return str(made.json()["token"])

    async def asks_as(self, token: str, *given: Any) -> httpx.Response:
        """`ask` with another token."""
        own, self.token = self.token, token
        try:
            return await self.ask(*given)
        finally:
            self.token = own

    async def get(self, path: str) -> Any:
        answer = await self.ask("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def kept(world: Any, tmp_path: Path) -> Any:
    """A world whose checkpoints are in a folder; writes one of a run there."""
    world.checkpoints = str(tmp_path)

    def keep(spec: dict[str, Any], number: int) -> str:
        of = RunSpec.model_validate(spec)
        there, ref = RunCheckpoints(str(tmp_path)), reference(of.folder, number)
        there.seal(
            ref,
            CheckpointManifest(
                run=of.name,
                run_id=of.id,
                number=number,
                reason="as the user asked",
                at=time.time(),
                epoch=0,
                stamp=Stamp(round=1, steps=8, fraction=0.1, fraction_per_step=0.01),
                versions=(1, 0),
                parameters=100,
                spec=of.model_dump(mode="json"),
                shards=tuple(
                    Object(key=f"shard-{n}.json", bytes=5, digest="0" * 32)
                    for n in range(of.algorithm.shards)
                ),
                learners={"a": Object(key="learner-a.json", bytes=5, digest="0" * 32)},
                missing={"b": "nothing came"},
                leases=(),
                # The only life of `c` began after this checkpoint: the run has gone back behind it.
                incarnations={"a": 4, "b": 1, "c": -1},
                bytes=10,
            ),
        )
        return ref

    return keep


@pytest.fixture(name="status")
def _status() -> Callable[..., RunStatus]:
    return status


@pytest.fixture(name="closed")
def _closed() -> Callable[..., TapeRound]:
    return closed


@pytest.fixture
def term() -> TapeTerm:
    return TapeTerm(epoch=0, term=1, leader="syncer-1", at=1.0)
