"""Attacks on the message server and on those who listen there."""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgpack
import pytest
from live.attacks import cases as c
from live.attacks.cases import attack
from live.attacks.scene import RUN, THIEF, Scene
from pretenders import peer
from waiting import until

from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.nats.api import api_call
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.keys import Credentials, read_credentials
from diloco_shared.bus.port import Refused, Unavailable
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.messages import Beat, ContributionManifest, Join, TapeEnd
from diloco_shared.protocol.records import (
    Fault,
    LeaderLease,
)
from diloco_shared.protocol.wire import decode, encode

VICTIM = "a-1"
Send = Callable[[], Awaitable[Any]]


async def forbidden(scene: Scene, name: str, subject: str, payload: bytes = b"forged") -> None:
    """Publishing is refused, and the server's log says to whom."""
    before = len(scene.server_log())
    async with scene.bus(name) as bus:
        errors = bus.errors
        await bus.publish(subject, payload)
        await bus._link.flush(20)
        assert bus.errors > errors, f"{subject} was let through"
    await logged(scene, before, "Publish Violation", scene.key(name), subject)
    c.RIGHTS.seen(scene)


async def logged(scene: Scene, before: int, *words: str) -> None:
    """One line of the server's log since then has all of these words."""
    await until(
        lambda: any(
            all(word in line for word in words) for line in scene.server_log()[before:].splitlines()
        ),
        f"a line of the server's log with {words}",
        patience_s=10,
    )


def no_right(name: str, by: str, who: str, subject: str, payload: Any = b"forged") -> None:
    """An attack that is a subject for which `who` has no right."""

    @attack("bus", name, by, c.RIGHTS)
    async def play(scene: Scene) -> None:
        await forbidden(scene, who, subject, payload() if callable(payload) else payload)


def end() -> bytes:
    return encode(TapeEnd(term=1, outcome="finished", reason="forged", versions=(), at=1.0))


def lease() -> bytes:
    return encode(LeaderLease(holder="evil", boot="b", lock="l", at=1.0))


def fault(target: str) -> bytes:
    return encode(Fault(id="f", kind="kill", target=target))


def token() -> bytes:
    return json.dumps(
        {"name": "mine", "scopes": ["administer"], "digest": "0" * 64, "created_at": 1.0}
    ).encode()


# What a site's credentials have no right to: name of the attack, subject, what is published.
for name, subject, payload in (
    ("reports progress in another learner's name", s.progress(RUN, VICTIM), b"forged"),
    ("contributes in another learner's name", s.contribution(RUN, VICTIM, 0, 0, 9, 1), b"forged"),
    ("joins in another learner's name", s.join(RUN, VICTIM), b"forged"),
    ("begins another learner's next life", f"KV.incarnations.ANY.{VICTIM}", b"forged"),
    ("begins lives in runs that there are not", f"KV.incarnations.none.{THIEF}", b"forged"),
    ("forges another learner's member record", f"KV.members.LEARNER.{VICTIM}", b"forged"),
    ("forges a member record where syncers have theirs", f"KV.members.{THIEF}", b"forged"),
    ("takes another learner's lease of data", f"KV.shards.{RUN}.0", b"forged"),
    ("asks for leases of data in another learner's name", s.lease(RUN, VICTIM), b"forged"),
    ("tells an event in another learner's name", s.event_by(VICTIM), b"forged"),
    ("tells an event in the hub's name", s.event(RUN, "finished"), b"forged"),
    ("forges a record at the end of the tape", s.tape(RUN, 0), end),
    ("forges the snapshot of a syncer", s.state(RUN, "syncer-a", "syncer-b", "n"), b"forged"),
    ("publishes parameters", s.publication(RUN, 0, 0, 99, 1), b"forged"),
    ("forges the leader's beat", s.beat(RUN), b"forged"),
    ("asks for contributions in the leader's name", s.pull(RUN), b"forged"),
    ("grants a join in the leader's name", s.grant(RUN, VICTIM), b"forged"),
    ("has another learner give its optimizer's state", s.donate(RUN, VICTIM), b"forged"),
    ("takes the leader's lease", f"KV.leases.{s.leader_lease(RUN, 0)}", lease),
    ("says how the run stands", f"KV.status.{RUN}", b"forged"),
    ("forges the record of a run", f"KV.runs.{RUN}", b"forged"),
    ("forges it by the name that streams have", f"$KV.runs.{RUN}", b"forged"),
    ("forges who works for which run", f"KV.assignments.{VICTIM}", b"forged"),
    ("marks the run as deleted", "KV.deleted.0123456789", b"forged"),
    ("forges an administrator's token", "KV.tokens.mine", token),
    ("moves the places up to which data is merged", f"KV.places.{RUN}.0.0", b"forged"),
    ("kills another learner by a fault", s.chaos(VICTIM), lambda: fault(VICTIM)),
    ("kills the leading syncer by a fault", s.chaos("syncer-a"), lambda: fault("syncer-a")),
    ("reads the digests of tokens", "$JS.hub.API.STREAM.MSG.GET.KV_tokens", b'{"seq":1}'),
    ("empties the tape", f"$JS.hub.API.STREAM.PURGE.TAPE-{RUN}", b""),
    ("deletes the tape", f"$JS.hub.API.STREAM.DELETE.TAPE-{RUN}", b""),
    ("changes the limits of a stream", f"$JS.hub.API.STREAM.UPDATE.UP-{RUN}", b"{}"),
    ("speaks to the message server itself", "$SYS.REQ.SERVER.PING", b""),
    ("goes around its account to the hub's streams", "$JS.API.STREAM.PURGE.EVENTS", b""),
):
    no_right(name, c.SITE, "b", subject, payload)
