"""A hub with TLS, two sites and a run that trains: what attacks are played against, and watched by.

The hub has its folder of identities as `diloco hub init` makes it. Site `a` runs two learners that
train and one that is idle; of site `b` an attacker has stolen the credentials. A second syncer
stands by, and leads what else is submitted.
"""

import asyncio
import hashlib
import json
import shutil
import ssl
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from live.hubs import encrypted, serving
from live.processes import PATIENCE_S, Services, diloco, diloco_says, services
from live.tiny import tiny, write_corpus
from waiting import NotYet, until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.keys import Credentials, read_credentials
from diloco_shared.hub import folder as hub_folder
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.messages import TapeRound
from diloco_shared.protocol.records import Assignment, Deleted, LeaderLease, MemberRecord, RunStatus
from diloco_shared.protocol.wire import decode, decode_tape

RUN = "r"
# The stolen credentials are of site b, which has this learner.
THIEF = "b-1"
# Of the idle learner of site a, which begins a life in whatever an attacker submits.
IDLE_LIFE = s.life_key(RUN, "a-3", named=True)
# Requests of these addresses are not of the coordinator's own machine, as far as it knows.
STRANGER, GUESSER, OWNER = "127.0.0.2", "127.0.0.3", "127.0.0.4"


# --------------------------------------------------------------------------------------------------
# The hub and the sites.


