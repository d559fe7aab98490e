"""The coordinator process: REST control room and live page. Never on the training path."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse

from diloco_coordinator.edges import problems
from diloco_coordinator.edges.auth import Guard, admin_token
from diloco_coordinator.edges.control import Control
from diloco_coordinator.edges.metrics import ClusterMetrics
from diloco_coordinator.edges.registry import Registry
from diloco_coordinator.edges.runs import Runs
from diloco_coordinator.settings import Settings
from diloco_shared.edges.bus import Bus
from diloco_shared.edges.faults import FaultAgent
from diloco_shared.edges.membership import DataFolder, Membership
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.protocol import subjects

log = structlog.get_logger()

PAGE = Path(__file__).parent / "web" / "index.html"
# A run's specification is a few kilobytes.
BODY_BYTES_MAX = 1 << 20


def create_app(registry: Registry, token: str, *, chaos: bool) -> FastAPI:
    """The API over a registry; the caller keeps the registry fed."""
    app = FastAPI(title="decoupled-diloco", version="1", description=__doc__ or "")
    problems.install(app)
    guard = [Depends(Guard(token))]
    app.include_router(Runs(registry).router, dependencies=guard)
    app.include_router(Control(registry, chaos=chaos).router, dependencies=guard)
    metrics = ClusterMetrics(registry)

    @app.middleware("http")
    async def _limit(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > BODY_BYTES_MAX:
            return problems.response(
                413, "Too large", f"a body may have {BODY_BYTES_MAX} bytes at most"
            )
        return await call_next(request)

    @app.get("/", include_in_schema=False)
    async def _page() -> FileResponse:
        return FileResponse(PAGE)

    @app.get("/healthz", tags=["health"])
    async def _healthz() -> dict[str, Any]:
        """This process answers."""
        return {"alive": True}

    @app.get("/readyz", tags=["health"])
    async def _readyz() -> Response:
        """The bus is there and its state is mirrored."""
        ready = registry.ready and registry.bus.connected
        text = "ready\n" if ready else "the bus is away\n"
        return PlainTextResponse(text, 200 if ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def _metrics() -> Response:
        return PlainTextResponse(metrics.text())

    return app


@asynccontextmanager
async def fed(registry: Registry) -> AsyncIterator[None]:
    """Keep a registry mirrored and runs assigned while the context lasts."""
    await registry.prepare()
    tasks = [
        asyncio.create_task(work)
        for work in (
            *(
                registry.watch(bucket)
                for bucket in (
                    subjects.MEMBERS,
                    subjects.RUNS,
                    subjects.STATUS,
                    subjects.ASSIGNMENTS,
                )
            ),
            registry.read_events(),
            registry.keep_assigned(),
        )
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("stopped early", error=repr(result))


async def serve(settings: Settings) -> None:
    """Connect and serve until the process is told to stop."""
    folder = DataFolder(settings.data, settings.id)
    token = admin_token(settings.data)
    bus: Bus = await NatsBus.connect(
        settings.nats_url, name=settings.id, token=settings.nats_token or None
    )
    registry = Registry(bus)
    membership = Membership(
        bus, settings.id, "coordinator", folder.lock, address=f"{settings.host}:{settings.port}"
    )
    faults = FaultAgent(bus, settings.id, enabled=settings.chaos)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(registry, token, chaos=settings.chaos),
            host=settings.host,
            port=settings.port,
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
    )
    try:
        async with fed(registry), asyncio.TaskGroup() as tasks:
            await membership.register()
            background = [
                tasks.create_task(membership.keep()),
                tasks.create_task(faults.serve()),
            ]
            await server.serve()
            for task in background:
                task.cancel()
    finally:
        await membership.leave()
        await bus.close()
        folder.release()