no_right("contributes", c.READER, "reader", s.contribution(RUN, VICTIM, 0, 0, 9, 1))
no_right("joins the run", c.READER, "reader", s.join(RUN, "reader"))


@attack("bus", "listens to what others are answered and told", c.SITE, c.RIGHTS)
async def listens(scene: Scene) -> None:
    async with scene.bus() as bus:
        for subject in ("_INBOX_a.>", s.grant(RUN, VICTIM), s.chaos(VICTIM), ">", "$JS.>"):
            before, errors = len(scene.server_log()), bus.errors
            async with bus._link.subscribed(subject, lambda _: None):
                await bus._link.flush(20)
            assert bus.errors > errors, subject
            await logged(scene, before, "Subscription Violation", scene.key("b"), subject)
    c.RIGHTS.seen(scene)


@attack(
    "bus", "has the server write a token by naming it as the place of an answer", c.SITE, c.BACK
)
async def leads_answers(scene: Scene) -> None:
    async with scene.bus() as bus:
        for target in ("$KV.tokens.mine", f"KV.runs.{RUN}", s.tape(RUN, 0), s.beat(RUN)):
            await bus._link.publish(
                "$JS.hub.API.DIRECT.GET.KV_members", b'{"last_by_subj":"$KV.members.a-1"}',
                reply=target,
            )  # fmt: skip
        await bus._link.flush(20)
    c.BACK.seen(scene)


@attack("bus", "has a consumer deliver stored bytes as the leader's beat", c.SITE, c.BACK)
async def delivers_elsewhere(scene: Scene) -> None:
    config = {"name": "x", "ack_policy": "none", "deliver_policy": "all"}
    body = {"stream_name": f"UP-{RUN}", "config": config | {"deliver_subject": s.beat(RUN)}}
    async with scene.bus() as bus:
        await api_call(bus._link, f"CONSUMER.CREATE.UP-{RUN}.x", body, what="consumer")
        await bus._link.flush(20)
        await api_call(bus._link, f"CONSUMER.DELETE.UP-{RUN}.x", {}, what="consumer")
    c.BACK.seen(scene)


