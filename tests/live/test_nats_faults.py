"""The bus while the server is killed, restarted or stopped: nothing lost, nothing doubled."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from live.gate import connected
from nats.aio.client import Client
from waiting import until

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats import link as nats_link
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import Delivery, KeyEntry, Stored, StreamSpec, Unavailable
from diloco_shared.hub.nats_server import NatsServer

pytestmark = pytest.mark.live

SPEC = StreamSpec("S", ("s.>",), 256 << 20)


async def restart(server: NatsServer) -> None:
    await server.kill()
    await server.start()


async def test_a_blob_under_way_survives_a_kill(nats_server: NatsServer) -> None:
    payload = random.Random(1).randbytes(24 << 20)
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        putting = asyncio.create_task(
            put_blob(bus, "s.blob", payload, chunk_bytes=64 * 1024, chunk_timeout_s=1.0)
        )
        await until(lambda: bus.traffic.messages_out > 100)
        await nats_server.kill()
        assert not putting.done()
        await nats_server.start()
        blob = await putting
        assert (await bus.stream_info("S")).messages == blob.chunks == 384
        assert await get_blob(bus, "S", blob, timeout_s=20) == payload


async def test_a_blob_under_way_survives_a_stopped_server(nats_server: NatsServer) -> None:
    payload = random.Random(2).randbytes(24 << 20)
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        putting = asyncio.create_task(
            put_blob(bus, "s.blob", payload, chunk_bytes=64 * 1024, chunk_timeout_s=1.0)
        )
        await until(lambda: bus.traffic.messages_out > 100)
        nats_server.pause()
        await asyncio.sleep(3.0)
        assert not putting.done()
        nats_server.resume()
        blob = await putting
        assert (await bus.stream_info("S")).messages == blob.chunks
        assert await get_blob(bus, "S", blob, timeout_s=20) == payload


async def test_a_closed_client_ends_although_its_cancellation_is_lost(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `asyncio.wait_for` loses it: nats-py would go on connecting for ever."""
    began, before = asyncio.Event(), asyncio.all_tasks()

    async def loses(self: Client, server: object) -> None:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        raise OSError("refused")

    async with connected(nats_server.url):
        monkeypatch.setattr(Client, "_connect_to_server", loses)
        await nats_server.kill()
        await began.wait()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_connecting_ends_in_time_although_its_cancellation_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A login that is refused at the moment at which time is up: the library goes on."""
    attempts = 0

    async def refused(self: Client, server: object) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > 3:  # ends the test where nothing else does
            raise asyncio.CancelledError
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.3)
        raise OSError("refused")

    monkeypatch.setattr(Client, "_connect_to_server", refused)
    monkeypatch.setattr(nats_link, "_RECONNECT_WAIT_S", 0.0)
    before = asyncio.all_tasks()
    with pytest.raises(Unavailable, match="refused"):
        await NatsBus.connect("nats://127.0.0.1:1", name="late", timeout_s=0.1)
    assert attempts == 1

    connecting = asyncio.create_task(NatsBus.connect("nats://127.0.0.1:1", name="ended"))
    await until(lambda: attempts == 2)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == before


async def test_a_server_that_reads_no_more_is_noticed_and_left(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_link, "_PING_S", 0.3)
    payload = random.Random(3).randbytes(40 << 20)
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        putting = asyncio.create_task(put_blob(bus, "s.blob", payload, chunk_timeout_s=0.5))
        await until(lambda: bus.traffic.messages_out > 30)
        nats_server.pause()
        # The socket's buffers are full now; a close that waits for them would wait for ever.
        await until(lambda: not bus.connected)
        with pytest.raises(Unavailable):
            await bus.append("s.other", b"", timeout_s=0.2)
        await bus.publish("core", b"lost without an error")
        nats_server.resume()
        await until(lambda: bus.connected)
        assert await get_blob(bus, "S", await putting, timeout_s=20) == payload


async def test_a_reader_goes_on_after_restarts_without_loss_or_repeat(
    nats_server: NatsServer,
) -> None:
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_stream(SPEC)
        seen: list[int] = []

        async def follow() -> None:
            async with bus.read("S", "s.*", batch=8) as messages:
                async for message in messages:
                    seen.append(int(message.payload))

        following = asyncio.create_task(follow())
        for number in range(60):
            if number in (20, 40):
                await restart(nats_server)
            await append_surely(other, "s.a", b"%d" % number)
        await until(lambda: len(seen) >= 60)
        assert seen == [*range(60)]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def append_surely(bus: NatsBus, subject: str, payload: bytes) -> None:
    await until(
        lambda: bus.append(subject, payload, msg_id=payload.decode(), timeout_s=1.0),
        tolerated=(Unavailable,),
    )


async def test_the_consumer_of_a_reader_is_replaced_when_the_server_forgets_it(
    nats_server: NatsServer,
) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        async with bus.read("S", "s.a") as messages:
            await bus.append("s.a", b"1")
            assert (await anext(messages)).payload == b"1"
            # As after an R1 server's crash: the stream is there, the consumer is not.
            await bus.delete_stream("S")
            await bus.ensure_stream(SPEC)
            waiting = asyncio.create_task(as_task(messages))
            for number in range(3):
                await bus.append("s.a", b"%d" % number)
            # It had given 1 of the old stream: what has taken its place is another message.
            assert await waiting == Stored("s.a", b"0", {}, 1)
            assert await anext(messages) == Stored("s.a", b"1", {}, 2)


async def as_task(messages: AsyncIterator[Stored]) -> Stored:
    return await anext(messages)


async def test_a_watch_tells_changes_after_a_restart(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_bucket("b")
        await other.kv_put("b", "x", b"1")
        async with bus.kv_watch("b") as changes:
            assert (await anext(changes)).value == b"1"
            await restart(nats_server)
            revision = await other.kv_put("b", "x", b"2")
            assert await anext(changes) == KeyEntry("x", b"2", revision)
            await other.kv_delete("b", "x")
            assert (await anext(changes)).value is None


async def test_a_key_lives_as_long_as_it_is_renewed(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_bucket("b")
        async with other.kv_watch("b") as changes:
            revision = await bus.kv_create("b", "k", b"0", ttl_s=2)
            await bus.kv_put("b", "forever", b"")
            seen = [await anext(changes), await anext(changes)]
            for number in b"123":
                await asyncio.sleep(0.75)
                revision = await bus.kv_update("b", "k", bytes([number]), revision, ttl_s=2)
                seen.append(await anext(changes))
            assert [entry.value for entry in seen] == [b"0", b"", b"1", b"2", b"3"]
            expired = await anext(changes)
            assert (expired.key, expired.value) == ("k", None)
        assert await bus.kv_get("b", "k") is None
        assert list(await bus.kv_all("b")) == ["forever"]
        await other.kv_create("b", "k", b"again")


async def test_a_key_that_expires_while_the_server_is_down_is_told(
    nats_server: NatsServer,
) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_bucket("b")
        async with bus.kv_watch("b") as changes:
            await bus.kv_create("b", "x", b"1", ttl_s=1)
            assert (await anext(changes)).value == b"1"
            await nats_server.kill()
            await asyncio.sleep(1.5)
            await nats_server.start()
            gone = await anext(changes)
            assert (gone.key, gone.value) == ("x", None)


async def test_requests_are_answered_after_a_restart(nats_server: NatsServer) -> None:
    async def echo(request: Delivery) -> bytes:
        return request.payload

    async with (
        connected(nats_server.url) as bus,
        connected(nats_server.url) as other,
        bus.serve("echo", echo),
        bus.subscribe("news") as news,
    ):
        await restart(nats_server)
        await until(lambda: (bus.reconnects, other.reconnects) == (1, 1))
        assert await other.request("echo", b"x", timeout_s=5) == b"x"
        await other.publish("news", b"y")
        assert (await anext(news)).payload == b"y"


async def test_an_error_from_the_server_leads_to_a_reconnect(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        # What nats-py does when the server sends -ERR; by itself it would close for good.
        await bus._link._client._process_err("'maximum connections exceeded'")
        await until(lambda: bus.reconnects == 1)
        assert await bus.append("s.a", b"") == 1
        await bus._link._client._process_err("'Permissions Violation for Publish to \"x\"'")
        assert (bus.connected, bus.reconnects, bus.errors) == (True, 1, 2)


async def test_requests_on_a_lost_connection_fail_at_once(nats_server: NatsServer) -> None:
    async def never(_: Delivery) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with (
        connected(nats_server.url) as bus,
        connected(nats_server.url) as other,
        other.serve("never", never),
    ):
        asking = asyncio.create_task(bus.request("never", b"", timeout_s=100))
        await until(lambda: bool(bus._link._client._resp_map))
        await restart(nats_server)
        with pytest.raises(Unavailable, match="failed: StaleConnectionError"):
            await asking


async def test_what_waited_for_a_server_is_written_to_no_other(nats_server: NatsServer) -> None:
    """Whoever asked has given up; and the next server may be a hub that was put back."""
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        nats_server.pause()
        filling = asyncio.create_task(fill(bus))
        await until(lambda: bus._link._client.pending_data_size > 0)
        filling.cancel()
        with pytest.raises(Unavailable):
            await bus.append("s.late", b"x", timeout_s=1.0)
        await restart(nats_server)
        await until(lambda: bus.reconnects == 1)
        assert await bus.append("s.a", b"") == 1
        assert await bus.last("S", "s.late") is None


async def fill(bus: NatsBus) -> None:
    """The socket, and what waits for it."""
    while True:
        with suppress(Unavailable):
            await bus.publish("nobody", bytes(256 << 10))
        await asyncio.sleep(0.001)


async def test_a_cancelled_put_stops_at_once(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)
        putting = asyncio.create_task(put_blob(bus, "s.blob", bytes(80 << 20)))
        await until(lambda: bus.traffic.messages_out > 30)
        nats_server.pause()
        await asyncio.sleep(0)
        assert not putting.done()
        putting.cancel()
        async with asyncio.timeout(2):
            with pytest.raises(asyncio.CancelledError):
                await putting
        nats_server.resume()


async def test_concurrent_creators_on_two_connections_agree(nats_server: NatsServer) -> None:
    async with connected(nats_server.url) as bus, connected(nats_server.url) as other:
        await bus.ensure_bucket("b")
        for key in map(str, range(20)):
            outcomes = await asyncio.gather(
                bus.kv_create("b", key, b"1"), other.kv_create("b", key, b"2"),
                return_exceptions=True,
            )  # fmt: skip
            winner = await bus.kv_get("b", key)
            assert winner is not None
            won = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, int)]
            assert won == [int(winner.value or b"0") - 1]


async def test_a_task_that_was_cancelled_may_ask_while_it_clears_up(
    nats_server: NatsServer,
) -> None:
    """Its last words, as a learner that is told to stop has them; a second cancellation counts."""
    async with connected(nats_server.url) as bus:
        await bus.ensure_stream(SPEC)

        async def work(asking: asyncio.Event) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                while True:
                    await bus.append("s.last", b"words", msg_id="", timeout_s=10.0)
                    asking.set()

        asking = asyncio.Event()
        task = asyncio.create_task(work(asking))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait(
            {task, asyncio.ensure_future(asking.wait())}, return_when="FIRST_COMPLETED"
        )
        assert asking.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await bus.stream_info("S")).messages >= 1