def certificates(folder: Path) -> None:
    """ca.pem, and cert.pem with cert.key that it signed; other.pem of another authority."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make certificates")
    new = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    for name, more in (
        ("ca", ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]),
        ("other", ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]),
        (
            "cert",
            [
                *("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"),
                *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
                *("-addext", "basicConstraints=critical,CA:FALSE"),
            ],
        ),
    ):
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        command = [*new, "-nodes", "-days", "2", "-subj", f"/CN={name}", *files, *more]
        subprocess.run([str(c) for c in command], check=True, capture_output=True)


@dataclass(slots=True)
class Scene:
    """What stands before the attacks begin. `hows`: how those of now were refused."""

    folder: Path
    nats_url: str
    url: str
    admin: str
    trust: ssl.SSLContext
    running: Services
    tokens: dict[str, str] = field(default_factory=dict)  # name -> secret
    hows: set[Any] = field(default_factory=set)
    slow: list[Any] = field(default_factory=list)  # connections that never end their requests
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)
    row: int = 0  # number of the newest row of the audit log that was looked at

    @property
    def hub(self) -> Path:
        return self.folder / "hub"

    # --- the bus --------------------------------------------------------------------------------

    def credentials(self, name: str) -> Path:
        return self.folder / "kept" / name

    def key(self, name: str) -> str:
        """The public key of an identity, as the message server's log has it."""
        return read_credentials(self.credentials(name)).public_key

    @asynccontextmanager
    async def bus(self, name: str = "b", **more: Any) -> AsyncIterator[NatsBus]:
        """Connected with an identity's credentials: those that were stolen."""
        more.setdefault("credentials", self.credentials(name))
        bus = await NatsBus.connect(
            self.nats_url, name=f"attack-{name}", tls=self.trust, timeout_s=5, **more
        )
        try:
            yield bus
        finally:
            await bus.close()

    def server_log(self) -> str:
        return (self.hub / "log").read_text(errors="replace")

    def log_of(self, process: str) -> str:
        return (self.running.data / f"{process}.log").read_text(errors="replace")

    def told_by_syncers(self) -> Callable[[], list[str]]:
        """What gives their new log lines since now: either of them may lead."""
        names = ("syncer-a", "syncer-b")
        before = {name: len(self.log_of(name)) for name in names}
        return lambda: [
            line for name in names for line in self.log_of(name)[before[name] :].splitlines()
        ]

    # --- the REST interface ---------------------------------------------------------------------

    def http(self, address: str = OWNER) -> httpx.AsyncClient:
        """From an address of this machine; kept open until the end."""
        if address not in self.clients:
            few = httpx.Limits(keepalive_expiry=2.0)
            transport = httpx.AsyncHTTPTransport(
                verify=self.trust, local_address=address, limits=few
            )
            self.clients[address] = httpx.AsyncClient(
                transport=transport, base_url=self.url, timeout=60, trust_env=False
            )
        return self.clients[address]

    async def ask(
        self, method: str, path: str, token: str = "", address: str = OWNER, **more: Any
    ) -> httpx.Response:
        """One request; with the administrator's token unless another one is given."""
        headers = {"Authorization": f"Bearer {token or self.admin}", **more.pop("headers", {})}
        return await self.http(address).request(method, path, headers=headers, **more)

    async def makes(self, name: str, *scopes: str, **more: Any) -> str:
        """A token, made by the administrator."""
        body = {"name": name, "scopes": scopes, **more}
        made = await self.ask("POST", "/v1/tokens", json=body)
        assert made.status_code == 201, made.text
        self.tokens[name] = made.json()["token"]
        return self.tokens[name]

    def command(self, *arguments: str, ca: Path | None = None, status: int = 0) -> str:
        """What a command of `diloco` prints to who has the administrator's token."""
        where = ("--url", self.url, "--token-file", str(self.running.data / "admin-token"))
        trusted = ("--ca", str(ca or self.folder / "tls" / "ca.pem"))
        done = diloco(*arguments, *where, *trusted)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    async def audit(self) -> list[dict[str, Any]]:
        """Rows of the audit log that were not looked at before."""
        answer = await self.ask("GET", f"/v1/audit?after={self.row}&limit=1000")
        assert answer.status_code == 200, answer.text
        rows: list[dict[str, Any]] = answer.json()["rows"]
        if rows:
            self.row = int(rows[-1]["seq"])
        return rows

    async def events(self, kind: str) -> list[dict[str, Any]]:
        answer = await self.ask("GET", f"/v1/events?kind={kind}&limit=1000")
        found: list[dict[str, Any]] = answer.json()["events"]
        return [e for e in found if e["kind"] == kind]

    # --- what must not change -------------------------------------------------------------------

    async def view(self) -> dict[str, Any]:
        answer = await self.ask("GET", f"/v1/runs/{RUN}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.view())["status"]
        return found


# --------------------------------------------------------------------------------------------------
# What an attack must leave as it is.


@dataclass(frozen=True, slots=True)
class Standing:
    """All that no attack may change: by bucket and key what is told of a record, and the tape."""

    records: dict[str, dict[str, str]]
    tape: dict[int, str]  # sequence -> digest of the record
    state: tuple[Any, ...]  # of the run, as its leader says

    def changed(self, later: "Standing") -> list[str]:
        """What differs in `later`; the tape may only have grown."""
        found = [
            f"{bucket}/{key}: {before.get(key)} became {after.get(key)}"
            for bucket, before in self.records.items()
            for after in [later.records[bucket]]
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
        gone = [seq for seq, d in self.tape.items() if later.tape.get(seq) != d]
        return (
            found
            + [f"tape record {seq}" for seq in gone]
            + ([f"the run: {self.state} became {later.state}"] if self.state != later.state else [])
        )


def _told(bucket: str, value: bytes) -> str:
    """Of a record what stays while nobody attacks: a lease is renewed, a token used. "": nothing,
    as where nobody is assigned, or a run that an attacker submitted himself is deleted."""
    if bucket == s.LEASES:
        lease = decode(value, LeaderLease)
        return f"{lease.holder} {lease.boot}"
    if bucket == s.MEMBERS:
        member = decode(value, MemberRecord)
        return f"{member.id} {member.role} {member.boot} {member.run} {member.draining}"
    if bucket == s.ASSIGNMENTS:
        given = decode(value, Assignment)
        return given.run and f"{given.run} {given.run_id} {given.shard}"
    if bucket == s.DELETED:
        return decode(value, Deleted).run if decode(value, Deleted).run == RUN else ""
    if bucket == s.TOKENS:
        kept = json.loads(value)
        kept.pop("used_at", None)
        return json.dumps(kept, sort_keys=True)
    return hashlib.sha256(value).hexdigest()


WATCHED = (s.RUNS, s.ASSIGNMENTS, s.INCARNATIONS, s.DELETED, s.LEASES, s.MEMBERS, s.TOKENS)


class Watcher:
    """Looks with the coordinator's own credentials."""

    def __init__(self, scene: Scene, bus: NatsBus) -> None:
        self.scene, self.bus = scene, bus
        self.tape: dict[int, str] = {}

    async def look(self) -> Standing:
        records = {}
        for bucket in WATCHED:
            kept = await self.bus.kv_all(bucket)
            told = {
                key: _told(bucket, entry.value)
                for key, entry in kept.items()
                if entry.value is not None and key != IDLE_LIFE
            }
            records[bucket] = {key: text for key, text in told.items() if text}
        stored = await self.bus.fetch(s.tape_stream(RUN), s.tape(RUN, 0))
        for message in stored:
            decode_tape(message.payload)
        tape = {m.seq: hashlib.sha256(m.payload).hexdigest() for m in stored}
        entry = await self.bus.kv_get(s.STATUS, RUN)
        assert entry is not None and entry.value is not None
        status = decode(entry.value, RunStatus)
        state = (status.state, status.epoch, status.term, status.leader, status.quorum)
        return Standing(records, tape, state)

    async def committed(self) -> int:
        """The newest round that merged both learners of site a."""
        stored = await self.bus.fetch(s.tape_stream(RUN), s.tape(RUN, 0))
        for message in reversed(stored):
            record = decode_tape(message.payload)
            if isinstance(record, TapeRound) and record.outcome == "committed":
                return record.round
        return -1

    async def twice_merged(self) -> list[str]:
        """Contributions that the tape merges more than once (I2)."""
        merged: Counter[str] = Counter()
        for message in await self.bus.fetch(s.tape_stream(RUN), s.tape(RUN, 0)):
            record = decode_tape(message.payload)
            if isinstance(record, TapeRound):
                merged.update(v.subject for v in record.verdicts if v.outcome == "merged")
        return [subject for subject, times in merged.items() if times > 1]

    async def goes_on(self, more: int = 3) -> None:
        """So many rounds are committed that were not there before."""
        before = await self.committed()

        async def further() -> bool:
            self.scene.running.check()
            now = await self.committed()
            if now < before + more:
                raise NotYet(f"round {now} after {before}")
            return True

        await until(further, "further rounds", patience_s=PATIENCE_S, every_s=0.2)


# --------------------------------------------------------------------------------------------------
# Everything started.


def identities(folder: Path) -> None:
    """The hub's folder, and what was handed out: each credentials file in `kept/`."""
    hub, tls = str(folder / "hub"), folder / "tls"
    diloco_says(
        *("hub", "init", hub, "--listen", "127.0.0.1:-1", "--store", str(folder / "store")),
        *("--cert", str(tls / "cert.pem"), "--key", str(tls / "cert.key")),
    )
    for name, learners in (
        ("a", ("a-1", "a-2", "a-3")),
        ("b", (THIEF,)),
        ("gone", ("gone-1",)),
        ("changed", ("changed-1",)),
    ):
        hub_folder.add(folder / "hub", name, "learner", learners)
    (folder / "kept").mkdir()
    for path in (folder / "hub" / hub_folder.CREDENTIALS).iterdir():
        (folder / "kept" / path.name).write_bytes(path.read_bytes())
    (folder / "kept" / "stranger").write_text(Credentials.new("b").document())


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Scene, Watcher]]:
    """All of it at work; what is left of it is stopped."""
    tls, data = folder / "tls", folder / "data"
    tls.mkdir()
    data.mkdir()
    certificates(tls)
    identities(folder)
    corpus = write_corpus(folder / "corpora")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret.txt").write_text("not for runs\n" * 1000)
    trust = ssl.create_default_context(cafile=str(tls / "ca.pem"))
    outer = {"SSL_CERT_FILE": str(tls / "ca.pem"), "DILOCO_DATA_ROOT": str(corpus)}
    async with serving(folder / "hub") as (_, address):
        url = encrypted(address)
        with services(data, url, DILOCO_CHAOS="1", **outer) as running:
            _start(running, folder)
            found = Scene(folder, url, running.address(), running.token(), trust, running)
            await until(lambda: _ready(found), "the coordinator", tolerated=(httpx.HTTPError,))
            async with found.bus("coordinator") as bus:
                watcher = Watcher(found, bus)
                await _submitted(found)
                await _tokens(found)
                await asyncio.to_thread(out_of_date, found)
                await until(lambda: _trains(found, watcher), "a run that trains", every_s=0.2)
                try:
                    yield found, watcher
                finally:
                    for client in found.clients.values():
                        await client.aclose()


