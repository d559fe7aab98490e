"""Between what buckets and streams hold and messages: the one way to read and to write them."""

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError, Stored
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Message, sendable
from diloco_shared.protocol.records import Event, MemberRecord
from diloco_shared.protocol.wire import WireError, decode, encode

log = structlog.get_logger()

M = TypeVar("M", bound=Message)


class Found(NamedTuple, Generic[M]):
    """A record of a bucket, and the revision that a compare-and-set of it expects."""

    record: M
    revision: int


async def record_at(bus: Bus, bucket: str, key: str, kind: type[M]) -> Found[M] | None:
    """What is under a key; None where there is nothing.

    Raises BusError, and WireError for one that nobody can read.
    """
    entry = await bus.kv_get(bucket, key)
    if entry is None or entry.value is None:
        return None
    return Found(decode(entry.value, kind), entry.revision)


async def readable_at(bus: Bus, bucket: str, key: str, kind: type[M]) -> M | None:
    """The record under a key; None where there is none that can be read. Raises BusError."""
    entry = await bus.kv_get(bucket, key)
    return None if entry is None else readable(entry.value, kind)


async def records_in(
    bus: Bus, bucket: str, kind: type[M], *, under: str = "", strict: bool = False
) -> dict[str, Found[M]]:
    """Every record whose key begins with `under`, which ends in a dot; no others are asked for.
    Raises BusError.

    One that nobody can read is left out; `strict`: it raises WireError.
    """
    read = decode if strict else readable
    found = await bus.kv_all(bucket, f"{under}>")
    return {
        key: Found(record, entry.revision)
        for key, entry in found.items()
        if entry.value is not None and (record := read(entry.value, kind)) is not None
    }


async def write_if(
    bus: Bus, bucket: str, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
) -> int:
    """Write if the revision is still `revision` (0: no key), else Conflict; the new one."""
    if revision:
        return await bus.kv_update(bucket, key, value, revision, ttl_s=ttl_s)
    return await bus.kv_create(bucket, key, value, ttl_s=ttl_s)


async def members_of(bus: Bus) -> list[MemberRecord]:
    """Of all living processes, what stands where it says. Raises BusError."""
    found = await records_in(bus, subjects.MEMBERS, MemberRecord)
    return [member for key, (member, _) in found.items() if member.stands_at(key)]


def messages_of(stored: Iterable[Stored], kind: type[M]) -> list[M]:
    """Those of a stream's messages that can be read as a `kind`."""
    return [message for s in stored if (message := readable(s.payload, kind)) is not None]


def readable(data: bytes | None, kind: type[M]) -> M | None:
    """What these bytes say; None where they say nothing, or nothing that can be read."""
    try:
        return None if data is None else decode(data, kind)
    except WireError:
        return None


# --------------------------------------------------------------------------------------------------
# The event log: what people should know. Events are shown, never acted on.

# Longest text of an event: a line or two on a screen.
TEXT_MAX = 500


def stands_at(place: str, said: str) -> None:
    """Raises WireError where a message stands elsewhere than it says: a site with credentials of
    its own may write in its own place alone, and there in anybody's name."""
    if place != said:
        raise WireError(f"of {said}, but it stands at {place}")


def event_now(run: str, kind: str, source: str, text: str, data: dict[str, Any]) -> Event:
    """What has just happened."""
    said, of_programs = sendable(text[:TEXT_MAX]), _sendable(data)
    return Event(run=run, kind=kind, source=source, text=said, data=of_programs, at=ambient.wall())


def _sendable(value: Any) -> Any:
    """The same with every text in it, names of fields included, as a message holds it."""
    match value:
        case str():
            return sendable(value)
        case dict():
            return {_sendable(name): _sendable(each) for name, each in value.items()}
        case list():
            return [_sendable(each) for each in value]
        case tuple():
            return tuple(_sendable(each) for each in value)
    return value


def event_subject(bus: Bus, event: Event, role: str) -> str:
    """Where an event of a process of this role goes."""
    if bus.named and role == "learner":
        return subjects.event_by(event.source)
    return subjects.event(event.run, event.kind)


async def tell(bus: Bus, event: Event, *, role: str = "", timeout_s: float = 5.0) -> None:
    """Write it, in one attempt: nothing depends on it, so a failure is only logged."""
    try:
        subject = event_subject(bus, event, role)
        await bus.append(subject, encode(event), timeout_s=timeout_s)
    except BusError as error:
        log.warning("event not written", kind=event.kind, run=event.run, error=str(error))