@attack("bus", "removes all members and lives by one header", c.SITE, c.NOT_STORED)
async def rolls_up(scene: Scene) -> None:
    async with scene.bus() as bus:
        for bucket, key in (
            (s.INCARNATIONS, s.life_key(RUN, THIEF, named=True)),
            (s.MEMBERS, s.member_key(THIEF, "learner", named=True)),
        ):
            for reach in ("all", "sub"):
                with pytest.raises(Refused, match="rollup"):
                    await bus.append(f"KV.{bucket}.{key}", b"", headers={"Nats-Rollup": reach})
    c.NOT_STORED.seen(scene)


@attack("bus", "stores a member record of a megabyte", c.SITE, c.NOT_STORED)
async def fat_record(scene: Scene) -> None:
    async with scene.bus() as bus:
        key = s.member_key(THIEF, "learner", named=True)
        with pytest.raises(Refused, match="maximum"):
            await bus.append(f"KV.{s.MEMBERS}.{key}", bytes(1 << 20))
    c.NOT_STORED.seen(scene)


# --------------------------------------------------------------------------------------------------
# Who is let in at all.


@asynccontextmanager
async def raw(scene: Scene) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection to the message server."""
    host, _, port = scene.nats_url.removeprefix("tls://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def signs_in(scene: Scene, login: dict[str, str] | Credentials) -> bytes:
    """What the server says to one attempt, over TLS."""
    async with raw(scene) as (reader, writer):
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        await writer.start_tls(scene.trust, server_hostname="localhost")
        given = login.login(info) if isinstance(login, Credentials) else login
        said = {"verbose": False, "pedantic": False, "lang": "x", "version": "1", **given}
        writer.write(b"CONNECT " + json.dumps(said).encode() + b"\r\nPING\r\n")
        return await reader.readline()


async def not_let_in(scene: Scene, *logins: dict[str, str] | Credentials) -> None:
    for login in logins:
        before = len(scene.server_log())
        assert b"Authorization Violation" in await signs_in(scene, login)
        key = login.public_key if isinstance(login, Credentials) else login.get("nkey", "")
        await logged(scene, before, "authentication error", key)
    c.NOT_LET_IN.seen(scene)


for name, by, kept in (
    ("connects with credentials that are revoked", c.REVOKED_SITE, "gone"),
    ("connects with credentials that were rotated", c.ROTATED_SITE, "changed"),
    ("connects with credentials of its own making", c.INVENTED_SITE, "stranger"),
):

    @attack("bus", name, by, c.NOT_LET_IN)
    async def connects(scene: Scene, kept: str = kept) -> None:
        await not_let_in(scene, read_credentials(scene.credentials(kept)))


@attack("bus", "connects without credentials, or with a guessed secret", c.NOBODY, c.NOT_LET_IN)
async def anonymous(scene: Scene) -> None:
    await not_let_in(scene, {}, {"auth_token": "secret"}, {"user": "hub", "pass": "hub"})


@attack("bus", "signs in with a signature that was recorded before", c.BETWEEN, c.NOT_LET_IN)
async def replays_a_signature(scene: Scene) -> None:
    recorded = read_credentials(scene.credentials("a")).login({"nonce": "of another connection"})
    await not_let_in(scene, recorded)


@attack("bus", "goes on without TLS", c.SITE, c.NOT_ENCRYPTED)
async def speaks_plainly(scene: Scene) -> None:
    async with raw(scene) as (reader, writer):
        assert b'"tls_required":true' in await reader.readline()
        writer.write(b'CONNECT {"verbose":false}\r\nPUB ' + s.beat(RUN).encode() + b" 1\r\nx\r\n")
        assert b"PONG" not in await reader.read()
    c.NOT_ENCRYPTED.seen(scene)


@attack("bus", "holds connections open and says nothing", c.NOBODY, c.SILENT)
async def says_nothing(scene: Scene) -> None:
    async with raw(scene) as (reader, _), raw(scene) as (other, _):
        async with asyncio.timeout(30):  # the server's own limit is two seconds
            await asyncio.gather(reader.read(), other.read())
    c.SILENT.seen(scene)


@asynccontextmanager
async def posing(tls: ssl.SSLContext | None, heard: list[bytes]) -> AsyncIterator[int]:
    """A server that poses as the hub; what it hears."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = {"server_id": "x", "version": "2.15.1", "max_payload": 1 << 20, "nonce": "n" * 22}
        try:
            writer.write(
                b"INFO " + json.dumps(said | {"tls_required": tls is not None}).encode() + b"\r\n"
            )
            if tls is not None:
                await writer.start_tls(tls)
            heard.append(await reader.read(4096))
        except OSError:
            pass

    async with peer(greet) as port:
        yield port


