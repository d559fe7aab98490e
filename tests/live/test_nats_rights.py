"""Rights on a real nats-server: what an identity may, what a stolen one cannot, and how it ends."""

import asyncio
import json
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from live.hubs import Hub, a_hub, serving
from shared.bus.test_rights import ALL, HEARD, PUBLISHED
from waiting import until

from diloco_cli.up.stack import free_port
from diloco_coordinator.runs import events
from diloco_coordinator.runs.registry_io import events_stream
from diloco_shared.bus.blobs import GaveUp, get_blob, put_blob
from diloco_shared.bus.deliveries import Deliveries
from diloco_shared.bus.nats import backups
from diloco_shared.bus.nats.api import api_call
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.keys import Credentials, read_credentials
from diloco_shared.bus.nats.rights import Identity
from diloco_shared.bus.port import BusError, Delivery, Refused, Unavailable
from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.bus.stream_kv import VALUE_BYTES_MAX
from diloco_shared.checking import check
from diloco_shared.hub import backup as hub_backup
from diloco_shared.hub import folder as hub_folder
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.chunks import cut
from diloco_shared.protocol.messages import TapeEpoch, TapeTerm
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import decode_tape, encode
from diloco_shared.spec.run import written

pytestmark = pytest.mark.live

PAYLOAD = os.urandom(3 << 20)
# At the hub itself, and behind a message server of the site's own, which is as little trusted.
LEAF = pytest.mark.parametrize("leaf", ["", "oslo"], ids=["", "leaf"])


# --------------------------------------------------------------------------------------------------
# What is allowed.


async def refused(bus: NatsBus, kind: str, subject: str) -> bool:
    """Whether the server says that this identity may not do that."""
    before = bus.errors
    if kind == "publish":
        await bus.publish(subject, b"")
        await bus._link.flush(20)
    else:
        async with bus._link.subscribed(subject, lambda _: None):
            await bus._link.flush(20)
    return bus.errors > before


@pytest.mark.parametrize("who", ALL, ids=[i.name for i in ALL])
async def test_the_server_keeps_the_table(who: Identity, tmp_path: Path) -> None:
    async with a_hub(tmp_path / "hub") as hub:
        if who.name != "reader":  # that one is there from the start
            hub_folder.add(hub.folder, who.name, who.role, who.members)
            await hub.reload()
        wrong = []
        async with hub.bus(who.name) as bus:
            for kind, table in (("publish", PUBLISHED), ("subscribe", HEARD)):
                for subject, allowed in table:
                    if await refused(bus, kind, subject) == (who in allowed):
                        wrong.append((kind, subject))
        assert wrong == []


async def test_the_coordinator_takes_a_backup_and_a_hub_has_it_again(tmp_path: Path) -> None:
    """Of the account that its streams are in; a site may take none."""
    term = TapeTerm(epoch=3, term=7, leader="s", at=1.0)
    spec = check({"name": "r", "budget": {"steps": 8}})
    record = RunRecord(name="r", spec=written(spec), desired="running", quorum=1, created_at=1.0)
    async with a_hub(tmp_path / "hub", "oslo") as hub:
        async with hub.bus("syncer-a") as syncer:
            await syncer.append(s.tape("r", 0), encode(term))
        async with hub.bus("oslo") as oslo:
            with pytest.raises(BusError):
                await hub_backup.take(backups.ServerStreams(oslo), tmp_path / "stolen")
        async with hub.bus("coordinator") as bus:
            await bus.kv_put(s.RUNS, "r", encode(record))
            taken = await hub_backup.take(backups.ServerStreams(bus), tmp_path / "backup")
    assert {"TAPE-r", "KV_tokens", "KV_members"} <= {stream.name for stream in taken.streams}

    async with (
        a_hub(tmp_path / "new", backup=tmp_path / "backup") as hub,
        hub.bus("coordinator") as bus,
    ):
        found = [decode_tape(m.payload) for m in await bus.fetch("TAPE-r", s.tape("r", 0))]
        assert await bus.kv_get(s.RUNS, "r") is not None
        assert await backups.streams_of(bus.link) == sorted(x.name for x in taken.streams)
    assert found[0] == term
    assert isinstance(found[1], TapeEpoch)
    assert found[1].epoch >= 3 + hub_backup.AHEAD and found[1].term >= 7 + hub_backup.AHEAD