def _start(running: Services, folder: Path) -> None:
    """All processes, each with its credentials."""

    def of(site: str) -> dict[str, str]:
        credentials = str(folder / "kept" / site)
        # That it trains is enough.
        return {"DILOCO_NATS_CREDENTIALS": credentials, "DILOCO_DUTY_CYCLE": "0.2"}

    tls = folder / "tls"
    certified = {"DILOCO_TLS_CERT": str(tls / "cert.pem"), "DILOCO_TLS_KEY": str(tls / "cert.key")}
    running.coordinator(**of("coordinator"), **certified)
    for name in ("syncer-a", "syncer-b"):
        running.start("diloco_syncer", name, **of(name))
    for name in ("a-1", "a-2", "a-3"):
        running.start("diloco_learner", name, **of("a"))


async def _ready(found: Scene) -> bool:
    return (await found.http().get("/readyz")).status_code == 200


async def _submitted(found: Scene) -> None:
    quorum = {"quorum": 2}
    given = small_run(found, RUN, algorithm=quorum, membership={"learners_max": 2})

    async def there() -> bool:
        members = (await found.ask("GET", "/v1/members")).json()["members"]
        return {m["id"] for m in members} >= {"syncer-a", "a-1", "a-2", "a-3"}

    await until(there, "all members", every_s=0.2)
    made = await found.ask("POST", "/v1/runs", json=given)
    assert made.status_code == 201, made.text


