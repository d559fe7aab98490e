"""Readers of streams that a site leaves behind on a real hub: removed, and nobody else's."""

from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
from live.hubs import a_hub
from waiting import until

from diloco_coordinator.runs import sweeping_io
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.nats.api import NS_PER_S, api_call
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.pulls import INACTIVE_S
from diloco_shared.bus.port import Refused, StreamSpec
from diloco_shared.checking import check
from diloco_shared.hub import folder as hub_folder
from diloco_shared.protocol import subjects as s
from diloco_shared.protocol.records import Event, RunRecord
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import written
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.live

STREAMS = ("UP-r", s.EVENTS_STREAM, "KV_runs")
# As a site makes them: every kind that lasts, or delivers to where all sites hear.
NONE = {"ack_policy": "none", "deliver_policy": "all"}
BEAT = {"deliver_subject": s.beat("r")}
STRAYS: dict[str, dict[str, object]] = {
    "lasting": {"durable_name": "lasting"},
    "delivering": {**BEAT, "inactive_threshold": 60 * NS_PER_S},
    "both": {**BEAT, "durable_name": "both"},
    "patient": {"inactive_threshold": 86400 * NS_PER_S},
    "hidden": {**BEAT, "direct": True},
    "hidden-too": {**BEAT, "direct": True, "ack_policy": "explicit", "max_ack_pending": -1},
}


async def made(bus: NatsBus, stream: str, name: str, config: dict[str, object]) -> object:
    """A reader, and how the server has set it up."""
    body = {"stream_name": stream, "config": {"name": name, **NONE, **config}}
    return (await api_call(bus.link, f"CONSUMER.CREATE.{stream}.{name}", body, what=name))["config"]


async def changed(bus: NatsBus, stream: str, **settings: object) -> None:
    about = await api_call(bus.link, f"STREAM.INFO.{stream}", {}, what=stream)
    await api_call(bus.link, f"STREAM.UPDATE.{stream}", about["config"] | settings, what=stream)


async def copies(bus: NatsBus) -> list[str]:
    """Of UP, as an operator may have them: the server reads it for those."""
    of = {"name": "UP-r"}
    for name, config in (("mirror", {"mirror": of}), ("sum", {"sources": [of]})):
        await api_call(bus.link, f"STREAM.CREATE.{name}", {"name": name, **config}, what=name)
    return ["mirror", "sum"]


async def holds(bus: NatsBus, stream: str, messages: int) -> bool:
    return (await bus.stream_info(stream)).messages == messages


def registry_of(bus: NatsBus) -> Registry:
    registry, spec = Registry(bus), check({"name": "r", "budget": {"steps": 8}})
    run = RunRecord(name="r", spec=written(spec), desired="running", quorum=1, created_at=1.0)
    registry.runs["r"] = run
    return registry


@pytest.mark.parametrize("leaf", ["", "oslo"], ids=["", "leaf"])
async def test_those_of_a_revoked_site_are_removed_and_no_others(tmp_path: Path, leaf: str) -> None:
    """They outlive it: all that is stored would be sent to every site, for good."""
    async with a_hub(tmp_path / "hub", "oslo", "rome", leaf=leaf) as hub, AsyncExitStack() as stack:
        bus = await stack.enter_async_context(hub.bus("coordinator"))
        rome = await stack.enter_async_context(hub.bus("rome"))
        registry, own = registry_of(bus), await copies(bus)
        sweep = await stack.enter_async_context(bus.sweeping())
        reading = await stack.enter_async_context(rome.read("UP-r", "up.r.>"))
        subject = s.contribution("r", "rome", 0, 0, 0, 0)
        await rome.append(subject, b"0")
        assert (await anext(reading)).payload == b"0"
        async with hub.bus("oslo") as thief:
            for stream in STREAMS:
                await changed(bus, stream, consumer_limits={})  # as a hub of before has it
                for name, config in STRAYS.items():
                    await made(thief, stream, name, config)
        hub_folder.revoke(hub.folder, "oslo")
        await hub.reload()
        await sweeping_io.look(registry, sweep)
        for stream, name in ((stream, name) for stream in STREAMS for name in STRAYS):
            with pytest.raises(Refused, match="consumer not found"):
                await api_call(bus.link, f"CONSUMER.INFO.{stream}.{name}", {}, what=name)
        heard: list[str] = []
        async with rome.link.subscribed(s.beat("r"), lambda raw: heard.append(raw.subject)):
            for n in range(1, 4):
                await rome.append(subject, b"%d" % n)
                assert (await anext(reading)).payload == b"%d" % n
            await rome.link.flush()
        assert heard == []
        for name in own:
            await until(partial(holds, bus, name, 4), f"a copy: {name}")
        told = [decode(m.payload, Event) for m in await bus.fetch(s.EVENTS_STREAM, "ev.>")]
        removed = [(e.run, e.data) for e in told if e.kind == "stray-readers"]
        runs = ("r", "cluster", "cluster")
        wanted = zip(runs, STREAMS, strict=True)
        assert removed == [
            (run, {"stream": stream, "readers": len(STRAYS)}) for run, stream in wanted
        ]
        await sweeping_io.look(registry, sweep)
        assert len(await bus.fetch(s.EVENTS_STREAM, "ev.>")) == len(told), "there are no more"


async def test_no_reader_lasts_longer_than_ours(tmp_path: Path) -> None:
    async with a_hub(tmp_path / "hub", "oslo") as hub, hub.bus("oslo") as oslo:
        with pytest.raises(Refused, match="inactive threshold"):
            await made(oslo, "UP-r", "long", {"inactive_threshold": (INACTIVE_S + 1) * NS_PER_S})
        config = await made(oslo, "UP-r", "lasting", {"durable_name": "lasting"})
        assert isinstance(config, dict)
        assert config["inactive_threshold"] == INACTIVE_S * NS_PER_S


async def test_a_reader_that_lasts_keeps_no_stream_from_more_room(tmp_path: Path) -> None:
    """The server sets no limit that one of them breaks, and changes nothing else with it."""
    async with (
        a_hub(tmp_path / "hub", "oslo") as hub,
        hub.bus("coordinator") as bus,
        hub.bus("oslo") as thief,
    ):
        await changed(bus, "UP-r", consumer_limits={})
        await made(thief, "UP-r", "patient", STRAYS["patient"])
        await bus.ensure_stream(StreamSpec("UP-r", ("up.r.>",), 65 << 20))
        assert (await bus.stream_info("UP-r")).bytes_max == 65 << 20


async def test_where_all_share_one_secret_nobody_is_swept(tmp_path: Path) -> None:
    """Whoever has it may do anything there, and may be a person with a tool."""
    bus = MemoryBus(MemoryBroker(), "coordinator")
    await sweeping_io.keep_swept(Registry(bus))