async def until_heard(sender: NatsBus, subject: str, heard: Deliveries) -> None:
    """Behind a leaf it takes a moment until the hub knows that somebody listens: say it again."""

    async def said() -> bool:
        await sender.publish(subject, b"this")
        found = await asyncio.wait_for(anext(heard), 0.5)
        return (found.subject, found.payload) == (subject, b"this")

    await until(said, subject, tolerated=(TimeoutError,))


@LEAF
async def test_a_site_does_all_its_work_through_its_account(tmp_path: Path, leaf: str) -> None:
    async with a_hub(tmp_path / "hub", "oslo", leaf=leaf) as hub, AsyncExitStack() as stack:
        oslo = await stack.enter_async_context(hub.bus("oslo"))
        syncer = await stack.enter_async_context(hub.bus("syncer-a"))
        for sender, receiver, stream, subject in (
            (oslo, syncer, "UP-r", s.contribution("r", "oslo", 0, 0, 0, 0)),
            (syncer, oslo, "DN-r", s.publication("r", 0, 0, 0, 0)),
        ):
            blob = await put_blob(sender, subject, PAYLOAD, chunk_bytes=256 << 10)
            assert bytes(await get_blob(receiver, stream, blob)) == PAYLOAD
            await sender.append(subject + ".m", b"manifest")
            async with receiver.read(stream, subject + ".m") as messages:
                assert (await anext(messages)).payload == b"manifest"
            assert await receiver.last(stream, subject + ".m") is not None
            assert len(await receiver.fetch(stream, subject)) == blob.chunks
        await ensure_buckets(oslo)
        key = s.member_key("oslo", "learner", named=oslo.named)
        revision = await oslo.kv_create(s.MEMBERS, key, b"1", ttl_s=60)
        async with oslo.kv_watch(s.MEMBERS, key) as entries:
            assert (await anext(entries)).value == b"1"
            await oslo.kv_update(s.MEMBERS, key, b"2", revision)
            assert (await anext(entries)).value == b"2"
        await oslo.kv_delete(s.MEMBERS, key)
        assert await oslo.kv_all(s.MEMBERS) == {}
        async with oslo.subscribe(s.grant("r", "oslo")) as grants:
            await until_heard(syncer, s.grant("r", "oslo"), grants)
        async with syncer.subscribe(s.progress("r", "*")) as reports:
            await until_heard(oslo, s.progress("r", "oslo"), reports)
        assert (oslo.errors, syncer.errors) == (0, 0)


async def answer(_: Delivery) -> bytes:
    return b"suffered"


