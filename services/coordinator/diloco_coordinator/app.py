"""The coordinator process: REST control room and live page. Never on the training path."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import Field

from diloco_coordinator.access import asker
from diloco_coordinator.api import problems_io as problems
from diloco_coordinator.api.admin_token_io import AdminToken
from diloco_coordinator.api.audit_io import Audit
from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.chaos_io import Chaos
from diloco_coordinator.api.checkpoints_io import CheckpointRoutes
from diloco_coordinator.api.exports_io import ExportRoutes
from diloco_coordinator.api.gateway_io import Gateway
from diloco_coordinator.api.listening_io import answer_on, listen
from diloco_coordinator.api.members_io import Members
from diloco_coordinator.api.metrics_io import ClusterMetrics
from diloco_coordinator.api.plans_io import Plans
from diloco_coordinator.api.rounds_io import Rounds
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.samples_io import SampleRoutes
from diloco_coordinator.api.sse_io import EventStreams
from diloco_coordinator.api.tokens_io import TokenRoutes
from diloco_coordinator.exports.child_io import ChildExporter, Exporter
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.exports.sampling_io import ChildSampler, Sampler, Samples
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_coordinator.runs.assigning_io import keep_assigned
from diloco_coordinator.runs.ending_io import keep_ending, keep_removed
from diloco_coordinator.runs.registry_io import MIRRORED, Registry
from diloco_coordinator.runs.sweeping_io import keep_swept
from diloco_shared.bus.port import Bus
from diloco_shared.process.chaos import FaultAgent
from diloco_shared.process.connecting import connected
from diloco_shared.process.crash_points import arm
from diloco_shared.process.health import Health, HealthServer, bus_state
from diloco_shared.process.loop_watch import LoopWatch
from diloco_shared.process.membership import DataFolder, Registration
from diloco_shared.process.set_up import writing
from diloco_shared.process.settings import ProcessSettings
from diloco_shared.protocol import subjects
from diloco_shared.protocol.subjects import Id
from diloco_shared.spec.run import Replicas


class Settings(ProcessSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    id: Id = Field("coordinator", description="This process's member id.")
    host: str = Field("127.0.0.1", description="Address of the API; loopback unless told so.")
    port: int = Field(8400, ge=0, le=65535, description="Port of the API; 0 takes a free one.")
    tls_cert: Path | None = Field(None, description="PEM certificate: the API speaks https.")
    tls_key: Path | None = Field(None, description="PEM key of tls_cert.")
    admin_token_file: Path | None = Field(
        None,
        description="File with the administrator's token; <data>/admin-token if empty, which is "
        "made at the first start. Replaced content is taken up within a second; further lines are "
        "good as well.",
    )
    export_credentials: str = Field(
        "",
        description="Credentials file with which exports read runs, such as the hub's `reader`, "
        "which may write nothing; the coordinator's own if empty.",
    )
    replicas: Replicas = Field(
        1,
        description="Copies of the cluster's buckets and events, each on another node of the hub: "
        "1, 3 or 5. Those of a run's streams are the run's own setting.",
    )
    exports_kept: int = Field(
        8,
        ge=1,
        le=1000,
        description="Exports of all runs kept in the data folder; each holds a whole model. The "
        "oldest go first, and before them those that runs made by themselves; of each run one "
        "stays.",
    )
    exports_at_once: int = Field(
        2,
        ge=1,
        le=16,
        description="Exports made at a time; each reads a whole model over one link, to one disk.",
    )


log = structlog.get_logger()

WEB = Path(__file__).parent / "web"
URL_FILE = "url"
_API = "The control room: runs, members, rounds, events, metrics and faults. See ARCHITECTURE.md."


def create_app(
    registry: Registry,
    token: AdminToken | str,
    *,
    chaos: bool,
    checkpoints: str,
    places: Sequence[str] = (),
    exports: Exports,
    sampler: Sampler,
    loop_watch: LoopWatch | None = None,
    audit: Audit | None = None,
) -> FastAPI:
    """The API over a registry; the caller keeps the registry fed.

    `token`: the administrator's. `checkpoints`: where runs keep theirs unless they say otherwise;
    `places`: where else a run or a request may say that they are. `audit`: where changes are noted;
    in memory alone if it is not given.
    """
    # The usual pages for /docs load scripts from the internet; the description itself is served.
    app = FastAPI(
        title="decoupled-diloco", version="1", description=_API, docs_url=None, redoc_url=None
    )
    problems.install(app)
    guard, audit = Guard(registry, token), audit or Audit()
    streams = EventStreams(registry, guard.good)
    app.state.streams = streams
    runs = app.state.runs = Runs(registry, guard, streams, checkpoints, places)
    app.include_router(runs.router)
    app.include_router(Rounds(runs, guard).router)
    app.include_router(CheckpointRoutes(registry, guard, runs).router)
    app.include_router(ExportRoutes(registry, guard, runs, exports).router)
    samples = SampleRoutes(guard, runs, exports, streams, Samples(sampler))
    app.include_router(samples.router)
    app.include_router(Members(registry, guard, streams).router)
    app.include_router(TokenRoutes(registry, guard, audit, chaos=chaos).router)
    app.include_router(Chaos(registry, guard, on=chaos).router)
    app.include_router(Plans(guard).router)
    requests: Counter[tuple[str, str]] = Counter()
    metrics = ClusterMetrics(registry, requests, loop_watch, exports)
    app.state.metrics = metrics
    app.add_middleware(Gateway, requests=requests, audit=audit, recognise=guard.recognise)

    # Balancers and watchers of uptime ask by HEAD: who answers it needs to send no body.
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["health"])
    async def _healthz() -> dict[str, Any]:
        """This process answers."""
        return {"alive": True}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["health"])
    async def _readyz() -> Response:
        """The bus is there and its state is mirrored."""
        ready = registry.ready and registry.bus.connected
        ails = registry.bus.ails or ("" if ready else "the bus is away")
        return PlainTextResponse(f"{ails or 'ready'}\n", 503 if ails else 200)

    @app.get("/metrics", include_in_schema=False, **guard.look)
    async def _metrics() -> Response:
        return PlainTextResponse(metrics.text(asker()))

    app.mount("/", StaticFiles(directory=WEB, html=True), name="page")
    return app


@asynccontextmanager
async def fed(registry: Registry, exports: Exports) -> AsyncIterator[None]:
    """Keep a registry mirrored, runs assigned and exports going while the context lasts.

    A task that ends by a fault ends the context with it: a blind coordinator is worse than one
    that is started again.
    """
    await registry.prepare()
    await exports.prepare()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(registry.watch(bucket)) for bucket in MIRRORED]
        tasks.append(group.create_task(registry.read_events()))
        for subject in (subjects.beat("*"), subjects.lapsed_beat("*")):
            tasks.append(group.create_task(registry.hear_beats(subject)))
        tasks.append(group.create_task(registry.hear_speeds()))
        tasks.append(group.create_task(keep_assigned(registry)))
        tasks.append(group.create_task(keep_ending(registry)))
        tasks.append(group.create_task(keep_removed(registry)))
        tasks.append(group.create_task(keep_swept(registry)))
        tasks.append(group.create_task(exports.keep()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


class Coordinator:
    """One process on a connected bus: what it keeps, and the API over it."""

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        folder: DataFolder,
        token: AdminToken | str,
        *,
        address: str = "",
        loop_watch: LoopWatch | None = None,
        exporter: Exporter | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        """`exporter`: who takes weights out of runs, and `sampler`: who lets them write, if not
        processes of the product."""
        self.registry = Registry(bus, replicas=settings.replicas)
        self.exports = Exports(
            self.registry,
            Shelf(folder.path / "exports"),
            exporter or ChildExporter.of(settings, settings.export_credentials),
            kept_max=settings.exports_kept,
            at_once=settings.exports_at_once,
        )
        self.membership = Registration(
            bus, settings.id, "coordinator", folder.lock, address=address
        )
        self.faults = FaultAgent(bus, settings.id, enabled=settings.chaos)
        self.loop_watch = loop_watch
        self.api = create_app(
            self.registry,
            token,
            chaos=settings.chaos,
            checkpoints=settings.checkpoint_root,
            places=settings.checkpoint_places,
            exports=self.exports,
            sampler=sampler or ChildSampler.of(settings),
            loop_watch=loop_watch,
            audit=Audit(folder.path),
        )

    def tell(self, server: HealthServer) -> None:
        """From now on the server answers with what is known here."""
        server.look, server.registry = self.health, self.api.state.metrics.collectors

    def health(self) -> Health:
        """What a probe on the own port is told."""
        bus = self.registry.bus
        detail: dict[str, Any] = {"id": self.membership.record.id, "bus": bus_state(bus)}
        detail |= self.loop_watch.detail() if self.loop_watch is not None else {}
        return Health(self.registry.ready and bus.connected and not bus.ails, detail)

    async def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Until `serving`, which answers requests, is over."""
        try:
            async with fed(self.registry, self.exports), asyncio.TaskGroup() as tasks:
                await self.membership.register()
                background = [
                    tasks.create_task(self.membership.keep()),
                    tasks.create_task(self.faults.serve()),
                ]
                await serving
                for task in background:
                    task.cancel()
        finally:
            serving.close()
            await self.membership.leave()


