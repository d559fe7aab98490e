"""What a hub that lets us in is asked: rights, times, bandwidth, versions."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.doctor import judging
from diloco_cli.doctor.judging import CHECKS, Finding
from diloco_cli.doctor.trying import judged, tries, upload_subject
from diloco_shared.budget import Job
from diloco_shared.bus.nats import probing
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.api import NoMajority
from diloco_shared.bus.nats.link import MAJORITY_LOST, NatsLink
from diloco_shared.bus.nats.rights import Role
from diloco_shared.bus.nats.streams import NatsStreams
from diloco_shared.bus.port import BusError, KeyEntry, Refused, Unavailable
from diloco_shared.bus.stored_records import readable
from diloco_shared.bus.stream_kv import bucket_stream
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord

# For a connection like the one that was made a moment ago.
CONNECT_S = 10.0
# A dozen questions, each with an answer of its own; beyond it the link is of no use.
ASKING_S = 30.0
PINGS, CLOCKS = 11, 7
# Of a probe in one direction. On a link where 8 MB take longer the figure is there sooner anyway.
PROBE_S = 10.0
# nats-server 2.15.1 does so with an account that it has met once: see `reload` in hub/folder.py.
_NOWHERE = (
    "the hub knows this site, and leads what it says nowhere: have the message server read its "
    "configuration once more ('nats-server --signal reload=PID' at the hub)"
)
# What is asked here, in the order of `CHECKS`.
HUB_CHECKS = CHECKS[CHECKS.index("nodes") : CHECKS.index("bandwidth down") + 1]
_SLOW = "the link or the hub is overloaded, or something on the way holds messages up"


@dataclass(slots=True)
class Hub:
    """`me`: the member id of the process; `tell` is called with each finding as it is made."""

    address: Address
    me: str
    ours: str  # this release
    info: Mapping[str, Any]  # what the server says of itself
    connections: int
    probe_bytes: int
    job: Job | None
    named: Sequence[str]  # the servers of `address`, ...
    closed: Mapping[str, str]  # ... and those that did not let us in, and why not
    tell: Callable[[Finding], None]
    role: Role | None = None

    async def ask(self) -> None:
        """Everything, one after the other: a probe would disturb what else is measured."""
        try:
            link = await self._connect()
        except Unavailable as error:
            for name in HUB_CHECKS:
                self.tell(judging.failed(name, str(error), _SLOW))
            return
        try:
            for name, check in (
                ("nodes", self._nodes),
                ("rights", self._rights),
                ("round trip", self._round_trip),
                ("clock", self._clock),
                ("versions", self._versions),
            ):
                await self._made(name, check(link), ASKING_S)
        finally:
            await link.close()
        await self._made("bandwidth up", self._up(), PROBE_S + CONNECT_S + ASKING_S)
        await self._made("bandwidth down", self._down(), PROBE_S + CONNECT_S + ASKING_S)

    def _connect(self) -> Awaitable[NatsLink]:
        return NatsLink.connect(self.address, name="diloco-doctor", timeout_s=CONNECT_S)

    async def _made(self, name: str, check: Awaitable[Finding], limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                finding = await check
        except TimeoutError:
            finding = judging.late(name, limit_s, _SLOW)
        except (BusError, OSError) as error:
            nowhere = "nobody listens on" in str(error)
            finding = judging.failed(name, str(error), _NOWHERE if nowhere else _SLOW)
        self.tell(finding)

    async def _nodes(self, link: NatsLink) -> Finding:
        ails = ""
        if link.several_nodes:
            try:
                await NatsStreams(link).stream_info(bucket_stream(subjects.MEMBERS))
            except Refused:
                pass  # no bucket yet: that is an answer, too
            except NoMajority:
                ails = MAJORITY_LOST
        return judging.nodes(self.named, self.closed, link.several_nodes, ails)

    async def _rights(self, link: NatsLink) -> Finding:
        identity = self.address.identity()
        if identity is None:
            return Finding("rights", "skipped", "without an identity nothing is forbidden")
        allowed = [
            not await probing.refused(link, each.kind, each.subject) for each in tries(self.me)
        ]
        outcome = judged(identity.name, self.me, allowed)
        self.role = outcome.role
        return outcome.finding

    async def _round_trip(self, link: NatsLink) -> Finding:
        samples = [await probing.round_trip(link) for _ in range(PINGS)]
        return judging.round_trip(samples, self.connections)

    async def _clock(self, link: NatsLink) -> Finding:
        try:
            samples = [await probing.clock_sample(link) for _ in range(CLOCKS)]
        except Refused as error:
            text = f"the hub does not tell the time ({error})"
            return Finding("clock", "warn", text, "start the hub's coordinator, and ask again")
        return judging.clock(samples)

    async def _versions(self, link: NatsLink) -> Finding:
        members = await _all_of(link, subjects.MEMBERS)
        by: dict[str, list[str]] = defaultdict(list)
        for name, entry in sorted(members.items(), key=lambda m: subjects.member_of(m[0])):
            record = readable(entry.value, MemberRecord) if entry.value else None
            by[str(getattr(record, "version", "") or "")].append(subjects.member_of(name))
        return judging.versions(self.ours, self.info, by)

    async def _up(self) -> Finding:
        role: Role = "coordinator" if self.address.credentials is None else self.role or "reader"
        subject = upload_subject(role, self.me)
        if not subject:
            return judging.publishes_nothing()
        link = await self._connect()
        try:
            rate = await probing.upload(link, subject, self.probe_bytes, PROBE_S)
        finally:
            await link.close()
        return judging.bandwidth("up", rate, PROBE_S, self.job)

    async def _down(self) -> Finding:
        link = await self._connect()
        try:
            runs = sorted(await _all_of(link, subjects.RUNS))
            stream, held = await probing.fullest_publications(link, runs)
            if held < probing.PORTION_BYTES:
                return judging.nothing_to_fetch()
            rate = await probing.download(link, stream, self.probe_bytes, PROBE_S)
        finally:
            await link.close()
        return judging.bandwidth("down", rate, PROBE_S, self.job)


async def _all_of(link: NatsLink, bucket: str) -> dict[str, KeyEntry]:
    """What a bucket holds; nothing at a hub where no process has made it yet."""
    streams = NatsStreams(link)
    try:
        await streams.stream_info(bucket_stream(bucket))
    except Refused:
        return {}
    return await streams.kv_all(bucket)