def small_run(found: Scene, name: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """A run of a tiny model, as it is submitted."""
    budget, data = {"steps": 10_000_000}, {"virtual_shards": 8, "validation_fraction": 0.2}
    given = tiny(name=name, budget=budget, data={"source": ".", **data})
    for section, fields in changes.items():
        given[section] = given.get(section, {}) | fields
    return given


async def _tokens(found: Scene) -> None:
    """Those that attackers have."""
    await found.makes("reader", "read")
    await found.makes("operator", "read", "operate")
    await found.makes("limited", "read", "operate", runs=[RUN])
    await found.makes("expired", "read", "operate", expires_in_s=0.5)
    await found.makes("revoked", "administer")
    await found.ask("DELETE", "/v1/tokens/revoked")
    await found.makes("rotated", "administer")
    await found.ask("POST", "/v1/tokens/rotated/rotate", json={"overlap_s": 0})


async def _trains(found: Scene, watcher: Watcher) -> bool:
    """Rounds are merged, and the status says so: it is written less often than rounds end."""
    found.running.check()
    return await watcher.committed() >= 2 and (await watcher.look()).state[0] == "running"


def out_of_date(found: Scene) -> None:
    """One site is revoked, and another one gets a new key, as who runs the hub does it."""
    hub_folder.revoke(found.hub, "gone")
    hub_folder.rotate(found.hub, "changed")
    hub_folder.retire(found.hub, "changed")
    assert hub_folder.reload(found.hub) == ""
