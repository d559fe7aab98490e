"""The event log: what people should know. Events are shown, never acted on."""

import time
from typing import Any

import structlog

from diloco_shared.edges.bus import Bus, BusError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Event
from diloco_shared.protocol.wire import encode

log = structlog.get_logger()

# Longest text of an event: a line or two on a screen.
TEXT_MAX = 500


def event_now(run: str, kind: str, source: str, text: str, data: dict[str, Any]) -> Event:
    """What has just happened."""
    return Event(run=run, kind=kind, source=source, text=text[:TEXT_MAX], data=data, at=time.time())


async def tell(bus: Bus, event: Event, *, timeout_s: float = 5.0) -> None:
    """Write it, in one attempt: nothing depends on it, so a failure is only logged."""
    try:
        await bus.append(subjects.event(event.run, event.kind), encode(event), timeout_s=timeout_s)
    except BusError as error:
        log.warning("event not written", kind=event.kind, run=event.run, error=str(error))
