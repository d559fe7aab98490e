"""What the run's streams hold against their limits, and limits that grow with the run."""

import pytest

from diloco_shared.budget import Size, assumed, limits, roomy
from diloco_shared.budget.job import ROUND_S, rounds_at
from diloco_shared.budget.refusing import faults
from diloco_shared.bus.port import StreamSpec, TooFewNodes
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.protocol import subjects
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import Tell
from diloco_syncer.streams.storage_io import Storage

OWN = {"factory": "my_models:make"}
SPEC = RunSpec.model_validate({"name": "r", "model": OWN, "budget": {"steps": 1000}})


class Hub:
    """A bus with the streams of a run whose size nobody knows, and a leader's view of them."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "syncer")
        self.size = Size()
        self.told: list[Tell] = []
        self.storage = Storage(SPEC, self.bus, lambda: self.size, self.told.append)

    async def begin(self) -> None:
        await ensure_run_streams(self.bus, "r", limits(assumed(SPEC)))

    async def limits(self) -> dict[str, int]:
        kinds = subjects.STREAM_KINDS
        infos = [await self.bus.stream_info(subjects.run_stream("r", kind)) for kind in kinds]
        return {kind: info.bytes_max for kind, info in zip(kinds, infos, strict=True)}


async def test_each_stream_is_read_with_its_own_limit() -> None:
    hub = Hub()
    for number, (name, captured) in enumerate(subjects.run_streams("r").items(), 1):
        await hub.bus.ensure_stream(StreamSpec(name, (captured,), number << 32))
    await hub.bus.append("dn.r.0.0.0.1", bytes(5000))
    await hub.storage.look()
    seen = hub.storage.streams
    assert {kind: use.limit >> 32 for kind, use in seen.items()} == {
        "UP": 1,
        "DN": 2,
        "TAPE": 3,
        "STATE": 4,
    }
    assert seen["UP"].bytes == 0
    assert 5000 < seen["DN"].bytes < 5200


async def test_what_the_bus_does_not_tell_stays_as_it_was() -> None:
    hub = Hub()
    await hub.begin()
    await hub.storage.look()
    before = dict(hub.storage.streams)
    hub.broker.fault = lambda *_: "lose_request"
    await hub.storage.look()
    assert hub.storage.streams == before and len(before) == 4


async def test_limits_grow_with_what_learners_tell_and_with_their_number() -> None:
    hub = Hub()
    await hub.begin()
    for hub.size in (Size(10**9, 1), Size(10**9, 5)):
        await hub.storage.look()
        needed = limits(assumed(SPEC, **hub.size._asdict()))
        assert await hub.limits() == needed
    assert needed["DN"] > 4 * 10**9 and needed["STATE"] > 5 * 8 * 10**9


async def test_a_stream_without_a_limit_gets_none() -> None:
    hub = Hub()
    await hub.begin()
    name, captured = subjects.dn_stream("r"), subjects.run_streams("r")[subjects.dn_stream("r")]
    await hub.bus.delete_stream(name)
    await hub.bus.ensure_stream(StreamSpec(name, (captured,), 0))
    hub.size = Size(10**9, 5)
    await hub.storage.look()
    assert (await hub.limits())["DN"] == 0


async def test_what_was_told_once_holds_for_those_who_come_later() -> None:
    hub = Hub()
    await hub.begin()
    for hub.size in (Size(10**9, 1), Size(0, 5)):
        await hub.storage.look()
    assert await hub.limits() == limits(assumed(SPEC, learners=5, parameters=10**9))


async def test_limits_never_shrink() -> None:
    hub = Hub()
    await hub.begin()
    hub.size = Size(10**9, 5)
    await hub.storage.look()
    most = await hub.limits()
    hub.size = Size(0, 1)
    await hub.storage.look()
    # A standby, or a restarted syncer, knows of fewer learners than there are.
    await ensure_run_streams(hub.bus, "r", limits(assumed(SPEC)))
    assert await hub.limits() == most


@pytest.mark.parametrize(
    ("seconds", "rounds", "fraction", "expected"),
    [
        (None, 100, 0.5, 0),  # steps or tokens say how many there will be
        (1000.0, 0, 0.0, 0),
        (1000.0, 2000, 0.5, 4000),  # as assumed
        (1000.0, 10, 0.5, 4000),  # never fewer
        (1000.0, 2001, 0.5, 8000),
        (1000.0, 1000, 0.1, 16_000),
        (1000.0, 24, 1e-6, 0),  # the first of each fragment, together
        (1000.0, 720, 0.03, 32_000),
        (100.0, 30, 0.01, 0),
        (100.0, 30, 0.05, 800),
    ],
)
def test_a_run_that_ends_by_the_clock_counts_its_rounds_by_its_pace(
    seconds: float | None, rounds: int, fraction: float, expected: int
) -> None:
    assert ROUND_S == 0.25
    assert rounds_at(seconds, rounds, fraction) == expected


async def test_limits_grow_with_rounds_that_come_faster_than_was_assumed() -> None:
    """All contributions of 2000 s are kept: 8000 rounds were assumed, and there are four times as
    many. Without more room the run would be full before its time is over."""
    given = {"budget": {"seconds": 2000}, "keeping": {"contributions": "all"}}
    fast = RunSpec.model_validate({"name": "r", "model": OWN, **given})
    hub = Hub()
    await ensure_run_streams(hub.bus, "r", limits(assumed(fast)))
    before = (await hub.limits())["UP"]
    hub.storage = Storage(fast, hub.bus, lambda: hub.size, hub.told.append)
    hub.size = Size(learners=1, rounds=rounds_at(2000.0, 1600, 0.05))
    await hub.storage.look()
    assert (await hub.limits())["UP"] > 3.5 * before


BOUND = 70 << 20


async def bounded_hub() -> Hub:
    hub = Hub()
    body = {"name": "r", "model": OWN, "budget": {"steps": 1000}}
    bounded = RunSpec.model_validate(body | {"keeping": {"stream_bytes_max": BOUND}})
    assert not list(faults(bounded)), "it is enough for what is known at submission"
    await ensure_run_streams(hub.bus, "r", limits(assumed(bounded)))
    hub.storage = Storage(bounded, hub.bus, lambda: hub.size, hub.told.append)
    return hub


async def test_no_limit_grows_above_the_bound_that_the_run_was_submitted_with() -> None:
    hub = await bounded_hub()
    hub.size = Size(10**7, 4)
    for _ in range(3):
        await hub.storage.look()
    needed = roomy(assumed(SPEC, parameters=10**7, learners=4))
    assert await hub.limits() == {kind: min(n, BOUND) for kind, n in needed.items()}
    assert hub.storage.needed == needed, "what floods are judged by is what the run needs"
    assert max(needed.values()) > BOUND > min(needed.values())


async def test_that_the_bound_leaves_no_room_is_told_once_for_each_size_of_the_run() -> None:
    hub = await bounded_hub()
    hub.size = Size(10**6, 1)
    await hub.storage.look()
    assert not hub.told and not hub.storage.bounded
    for hub.size in (Size(10**7, 4), Size(10**7, 5)):
        for _ in range(3):
            await hub.storage.look()
    assert [t.kind for t in hub.told] == ["no-room", "no-room"]
    assert set(hub.storage.bounded) == {"UP", "DN", "STATE"}
    needed = roomy(assumed(SPEC, parameters=10**7, learners=4))
    said = hub.told[0].text
    assert said.startswith("streams stay too small (UP 73.4 MB of ")
    assert f"keeping.stream_bytes_max ({BOUND}) allows no more" in said
    assert said.endswith(f"A run of this size needs {max(needed.values())}")
    assert "TAPE" not in said and "nats stream edit" in said


async def test_a_limit_that_somebody_raised_above_the_bound_stays() -> None:
    hub = await bounded_hub()
    hub.size = Size(10**7, 4)
    await hub.storage.look()
    needed = roomy(assumed(SPEC, parameters=10**7, learners=4))
    await ensure_run_streams(hub.bus, "r", {"DN": needed["DN"]})
    await hub.storage.look()
    assert (await hub.limits())["DN"] == needed["DN"]
    assert set(hub.storage.bounded) == {"UP", "STATE"}


async def test_a_server_without_room_is_named_also_where_the_bound_comes_next() -> None:
    """A raised max_file_store is the first thing that helps; the bound is told after it."""
    hub = await bounded_hub()
    hub.broker.storage_max = hub.broker.storage().reserved
    hub.size = Size(10**7, 4)
    await hub.storage.look()
    assert "insufficient storage" in hub.told[-1].text and not hub.storage.bounded
    hub.broker.storage_max = 0
    for _ in range(2):
        await hub.storage.look()
    assert [t.kind for t in hub.told] == ["no-room", "no-room"]
    assert "keeping.stream_bytes_max" in hub.told[-1].text


async def test_a_server_without_room_is_told_once_and_asked_again() -> None:
    hub = Hub()
    await hub.begin()
    hub.broker.storage_max = 10 << 30
    hub.size = Size(10**9, 5)
    for _ in range(3):
        await hub.storage.look()
    assert [t.kind for t in hub.told] == ["no-room"]
    assert "STATE" in hub.told[0].text
    hub.broker.storage_max = 1 << 40
    await hub.storage.look()
    assert await hub.limits() == limits(assumed(SPEC, learners=5, parameters=10**9))


# --------------------------------------------------------------------------------------------------
# Copies on several nodes of the hub.


async def copies(hub: Hub) -> set[int]:
    streams = (subjects.run_stream("r", kind) for kind in subjects.STREAM_KINDS)
    return {(await hub.bus.stream_info(stream)).replicas for stream in streams}


async def test_streams_have_as_many_copies_as_asked_for_and_never_fewer() -> None:
    hub = Hub()
    hub.broker.nodes = 3
    await hub.begin()
    assert await copies(hub) == {1}
    needed = limits(assumed(SPEC))
    await ensure_run_streams(hub.bus, "r", needed, replicas=3)
    assert await copies(hub) == {3}
    await ensure_run_streams(hub.bus, "r", {kind: 2 * n for kind, n in needed.items()}, replicas=1)
    assert await copies(hub) == {3}


async def test_more_copies_than_nodes_are_refused_before_a_run_and_endured_in_one() -> None:
    """As after a restore to a hub of fewer nodes: the run goes on, and its limits still grow."""
    hub = Hub()
    needed = limits(assumed(SPEC))
    with pytest.raises(TooFewNodes):
        await ensure_run_streams(hub.bus, "r", needed, replicas=3)
    await hub.begin()
    twice = {kind: 2 * n for kind, n in needed.items()}
    await ensure_run_streams(hub.bus, "r", twice, replicas=3)
    assert await hub.limits() == twice and await copies(hub) == {1}
