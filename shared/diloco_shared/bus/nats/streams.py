"""JetStream over raw requests: streams, appends, direct reads and a reader that resumes.

Raw requests, because nats-py's own helpers hide the outcome of a lost connection, and its ordered
consumers stay blind for seconds after a server restart.
"""

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import structlog

from diloco_shared.bus.nats.access import HUB_API
from diloco_shared.bus.nats.api import (
    API_TIMEOUT_S,
    NO_MESSAGE,
    NS_PER_S,
    PATIENCE_S,
    READ_BYTES_MAX,
    STREAM_NAME_TAKEN,
    ApiRefused,
    api_call,
    kept_at,
    without_server_headers,
)
from diloco_shared.bus.nats.link import NatsLink, Raw
from diloco_shared.bus.nats.pulls import INACTIVE_S
from diloco_shared.bus.nats.purging import matching, purge_at_once, purge_in_slices
from diloco_shared.bus.nats.reader import Reader, ReplyInbox
from diloco_shared.bus.nats.strays import sweeping
from diloco_shared.bus.nats.wire import parse_headers
from diloco_shared.bus.port import (
    BusError,
    Held,
    NoStream,
    Refused,
    StorageInfo,
    Stored,
    StreamFull,
    StreamInfo,
    StreamSpec,
    Sweep,
    Unavailable,
)
from diloco_shared.bus.repeating import pause_after
from diloco_shared.bus.stream_kv import StreamKv

# A repeat under the same message id is dropped within this time; receivers are idempotent anyway.
DUPLICATE_WINDOW_S = 120

# Messages asked for at once, and failures in a row before a fetch is given up.
_FETCH_BATCH = 256
_FETCH_TRIES, _FETCH_PAUSES_S = 3, (0.1, 0.2)
# Headers asked for at once: a hundred bytes each.
_SIZES_BATCH = 4096
# Heads of one payload come for at most so many seconds, as long as they come: measured 16,400 a
# second, those of 258 GB that were stored twice. Less than the silence of 72 s after which whoever
# fetches it gives up (`protocol.pace.silence_s`): behind a slower link he does without.
HEADS_S_MAX = 60.0
# Where everybody has credentials of their own, no reader lasts longer than ours after nobody reads.
# There is no limit to how many there may be: whoever may make one could use it up, and keep all
# others out. Nor to what may wait to be acknowledged: copies of a stream acknowledge nothing, and
# the server would make none.
_CONSUMER_LIMITS = {"inactive_threshold": INACTIVE_S * NS_PER_S}
# A copy that is behind is asked again after so many seconds, and so often: it has 5 s to catch up.
_BEHIND_S, _LOOKS_MAX = 0.05, 100

_log = structlog.get_logger(__name__)