async def trusts(scene: Scene, port: int) -> None:
    with pytest.raises(Unavailable):
        await NatsBus.connect(
            f"tls://127.0.0.1:{port}",
            name="x",
            tls=scene.trust,
            credentials=scene.credentials("a"),
            timeout_s=1,
        )


@attack("bus", "poses as the hub with a certificate of another authority", c.BETWEEN, c.NOT_TRUSTED)
async def wrong_authority(scene: Scene) -> None:
    context, heard = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), list[bytes]()
    context.load_cert_chain(scene.folder / "tls/other.pem", scene.folder / "tls/other.key")
    async with posing(context, heard) as port:
        await trusts(scene, port)
    assert not any(b"CONNECT" in words for words in heard)
    c.NOT_TRUSTED.seen(scene)


@attack("bus", "poses as the hub and says that it has no TLS", c.BETWEEN, c.NOT_TRUSTED)
async def downgrade(scene: Scene) -> None:
    heard: list[bytes] = []
    async with posing(None, heard) as port:
        await trusts(scene, port)
    assert not any(b"CONNECT" in words for words in heard), "who it is was said in plain text"
    c.NOT_TRUSTED.seen(scene)


@attack("bus", "sends a message of 3 MiB", c.SITE, c.TOO_LONG)
async def too_long(scene: Scene) -> None:
    before = len(scene.server_log())
    async with scene.bus() as bus:
        with pytest.raises(Exception, match="exceed the server's limit"):
            await bus._link.publish(s.progress(RUN, THIEF), bytes(3 << 20))
    # The library refuses it itself; what knows no such limit is refused by the server.
    identity = read_credentials(scene.credentials("b"))
    async with raw(scene) as (reader, writer):
        info = json.loads((await reader.readline()).removeprefix(b"INFO "))
        await writer.start_tls(scene.trust, server_hostname="localhost")
        writer.write(b"CONNECT " + json.dumps({"verbose": False, **identity.login(info)}).encode())
        writer.write(b"\r\nPUB " + s.progress(RUN, THIEF).encode() + b" 3145728\r\n")
        writer.write(bytes(1 << 20))
        assert b"Maximum Payload Violation" in await reader.read()
    await logged(scene, before, "maximum payload")
    c.TOO_LONG.seen(scene)


# --------------------------------------------------------------------------------------------------
# What the server lets pass, since it is in the thief's own name: the leader refuses it.


async def refusals(scene: Scene) -> dict[str, int]:
    found: dict[str, int] = (await scene.status())["refused"]
    return found


async def counted(scene: Scene, kind: str, before: dict[str, int], send: Send) -> None:
    """The leader counts a refusal more than before, and tells of the thief.

    It tells at powers of two, and may have refused others alike: so the thief tries until then.
    """

    async def told() -> bool:
        await send()
        more = (await refusals(scene)).get(kind, 0) > before.get(kind, 0)
        events = [e for e in await scene.events("refused") if e["data"].get("kind") == kind]
        return more and any(THIEF in e["text"] for e in events)

    await until(told, f"an event of a refusal as {kind}", patience_s=60, every_s=0.2)
    c.COUNTED.seen(scene)


async def theirs(bus: NatsBus) -> tuple[ContributionManifest, Any]:
    """The newest contribution of the victim, as every site may read it."""
    stored = await bus.fetch(s.up_stream(RUN), f"up.{RUN}.{VICTIM}.*.*.*.*.m")
    return decode(stored[-1].payload, ContributionManifest), stored[-1]