async def serve(settings: Settings) -> None:
    """Connect and serve until the process is told to stop."""
    folder = DataFolder(settings.data, settings.id)
    arm(settings.crash_at, settings.id, folder.path)
    sockets: list[socket.socket] = []
    try:
        token = AdminToken.at(settings.data, settings.admin_token_file)
        sockets.append(bound := listen(settings.host, settings.port))
        probed = listen(settings.health_host, settings.health_port, "DILOCO_HEALTH_PORT")
        sockets.append(probed)
        port = bound.getsockname()[1]
        scheme = "https" if settings.tls_cert else "http"
        with writing(settings.data):
            (folder.path / URL_FILE).write_text(f"{scheme}://{settings.host}:{port}\n")
        async with (
            measured(probed, settings.id) as server,
            connected(settings, settings.id) as bus,
            asyncio.TaskGroup() as tasks,
        ):
            address, loop_watch = f"{settings.host}:{port}", LoopWatch()
            coordinator = Coordinator(
                settings, bus, folder, token, address=address, loop_watch=loop_watch
            )
            coordinator.tell(server)
            watching = tasks.create_task(loop_watch.keep())
            tls = (settings.tls_cert, settings.tls_key)
            await coordinator.run(answer_on(bound, coordinator.api, *tls))
            watching.cancel()
    finally:
        for opened in sockets:
            opened.close()
        folder.release()


@asynccontextmanager
async def measured(bound: socket.socket, name: str) -> AsyncIterator[HealthServer]:
    """Health and metrics on a port of their own, for which no token is needed.

    Until it is told what else to look at, it says that there is no connection to the hub: a
    supervisor that starts a coordinator in vain, again and again, is seen by that.
    """
    metrics = CollectorRegistry()
    metrics.register(Unconnected())
    server = HealthServer(lambda: Health(False, {"id": name, "bus": "away"}), metrics)
    await server.start_on(bound)
    host, port = bound.getsockname()[:2]
    log.info("health and metrics", address=f"{host}:{port}")
    try:
        yield server
    finally:
        await server.close()


class Unconnected:
    """All that is known before the hub is there: named as `ClusterMetrics` names it later."""

    def collect(self) -> Iterator[Metric]:
        text = "1: the coordinator has its connection to the message server"
        yield GaugeMetricFamily("diloco_hub_connected", text, 0.0)
