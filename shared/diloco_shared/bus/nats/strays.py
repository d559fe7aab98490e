"""Readers of streams that are none of ours: found, and removed.

Whoever may read a stream has the server keep its place there, a *consumer*, and says for how long,
and where what is stored shall be delivered. Ours deliver what they are asked for, and end a minute
after nobody has asked (pulls.py). One that lasts outlives the credentials it was made with. And one
that delivers sends all that the stream holds to whoever hears that subject, unasked: every site, if
it is one that all sites hear.

The server lists none of those that say they are of a copy of the stream (`direct`). So what it
tells whenever one is made is heard, too; those that were made while nobody heard it stay unknown.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any

import structlog

from diloco_shared.bus.nats.access import CONSUMER_NEWS
from diloco_shared.bus.nats.api import NS_PER_S, ApiRefused, api_call
from diloco_shared.bus.nats.link import NatsLink, Raw
from diloco_shared.bus.nats.pulls import INACTIVE_S
from diloco_shared.bus.port import NoStream, Stray, Sweep
from diloco_shared.protocol import subjects

# Where consumers may deliver: answers of whoever asks, and what the server itself makes of copies
# and sources of a stream. No site hears any of it.
_HARMLESS = ("_INBOX", "$JS.M.", "$JS.S.")
# Pages of a stream's list at a look: ten thousand readers. The next look goes on behind them.
PAGES_MAX = 40
# New ones that are remembered until the next look, some hundred bytes each, and of them those that
# are asked for one by one, because no list had them.
HEARD_MAX, ASKED_MAX = 100_000, 1000
_NO_CONSUMER = 10014

_log = structlog.get_logger(__name__)


def fault(config: dict[str, Any]) -> str:
    """Why a consumer that is set up so is none of ours; "" if it may be."""
    to = str(config.get("deliver_subject") or "")
    if to and not to.startswith(_HARMLESS):
        return f"it delivers to {to[:80]}"
    if config.get("durable_name"):
        return "it lasts for good"
    if config.get("inactive_threshold", 0) > INACTIVE_S * NS_PER_S:
        return f"it lasts longer than {INACTIVE_S} s after nobody reads"
    return ""


class Strays:
    """Of one server or hub, as one connection sees them."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        # (stream, name) of those that were made, and are not known to be gone.
        self._heard: dict[tuple[str, str], None] = {}
        self._from: dict[str, int] = {}  # where the next look at a stream's list begins

    def hear(self, news: Raw) -> None:
        """What the server tells of one consumer. What is stored may be delivered there, too."""
        if not subjects.matches(CONSUMER_NEWS, news.subject):
            return
        what, stream, name = news.subject.split(".")[-3:]
        if what == "CREATED" and len(self._heard) < HEARD_MAX:
            self._heard[stream, name] = None
        elif what == "DELETED":
            self._heard.pop((stream, name), None)

    async def sweep(self, streams: Collection[str]) -> list[Stray]:
        """See `bus.Bus.sweeping`."""
        found: list[Stray] = []
        for stream in streams:
            with suppress(NoStream):
                for stray in await self._listed(stream):
                    await self._remove(stray)
                    found.append(stray)
        return found + await self._unlisted(streams)

    async def _listed(self, stream: str) -> list[Stray]:
        found: list[Stray] = []
        start = self._from.pop(stream, 0)
        for _ in range(PAGES_MAX):
            call, what = f"CONSUMER.LIST.{stream}", f"readers of {stream}"
            answer = await api_call(self._link, call, {"offset": start}, what=what)
            page = answer.get("consumers") or []
            for consumer in page:
                self._heard.pop((stream, consumer["name"]), None)
                if why := fault(consumer["config"]):
                    found.append(Stray(stream, consumer["name"], why))
            start += len(page)
            if not page or start >= answer.get("total", 0):
                return found
        self._from[stream] = start
        return found

    async def _unlisted(self, streams: Collection[str]) -> list[Stray]:
        """Of those whose making was heard, and that no list had: they are removed."""
        found: list[Stray] = []
        for stream, name in [*islice(self._heard, ASKED_MAX)]:
            if stream in streams and (why := await self._fault_of(stream, name)):
                stray = Stray(stream, name, why)
                await self._remove(stray)
                found.append(stray)
            self._heard.pop((stream, name), None)
        return found

    async def _fault_of(self, stream: str, name: str) -> str:
        """ "" for one that is gone, too."""
        call, what = f"CONSUMER.INFO.{stream}.{name}", f"reader {name} of {stream}"
        try:
            return fault((await api_call(self._link, call, {}, what=what))["config"])
        except ApiRefused as error:
            if error.code != _NO_CONSUMER:
                raise
        except NoStream:
            pass
        return ""

    async def _remove(self, stray: Stray) -> None:
        call, what = f"CONSUMER.DELETE.{stray.stream}.{stray.name}", f"reader {stray.name}"
        try:
            await api_call(self._link, call, {}, what=what)
        except ApiRefused as error:
            if error.code != _NO_CONSUMER:
                raise
        _log.warning("a reader was removed", stream=stray.stream, name=stray.name, why=stray.why)


@asynccontextmanager
async def sweeping(link: NatsLink) -> AsyncIterator[Sweep]:
    """See `bus.Bus.sweeping`."""
    strays = Strays(link)
    async with link.subscribed(CONSUMER_NEWS, strays.hear):
        yield strays.sweep