@attack("bus", "replays another learner's manifest under its own subject", c.SITE, c.COUNTED)
async def replays_elsewhere(scene: Scene) -> None:
    before = await refusals(scene)
    async with scene.bus() as bus:
        m, stored = await theirs(bus)
        subject = s.contribution(RUN, THIEF, m.epoch, m.fragment, m.round, m.term)
        send = partial(bus.append, f"{subject}.m", stored.payload)
        await counted(scene, "malformed", before, send)


async def contributes(scene: Scene, kind: str, **changes: Any) -> None:
    """A contribution in the thief's own name, like the victim's but for `changes`."""
    before = await refusals(scene)
    async with scene.bus() as bus:
        m, _ = await theirs(bus)
        changed = {"round": m.round + 2, "learner": THIEF} | changes
        m = m.model_copy(update=changed)
        subject = s.contribution(RUN, THIEF, m.epoch, m.fragment, m.round, m.term)
        blob = await put_blob(bus, subject, os.urandom(codec.bytes_of(m.codec, 64)))
        blob = blob.model_copy(update={"bytes": changes.get("claimed", m.blob.bytes)})
        m = m.model_copy(update={"blob": blob})
        await counted(scene, kind, before, partial(bus.append, f"{subject}.m", encode(m)))


@attack("bus", "contributes to a round that did not ask it", c.SITE, c.COUNTED)
async def uninvited(scene: Scene) -> None:
    await contributes(scene, "late", round=0)


@attack("bus", "contributes to a round of long ago", c.SITE, c.COUNTED)
async def reordered(scene: Scene) -> None:
    await contributes(scene, "late", round=1)


@attack("bus", "announces a payload that unpacks to more than memory has", c.SITE, c.COUNTED)
async def bomb(scene: Scene) -> None:
    await contributes(scene, "malformed", values=2**52)


@attack("bus", "replays a contribution that was merged, byte for byte", c.OWN_SITE, c.COUNTED)
async def replays(scene: Scene) -> None:
    before = await refusals(scene)
    async with scene.bus("a") as bus:
        for message in await bus.fetch(s.up_stream(RUN), f"up.{RUN}.{VICTIM}.*.*.*.*.m"):
            await bus.append(message.subject, message.payload)

    async def more() -> bool:
        return (await refusals(scene)).get("late", 0) > before.get("late", 0)

    await until(more, "a refusal as late", patience_s=30, every_s=0.1)
    c.COUNTED.seen(scene)


@attack("bus", "sends what is no message, nested a thousand deep", c.SITE, c.COUNTED)
async def nested(scene: Scene) -> None:
    before, body = await refusals(scene), b"\x91" * 1000 + b"\x01"
    async with scene.bus() as bus:

        async def send() -> None:
            for payload in (b"", b"\xff" * 64, os.urandom(64), body, msgpack.packb({"v": 2})):
                await bus.publish(s.progress(RUN, THIEF), payload)

        await counted(scene, "wire", before, send)


@attack("bus", "reports in its own subject as another learner", c.SITE, c.COUNTED)
async def poses(scene: Scene) -> None:
    heard: list[bytes] = []
    before = await refusals(scene)
    async with scene.bus("syncer-a") as syncer, syncer.subscribe(s.progress(RUN, VICTIM)) as said:
        heard.append((await anext(said)).payload)
    async with scene.bus() as bus:
        send = partial(bus.publish, s.progress(RUN, THIEF), heard[0])
        await counted(scene, "wire", before, send)


@attack("bus", "joins in its own subject as another learner, in a life to come", c.SITE, c.COUNTED)
async def joins_for_another(scene: Scene) -> None:
    before = await refusals(scene)
    join = Join(learner=VICTIM, incarnation=10**9, nonce="x", config={})
    async with scene.bus() as bus:
        await bus.publish(s.unsigned_join(RUN), encode(join))  # leads nowhere
        await counted(scene, "wire", before, partial(bus.publish, s.join(RUN, THIEF), encode(join)))
    beat = await _beat(scene)
    assert beat.incarnations[VICTIM] < 10**9


async def _beat(scene: Scene) -> Beat:
    async with scene.bus("a") as bus, bus.subscribe(s.beat(RUN)) as beats:
        await anext(beats)
        return decode((await anext(beats)).payload, Beat)