@LEAF
async def test_a_site_answers_the_hub_and_a_syncer_a_site(tmp_path: Path, leaf: str) -> None:
    async with a_hub(tmp_path / "hub", "oslo", leaf=leaf) as hub, AsyncExitStack() as stack:
        oslo = await stack.enter_async_context(hub.bus("oslo"))
        syncer = await stack.enter_async_context(hub.bus("syncer-a"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        for asked, asker, subject in (
            (oslo, coordinator, s.chaos("oslo")),
            (syncer, coordinator, s.chaos("syncer-a")),
            (syncer, oslo, s.forget_state("r", "oslo")),
        ):
            async with asked.serve(subject, answer):
                # Behind a leaf it takes a moment until the hub knows that somebody listens.
                answered = partial(asker.request, subject, b"", timeout_s=1)
                found = await until(answered, "an answer", tolerated=(Unavailable,))
                assert found == b"suffered"
        assert (oslo.errors, syncer.errors, coordinator.errors) == (0, 0, 0)


# --------------------------------------------------------------------------------------------------
# What a stolen learner's credential cannot do.


@LEAF
async def test_a_site_writes_in_no_other_name_and_nowhere_else(tmp_path: Path, leaf: str) -> None:
    async with a_hub(tmp_path / "hub", "oslo", "rome", leaf=leaf) as hub, hub.bus("oslo") as thief:
        for subject in (
            "KV.tokens.mine",
            "$KV.tokens.mine",
            "KV.runs.r",
            "KV.assignments.rome",
            "KV.shards.r.7",
            "KV.members.oslo",  # where it could say that it is a syncer
            "KV.members.LEARNER.rome",
            "KV.incarnations.r.oslo",
            s.event("r", "join"),
            s.event_by("rome"),
            s.tape("r", 0),
            s.contribution("r", "rome", 0, 0, 0, 0),
            s.publication("r", 0, 0, 0, 0),
        ):
            with pytest.raises(Unavailable):
                await thief.append(subject, b"forged", timeout_s=0.3)
        for target in ("rome", "nats", "syncer-a"):
            with pytest.raises(Unavailable):
                await thief.request(s.chaos(target), b"", timeout_s=0.3)
        async with hub.bus("coordinator") as bus:
            assert await bus.kv_all(s.TOKENS) == await bus.kv_all(s.RUNS) == {}
            for kind in s.STREAM_KINDS:
                assert (await bus.stream_info(s.run_stream("r", kind))).messages == 0


async def test_a_site_has_no_message_of_another_left_out(tmp_path: Path) -> None:
    """A stream takes an id once, on whichever subject: what one site may write as another would."""
    theirs = s.contribution("r", "rome", 0, 0, 0, 0)
    digest = cut(theirs, PAYLOAD).blob.digest
    ids = [theirs, f"{theirs}.m", f"{theirs}.m/1", f"{theirs}.m/{digest}"]
    ids += [f"{sent}{theirs}/{digest}/{n}" for n in range(9) for sent in ("", "1/", "2/", "3/")]
    async with a_hub(tmp_path / "hub", "oslo", "rome") as hub, AsyncExitStack() as stack:
        thief = await stack.enter_async_context(hub.bus("oslo"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        own = s.contribution("r", "oslo", 0, 0, 0, 0)
        for name in ids:
            await thief.append(own, b"", headers={"Nats-Msg-Id": name})
            await thief.append(own, b"", msg_id=name)
        blob = await put_blob(rome, theirs, PAYLOAD, deadline_s=20)
        for _ in range(2):
            stored = await rome.append(f"{theirs}.m", b"there", msg_id=f"{theirs}.m/1")
        async with hub.bus("syncer-a") as syncer:
            assert bytes(await get_blob(syncer, "UP-r", blob, timeout_s=20)) == PAYLOAD
            (manifest,) = await syncer.fetch("UP-r", f"{theirs}.m")
        assert (manifest.payload, manifest.seq) == (b"there", stored), "a repeat is left out"


@LEAF
async def test_a_sites_answers_lead_nowhere_but_back(tmp_path: Path, leaf: str) -> None:
    """Every request names where its answer goes, and the server writes it there unasked."""
    async with a_hub(tmp_path / "hub", "oslo", "rome", leaf=leaf) as hub, AsyncExitStack() as stack:
        thief = await stack.enter_async_context(hub.bus("oslo"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        beats = await stack.enter_async_context(rome.subscribe(s.beat("r")))
        subject = s.contribution("r", "oslo", 0, 0, 0, 0)
        await thief.append(subject, b"forged")
        wish = json.dumps({"last_by_subj": subject}).encode()
        consumer = {"name": "c", "deliver_policy": "all", "ack_policy": "none"}
        made = {"stream_name": "UP-r", "config": consumer | {"mem_storage": True}}
        await api_call(thief._link, "CONSUMER.CREATE.UP-r.c", made, what="consumer")
        for target in ("$KV.tokens.mine", "KV.runs.r", s.tape("r", 0), s.beat("r")):
            for asked, body in (
                (subject, b"forged"),
                ("$JS.hub.API.DIRECT.GET.UP-r", wish),
                ("$JS.hub.API.STREAM.MSG.GET.UP-r", wish),
                ("$JS.hub.API.CONSUMER.MSG.NEXT.UP-r.c", b"1"),
            ):
                await thief._link.publish(asked, body, reply=target)
        await thief._link.flush(20)
        await coordinator.publish(s.event("r", "x"), b"")  # whatever came before has come

        async def stored() -> bool:
            return (await coordinator.stream_info("UP-r")).messages == 5

        # The server stores in its own time what nobody waits for.
        await until(stored, "all five that the site may store")
        assert await coordinator.kv_all(s.TOKENS) == await coordinator.kv_all(s.RUNS) == {}
        assert (await coordinator.stream_info("TAPE-r")).messages == 0
        async with hub.bus("syncer-a") as syncer:
            await syncer.publish(s.beat("r"), b"true")
            assert (await anext(beats)).payload == b"true"


@LEAF
async def test_a_sites_consumers_deliver_nothing_that_anybody_takes(
    tmp_path: Path, leaf: str
) -> None:
    async with a_hub(tmp_path / "hub", "oslo", "rome", leaf=leaf) as hub, AsyncExitStack() as stack:
        thief = await stack.enter_async_context(hub.bus("oslo"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        beats = await stack.enter_async_context(rome.subscribe(s.beat("r")))
        faults: list[Delivery] = []

        async def suffer(request: Delivery) -> bytes:
            faults.append(request)
            return b""

        await stack.enter_async_context(rome.serve(s.chaos("rome"), suffer))
        await coordinator.append(s.event("r", "x"), b"there")
        await thief.append(s.contribution("r", "oslo", 0, 0, 0, 0), b"forged")
        targets = (
            s.beat("r"),
            s.chaos("rome"),
            s.tape("r", 0),
            "$KV.tokens.mine",
            "$JS.API.STREAM.PURGE.EVENTS",
        )
        for number, target in enumerate(targets):
            config = {"name": f"p{number}", "ack_policy": "none", "deliver_subject": target}
            body = {"stream_name": "UP-r", "config": config | {"deliver_policy": "all"}}
            await api_call(thief._link, f"CONSUMER.CREATE.UP-r.p{number}", body, what="consumer")
        # Those that somebody listens for come, under the subject of what was stored, and are left.
        await until(lambda: rome.traffic.refused["message", "subject"] >= 2, "what is left out")
        async with hub.bus("syncer-a") as syncer:
            await syncer.publish(s.beat("r"), b"true")
            assert (await anext(beats)).payload == b"true"
        assert faults == []
        assert await coordinator.kv_all(s.TOKENS) == {}
        assert (await coordinator.stream_info("TAPE-r")).messages == 0
        assert (await coordinator.stream_info(s.EVENTS_STREAM)).messages == 1


@LEAF
async def test_a_site_removes_nobodys_places_by_a_header(tmp_path: Path, leaf: str) -> None:
    async with a_hub(tmp_path / "hub", "oslo", leaf=leaf) as hub, AsyncExitStack() as stack:
        thief = await stack.enter_async_context(hub.bus("oslo"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        for bucket, theirs, own in (
            (s.INCARNATIONS, "ANY.rome", "ANY.oslo"),
            (s.MEMBERS, "LEARNER.rome", "LEARNER.oslo"),
        ):
            await coordinator.kv_put(bucket, theirs, b"there")
            for reach in ("all", "sub"):
                with pytest.raises(Refused, match="rollup"):
                    await thief.append(f"KV.{bucket}.{own}", b"", headers={"Nats-Rollup": reach})
            assert set(await coordinator.kv_all(bucket)) == {theirs}


async def test_a_member_that_falls_silent_is_missed_without_a_marker(tmp_path: Path) -> None:
    """The server writes markers only where a header may remove keys."""
    async with a_hub(tmp_path / "hub", "oslo") as hub, AsyncExitStack() as stack:
        oslo = await stack.enter_async_context(hub.bus("oslo"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        key = s.member_key("oslo", "learner", named=True)
        await oslo.kv_create(s.MEMBERS, key, b"1", ttl_s=1)
        async with coordinator.kv_watch(s.MEMBERS) as entries:
            assert (await anext(entries)).value == b"1"
            gone = await anext(entries)
            assert (gone.key, gone.value) == (key, None)
        await oslo.kv_create(s.MEMBERS, key, b"2", ttl_s=60)  # and comes back


async def test_what_a_site_stores_under_its_names_is_bounded(tmp_path: Path) -> None:
    async with a_hub(tmp_path / "hub", "oslo") as hub, AsyncExitStack() as stack:
        thief = await stack.enter_async_context(hub.bus("oslo"))
        coordinator = await stack.enter_async_context(hub.bus("coordinator"))
        await coordinator.ensure_stream(events_stream(named=True))
        await coordinator.append(s.event("r", "join"), b"of the hub")
        for subject, most in (
            ("KV.members.LEARNER.oslo", VALUE_BYTES_MAX),
            ("KV.incarnations.ANY.oslo", VALUE_BYTES_MAX),
            (s.event_by("oslo"), events.EVENT_BYTES_MAX),
        ):
            with pytest.raises(Refused, match="maximum"):
                await thief.append(subject, bytes(most + 1))
        for _ in range(events.BY_ONE_MAX + 5):
            await thief.publish(s.event_by("oslo"), b"flood")
        await thief.append(s.event_by("oslo"), b"last")
        info = await coordinator.stream_info(s.EVENTS_STREAM)
        assert info.messages == events.BY_ONE_MAX + 1
        assert await coordinator.last(s.EVENTS_STREAM, s.event("r", "join")) is not None


# --------------------------------------------------------------------------------------------------
# Who comes, goes and changes while the server runs.


async def test_a_revoked_site_is_cut_off_and_nobody_else(tmp_path: Path) -> None:
    async with a_hub(tmp_path / "hub", "oslo", "rome") as hub, AsyncExitStack() as stack:
        oslo = await stack.enter_async_context(hub.bus("oslo"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        syncer = await stack.enter_async_context(hub.bus("syncer-a"))
        for bus, name in ((oslo, "oslo"), (rome, "rome")):
            await put_blob(bus, s.contribution("r", name, 0, 0, 0, 0), PAYLOAD)  # opens lanes
        kept = tmp_path / "stolen"
        kept.write_bytes(hub.file("oslo").read_bytes())
        hub_folder.revoke(hub.folder, "oslo")
        await hub.reload()
        await until(lambda: not oslo.connected, "the end of its connection")
        with pytest.raises(GaveUp):
            await put_blob(oslo, s.contribution("r", "oslo", 0, 0, 1, 0), PAYLOAD, deadline_s=1)
        with pytest.raises(Unavailable, match="Authorization"):
            await NatsBus.connect(hub.url, name="again", credentials=kept, timeout_s=1)
        await put_blob(rome, s.contribution("r", "rome", 0, 0, 1, 0), PAYLOAD)
        await syncer.append(s.tape("r", 0), b"record")
        assert (rome.reconnects, syncer.reconnects, rome.connected) == (0, 0, True)


async def test_a_site_that_comes_is_served_and_a_running_one_takes_its_new_key(
    tmp_path: Path,
) -> None:
    async with a_hub(tmp_path / "hub", "rome") as hub, hub.bus("rome") as rome:
        hub_folder.add(hub.folder, "oslo", "learner", ("oslo-1", "oslo-2"))
        await hub.reload()
        mine, old = tmp_path / "mine", hub.file("oslo").read_bytes()
        mine.write_bytes(old)
        async with hub.bus("oslo", mine) as oslo:
            # The server acts on what it was told a moment after it was told.
            await until(lambda: oslo.append("up.r.oslo-2.0.0.0.0", b""), tolerated=(Unavailable,))
            assert hub_folder.rotate(hub.folder, "oslo") == hub.file("oslo")
            await hub.reload()
            await oslo.append("up.r.oslo-2.0.0.1.0", b"")
            assert oslo.reconnects == 0  # until it has the new one the old one is good
            mine.write_bytes(hub.file("oslo").read_bytes())
            hub_folder.retire(hub.folder, "oslo")
            await hub.reload()
            await until(lambda: oslo.reconnects > 0, "a connection with the new key")
            await oslo.append("up.r.oslo-2.0.0.2.0", b"")
            await put_blob(oslo, "up.r.oslo-1.0.0.2.0", PAYLOAD)
        (tmp_path / "old").write_bytes(old)
        with pytest.raises(Unavailable, match="Authorization"):
            await NatsBus.connect(hub.url, name="oslo", credentials=tmp_path / "old", timeout_s=1)
        assert rome.reconnects == 0


@LEAF
async def test_a_site_that_is_there_gets_another_learner_and_loses_one(
    tmp_path: Path, leaf: str
) -> None:
    """The connections of its learners stay, and so does its secret."""
    first, second = (s.contribution("r", f"oslo{n}", 0, 0, 0, 0) for n in ("", "-2"))
    async with a_hub(tmp_path / "hub", "oslo", "rome", leaf=leaf) as hub, AsyncExitStack() as stack:
        oslo = await stack.enter_async_context(hub.bus("oslo"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        hub_s = await stack.enter_async_context(hub.bus("coordinator"))
        with pytest.raises((Unavailable, Refused)):
            await oslo.append(second, b"", timeout_s=1)
        secret = hub.file("oslo").read_bytes()
        hub_folder.change_learners(hub.folder, "oslo", added=("oslo-2",))
        await hub.reload()

        async def taken(subject: str) -> bool:
            await oslo.append(subject, b"", timeout_s=1)
            return True

        for subject in (second, first):
            await until(partial(taken, subject), "its rights", tolerated=(BusError,))
        chaos = s.chaos("oslo-2")
        async with oslo.subscribe(chaos) as faults:
            await until_heard(hub_s, chaos, faults)
        hub_folder.change_learners(hub.folder, "oslo", removed=("oslo",))
        await hub.reload()
        await until(partial(taken, second), "the learner that is left", tolerated=(BusError,))
        with pytest.raises((Unavailable, Refused)):
            await oslo.append(first, b"", timeout_s=1)
        assert hub.file("oslo").read_bytes() == secret
        assert (oslo.reconnects, rome.reconnects, rome.connected) == (0, 0, True)


async def test_a_file_that_is_being_replaced_is_read_again(tmp_path: Path) -> None:
    async with a_hub(tmp_path / "hub", "oslo") as hub:
        mine = tmp_path / "mine"
        good = hub.file("oslo").read_bytes()
        mine.write_bytes(good)
        async with hub.bus("oslo", mine) as oslo:
            mine.write_text("{")
            oslo._link._client.drop_socket()
            await until(lambda: oslo.reconnects == 1, "a connection with the key it knows")
            await oslo.append("up.r.oslo.0.0.0.0", b"")
            with pytest.raises(GaveUp, match=f"{mine} is not one"):
                await put_blob(oslo, "up.r.oslo.0.0.1.0", PAYLOAD, deadline_s=1)
            mine.write_bytes(good)
            await put_blob(oslo, "up.r.oslo.0.0.2.0", PAYLOAD)


async def test_who_has_no_credentials_or_unknown_ones_is_told_so(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.write_text(Credentials.new("oslo").document())
    async with a_hub(tmp_path / "hub", "oslo") as hub:
        for given in ({}, {"token": "secret"}, {"credentials": stranger}):
            with pytest.raises(Unavailable, match="Authorization") as error:
                await NatsBus.connect(hub.url, name="x", timeout_s=1, **given)  # type: ignore[arg-type]
            assert "secret" not in str(error.value)
        with pytest.raises(BusError, match="cannot be read"):
            await NatsBus.connect(hub.url, name="x", credentials=tmp_path / "none")


async def test_a_server_that_cannot_read_the_change_is_not_said_to_know_it(tmp_path: Path) -> None:
    """Else somebody who is revoked would stay in, and the operator would believe otherwise."""
    hub, (own, monitor) = tmp_path / "hub", (free_port(0), free_port(0))
    told = {"listen": f"127.0.0.1:{own}", "monitor": f"127.0.0.1:{monitor}"}
    hub_folder.create(hub, store=tmp_path / "store", **told)
    async with serving(hub):
        hub_folder.add(hub, "oslo", "learner")
        assert await asyncio.to_thread(hub_folder.reload, hub, between_s=0.2) == ""
        with (hub / hub_folder.CONFIG).open("a") as config:
            config.write("a mistake {")
        hub_folder.revoke(hub, "oslo")
        rest = await asyncio.to_thread(hub_folder.reload, hub, between_s=0.2)
        assert f"the message server of {hub} goes on with what it knew before" in rest


def test_without_a_server_at_hand_it_is_said_how_to_reload(tmp_path: Path) -> None:
    hub_folder.create(tmp_path / "hub", listen="127.0.0.1:-1", store=tmp_path / "store")
    assert "nats-server --signal reload=PID" in hub_folder.reload(tmp_path / "hub")
    (tmp_path / "hub" / "nats-server.pid").write_text(str(os.getpid()))  # of something else by now
    assert "nats-server --signal reload=PID" in hub_folder.reload(tmp_path / "hub")


async def test_a_site_has_so_many_connections_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_shared.bus.nats.hub_config.CONNECTIONS_MAX", 3)
    async with a_hub(tmp_path / "hub", "oslo", "rome") as hub, AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(hub.bus("oslo"))
        with pytest.raises(Unavailable, match="maximum account active connections"):
            await NatsBus.connect(hub.url, name="oslo", credentials=hub.file("oslo"), timeout_s=2)
        rome = await stack.enter_async_context(hub.bus("rome"))
        assert (await rome.stream_info("UP-r")).messages == 0


# --------------------------------------------------------------------------------------------------
# Behind a message server of the site's own.


async def test_who_speaks_as_a_message_server_has_the_rights_of_its_site(tmp_path: Path) -> None:
    """A server that the site has written itself keeps to no rules; the hub does."""
    async with a_hub(tmp_path / "hub", "oslo", leaf="oslo") as hub:
        async with hub.bus("coordinator") as bus:
            await bus.kv_put(s.TOKENS, "anna", b"secret")
            await bus.kv_put(s.RUNS, "r", b"a run")
        for subject, body in (
            ("$JS.hub.API.STREAM.MSG.GET.KV_tokens", b'{"last_by_subj":"$KV.tokens.anna"}'),
            ("$JS.hub.API.STREAM.PURGE.UP-r", b""),
            ("$JS.API.STREAM.PURGE.UP-r", b""),
            ("KV.runs.r", b"forged"),
            ("$KV.runs.r", b"forged"),
            (s.contribution("r", "rome", 0, 0, 0, 0), b"forged"),
            (s.tape("r", 0), b"forged"),
        ):
            assert b"Permissions Violation" in await spoken(hub, subject, body)
        allowed = b'{"last_by_subj":"$KV.runs.r"}'
        assert b"YSBydW4=" in await spoken(hub, "$JS.hub.API.STREAM.MSG.GET.KV_runs", allowed)
        async with hub.bus("coordinator") as bus:
            (run,) = (await bus.kv_all(s.RUNS)).values()
            assert run.value == b"a run"


async def spoken(hub: Hub, subject: str, body: bytes) -> bytes:
    """What the hub answers to a message from somebody who speaks as site oslo's message server."""
    who = read_credentials(hub.file("oslo"))
    reader, writer = await asyncio.open_connection("127.0.0.1", hub.leaf_port)
    try:
        said = json.loads((await reader.readline()).removeprefix(b"INFO "))
        told = who.login(said) | {"server_id": "N", "name": "mine", "version": said["version"]}
        writer.write(b"CONNECT " + json.dumps(told | {"headers": True}).encode() + b"\r\nPING\r\n")
        await reader.readuntil(b"PONG\r\n")
        inbox = f"{who.inbox}.mine"
        writer.write(f"LS+ {inbox}\r\nLMSG {subject} {inbox} {len(body)}\r\n".encode() + body)
        writer.write(b"\r\n")
        answer = b""
        while b"Violation" not in answer and b'"message"' not in answer:
            answer += await asyncio.wait_for(reader.read(1 << 16), timeout=10)
        return answer
    finally:
        writer.transport.abort()


async def test_a_leaf_is_cut_off_with_its_site_and_let_in_with_it(tmp_path: Path) -> None:
    async with (
        a_hub(tmp_path / "hub", "oslo", leaf="oslo") as hub,
        hub.bus("oslo") as oslo,
        AsyncExitStack() as stack,
    ):
        subject = s.contribution("r", "oslo", 0, 0, 0, 0)
        await oslo.append(subject, b"1")
        key = read_credentials(hub.file("oslo")).public_key
        beats = await stack.enter_async_context(oslo.subscribe(s.beat("r")))
        syncer = await stack.enter_async_context(hub.bus("syncer-a"))

        await until_heard(syncer, s.beat("r"), beats)
        hub_folder.revoke(hub.folder, "oslo")
        await hub.reload()
        with pytest.raises(Unavailable):
            await oslo.append(subject, b"2", timeout_s=3)
        await syncer.publish(s.beat("r"), b"after")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                while (await anext(beats)).payload != b"after":
                    pass
        hub_folder.add(hub.folder, "oslo", "learner", public_key=key)
        await hub.reload()

        async def let_in() -> bool:
            await oslo.append(subject, b"3", timeout_s=1)
            return True

        await until(let_in, "the site to be let in again", tolerated=(BusError,))
        await until_heard(syncer, s.beat("r"), beats)