class NatsStreams(StreamKv):
    """Stream and bucket calls on one connection. See `bus.Bus` for what each promises."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link

    @property
    def named(self) -> bool:
        return self._link.api == HUB_API

    @property
    def life(self) -> str:
        return self._link.life

    @property
    def link(self) -> NatsLink:
        """The connection, for what only NATS has."""
        return self._link

    async def ensure(self, config: dict[str, Any]) -> None:
        """Create the stream, or update it where it differs.

        A limit that somebody raised stays, so that a restart does not take room away again, and so
        do copies that somebody added. How a stream persists cannot be changed: one of an earlier
        version keeps its own way.
        """
        name = config["name"]
        if self.named:
            config = config | {"consumer_limits": _CONSUMER_LIMITS}
        try:
            await api_call(
                self._link, f"STREAM.CREATE.{name}", config, what=f"create stream {name}"
            )
        except (ApiRefused, StreamFull) as error:
            if isinstance(error, ApiRefused) and error.code != STREAM_NAME_TAKEN:
                raise
            # Of a stream that is there too, creation wants room for all of its limit once more.
            await self._update(config, error)

    async def _update(self, config: dict[str, Any], why: BusError) -> None:
        """Of a stream that is there; raises `why` when it is not."""
        name = config["name"]
        try:
            info = await api_call(self._link, f"STREAM.INFO.{name}", {}, what=f"stream {name}")
            there = info["config"]
            kept = {k: there[k] for k in ("persist_mode",) if k in there}
            if config.get("max_bytes", -1) > 0 and there.get("max_bytes", -1) > 0:
                kept["max_bytes"] = max(config["max_bytes"], there["max_bytes"])
            copies = there.get("num_replicas", 1)
            if config["num_replicas"] < copies:
                _log.info("it keeps more copies than asked for", stream=name, copies=copies)
                kept["num_replicas"] = copies
            wished = {k: v for k, v in config.items() if k != "persist_mode"} | kept
            try:
                await self._change(wished)
            except ApiRefused:
                if "consumer_limits" not in wished:
                    raise
                # A reader is there that lasts longer. It is removed (strays.py), and must not keep
                # the stream from what it needs meanwhile.
                await self._change(wished | {"consumer_limits": there.get("consumer_limits", {})})
        except NoStream:
            raise why from None

    async def _change(self, config: dict[str, Any]) -> None:
        name = config["name"]
        await api_call(self._link, f"STREAM.UPDATE.{name}", config, what=f"update stream {name}")

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self.ensure(
            {
                "name": spec.name,
                "subjects": list(spec.subjects),
                "retention": "limits",
                "storage": "file",
                "discard": "old" if spec.drop_oldest else "new",
                "max_bytes": spec.bytes_max,
                "max_msgs": -1,
                "max_msgs_per_subject": spec.subject_messages_max or -1,
                "max_msg_size": spec.message_bytes_max or -1,
                "max_consumers": -1,
                "max_age": int(spec.age_s_max * NS_PER_S),
                "num_replicas": spec.replicas,
                "allow_direct": True,
                "duplicate_window": DUPLICATE_WINDOW_S * NS_PER_S,
                # With the server's `sync_interval: always` (hub/nats_server.py) "default" is a
                # sync before each acknowledgement; "async" acknowledges what is in memory. The
                # server has it for a single copy only; and where there are several nodes, nobody
                # would notice that the one with the copy began a new life (`Bus.life`).
                "persist_mode": "async" if self._may_lose(spec) else "default",
            }
        )

    def _may_lose(self, spec: StreamSpec) -> bool:
        return not spec.synced and spec.replicas == 1 and not self._link.several_nodes

    async def delete_stream(self, name: str) -> None:
        with suppress(NoStream):
            await api_call(self._link, f"STREAM.DELETE.{name}", {}, what=f"delete stream {name}")

    async def stream_info(self, stream: str) -> StreamInfo:
        answer = await api_call(self._link, f"STREAM.INFO.{stream}", {}, what=f"stream {stream}")
        state = answer["state"]
        return StreamInfo(
            bytes=state["bytes"],
            messages=state["messages"],
            first_seq=state["first_seq"],
            last_seq=state["last_seq"],
            bytes_max=max(answer["config"].get("max_bytes", 0), 0),
            replicas=max(answer["config"].get("num_replicas", 1), 1),
        )

    async def heads(
        self, stream: str, subject: str, *, messages_max: int, messages_min: int = 1
    ) -> list[Stored]:
        """As `bus.Bus.heads`; after HEADS_S_MAX seconds, what has come until then."""
        there = await self._there(stream, subject)
        found: list[Stored] = []
        if there < max(messages_min, 1):
            return found
        reader = Reader(self._link, stream, subject, 1, _SIZES_BATCH, headers_only=True)
        clock = asyncio.get_running_loop().time
        until = clock() + HEADS_S_MAX
        try:
            async with asyncio.timeout(API_TIMEOUT_S) as limit:
                while len(found) < min(there, messages_max):
                    found.append(without_server_headers(await anext(reader)))
                    limit.reschedule(min(clock() + API_TIMEOUT_S, until))
        except (TimeoutError, StopAsyncIteration):
            pass  # some have gone meanwhile, or the link is slow: whoever asked does without
        finally:
            await reader.close()
        return found

    async def _there(self, stream: str, subject: str) -> int:
        """How many messages match: a reader waits in vain where none does."""
        return (await matching(self._link, stream, subject)).messages

    async def held(
        self,
        stream: str,
        subject: str,
        *,
        messages_max: int,
        start_seq: int = 1,
        below_seq: int | None = None,
    ) -> dict[str, Held]:
        """As `bus.Bus.held`; once nothing comes for API_TIMEOUT_S seconds, what came before.

        A server that does not even say how many there are says nothing: Unavailable.
        """
        found: dict[str, Held] = {}
        reader = Reader(self._link, stream, subject, start_seq, _SIZES_BATCH, headers_only=True)
        try:
            there = await reader.begin()  # each of its requests has a limit of its own
            for _ in range(messages_max if there else 0):
                # What matched may have gone meanwhile.
                async with asyncio.timeout(API_TIMEOUT_S):
                    message = await anext(reader)
                if below_seq is not None and message.seq >= below_seq:
                    break
                held = found.get(message.subject, Held())
                found[message.subject] = held.and_one(reader.stored)
                if not reader.pending:
                    break
        except (TimeoutError, StopAsyncIteration) as error:
            if below_seq is not None:
                raise Unavailable(f"{stream} did not tell of all that it holds") from error
        finally:
            await reader.close()
        return found

    async def storage(self) -> StorageInfo:
        answer = await api_call(self._link, "INFO", {}, what="storage")
        return StorageInfo(
            bytes=answer["storage"],
            reserved=answer["reserved_storage"],
            bytes_max=max(answer["limits"].get("max_storage", 0), 0),
        )

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[Sweep]:
        async with sweeping(self._link) as sweep:
            yield sweep

    async def append(
        self,
        subject: str,
        payload: bytes,
        *,
        headers: dict[str, str] | None = None,
        msg_id: str | None = None,
        expect_last: int | None = None,
        timeout_s: float = 5.0,
    ) -> int:
        head = dict(headers or {})
        if msg_id is not None:
            head["Nats-Msg-Id"] = self._link.message_id(msg_id)
        if expect_last is not None:
            head["Nats-Expected-Last-Subject-Sequence"] = str(expect_last)
            if self._link.several_nodes:
                timeout_s = min(timeout_s, PATIENCE_S)
        reply = await self._link.request(
            subject, payload, timeout_s=timeout_s, headers=head or None
        )
        return kept_at(self._link, reply.payload, f"append on {subject}")

    async def last(self, stream: str, subject: str) -> Stored | None:
        raw = await self.last_raw(stream, subject)
        return None if raw is None else without_server_headers(raw)

    async def last_raw(self, stream: str, subject: str) -> Stored | None:
        """Newest message with the server's own headers; asks the stream's leader."""
        try:
            answer = await api_call(
                self._link,
                f"STREAM.MSG.GET.{stream}",
                {"last_by_subj": subject},
                what=f"last of {subject}",
            )
        except ApiRefused as error:
            if error.code == NO_MESSAGE:
                return None
            raise
        message = answer["message"]
        headers = parse_headers(base64.b64decode(message.get("hdrs", "")))
        payload = base64.b64decode(message.get("data", ""))
        return Stored(message["subject"], payload, headers, message["seq"])

    async def purge(self, stream: str, subject: str, *, below_seq: int | None = None) -> int:
        """As `bus.Bus.purge`; at or below 1 nothing is asked: to the server that would mean all."""
        if below_seq is not None and below_seq <= 1:
            return 0  # nothing is; and to the server 0 and 1 say that everything may go
        if subject == ">":  # whole blocks of its files are dropped, and nothing is read
            which = {} if below_seq is None else {"seq": below_seq}
            return await purge_at_once(self._link, stream, subject, **which)

        def held(most: int, below: int) -> Awaitable[dict[str, Held]]:
            return self.held(stream, subject, messages_max=most, below_seq=below)

        return await purge_in_slices(self._link, stream, subject, below_seq, held)

    async def fetch(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        found = await self.fetch_raw(stream, subject, start_seq=start_seq, limit=limit)
        return [without_server_headers(message) for message in found]

    async def fetch_raw(
        self, stream: str, subject: str, *, start_seq: int = 1, limit: int | None = None
    ) -> list[Stored]:
        """Direct-get batches until nothing is pending, with the server's own headers.

        Any copy of a stream answers them. One that is behind does not end the reading; nor does
        what is stored meanwhile prolong it.
        """
        found: list[Stored] = []
        failures, looks, end = 0, 0, math.inf
        while limit is None or len(found) < limit:
            seq = found[-1].seq + 1 if found else max(1, start_seq)
            want = _FETCH_BATCH if limit is None else min(_FETCH_BATCH, limit - len(found))
            before = len(found)
            try:
                if not await self._direct(stream, subject, seq, want, found):
                    # What was the newest may be gone by now, so it is asked for again.
                    end = min(end, await self._newest(stream, subject))
                    if (found[-1].seq if found else seq - 1) >= end:
                        break
                    looks += 1
                    if looks == _LOOKS_MAX:
                        raise Unavailable(f"reading {subject} from {stream}: a copy is far behind")
                    await asyncio.sleep(_BEHIND_S)
                failures = 0
            except Unavailable:
                # What came before the trouble stays.
                failures = 1 if len(found) > before else failures + 1
                if failures == _FETCH_TRIES:
                    raise
                await asyncio.sleep(pause_after(failures, _FETCH_PAUSES_S))
        return found

    async def _newest(self, stream: str, subject: str) -> int:
        """Sequence of the newest one that the copy that leads has; 0 where there are no others."""
        newest = await self.last_raw(stream, subject) if self._link.several_nodes else None
        return 0 if newest is None else newest.seq

    async def _direct(
        self, stream: str, subject: str, seq: int, want: int, found: list[Stored]
    ) -> bool:
        """Append up to `want` messages from `seq` on to `found`; whether there are more."""
        inbox = ReplyInbox()
        body = {
            "seq": seq,
            "next_by_subj": subject,
            "batch": want,
            "max_bytes": READ_BYTES_MAX,
        }
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._link.on_reconnect(inbox.wake))
            reply = await stack.enter_async_context(
                self._link.subscribed(self._link.new_inbox(), inbox.put)
            )
            await self._link.publish(
                f"{self._link.api}.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=reply
            )
            while True:
                message = await inbox.get(PATIENCE_S if self._link.several_nodes else API_TIMEOUT_S)
                if message is None:
                    raise Unavailable(f"reading {subject} from {stream}: no answer")
                if "Nats-Sequence" in message.headers:  # whatever else whoever stored it says
                    found.append(_direct_message(message))
                    continue
                match message.status:
                    case 404:
                        return False
                    case 204:
                        return int(message.headers.get("Nats-Num-Pending", "0")) > 0
                    case 503:
                        raise Unavailable(
                            f"reading {subject}: there is no stream {stream}, or no server"
                        )
                    case status:
                        raise Refused(f"reading {subject} from {stream}: status {status}")

    @asynccontextmanager
    async def read(
        self, stream: str, subject: str, *, start_seq: int = 1, batch: int = 64
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        reader = Reader(self._link, stream, subject, start_seq, batch, plain=True)
        try:
            yield reader
        finally:
            await reader.close()

    @asynccontextmanager
    async def read_raw(
        self, stream: str, subject: str, *, start_seq: int
    ) -> AsyncIterator[AsyncIterator[Stored]]:
        """`read` with the server's own headers."""
        reader = Reader(self._link, stream, subject, start_seq, 64)
        try:
            yield reader
        finally:
            await reader.close()


def _direct_message(raw: Raw) -> Stored:
    seq = int(raw.headers["Nats-Sequence"])
    return Stored(raw.headers["Nats-Subject"], raw.payload, raw.headers, seq)
