"""Visitors of a whole world ask for all that the API has, and see when an answer is wrong."""

import asyncio
from random import Random
from typing import Any

import pytest

from diloco_coordinator import access
from diloco_coordinator.access import OVERLAP_S_MAX, TokenRecord
from diloco_coordinator.api.audit_io import Audit
from diloco_coordinator.runs.registry_io import Registry
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.far_bus import FarBus
from diloco_simulator.hub.net import Net
from diloco_simulator.people import requests, tokens, visitors
from diloco_simulator.people.rest import RestCalls
from diloco_simulator.virtual_loop import VirtualLoop, play
from diloco_simulator.worlds import world
from diloco_simulator.worlds.crash_points import small
from diloco_simulator.worlds.processes import Host, coordinator
from diloco_syncer.history import audit_io as audit


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "OFTEN", 1.0)
    monkeypatch.setattr(requests, "OFTEN", 1.0)
    monkeypatch.setattr(tokens, "OFTEN", 1.0)


@pytest.mark.usefixtures("often")
def test_all_of_them_are_answered_and_the_tape_is_the_same_again() -> None:
    found = world.one(2, small())
    assert found.violations == []
    kinds = {what for what in found.counts if what.startswith("visitors: ")}
    assert len(kinds - {"visitors: lacks_room"}) == 14
    assert found.counts["merges executed again"] > 0, "after the newest snapshots"
    assert all(found.counts[f"tokens: {kind}"] for kind in ("rotates", "limits", "asks_wrongly"))
    assert found.looks["tokens"]


@pytest.mark.usefixtures("often")
def test_a_token_that_works_when_it_is_revoked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets_to(self: Registry, name: str) -> None: ...

    monkeypatch.setattr(Registry, "delete_token", forgets_to)
    said = world.one(1, small()).violations
    assert any("GET /access is answered with 200" in v for v in said)


@pytest.mark.usefixtures("often")
def test_a_secret_that_is_replaced_and_works_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap is for ever, whatever was asked for."""
    rotated = TokenRecord.rotated

    def lasting(self: TokenRecord, new: str, now: float, overlap_s: float) -> TokenRecord:
        return rotated(self, new, now, overlap_s or OVERLAP_S_MAX)

    monkeypatch.setattr(TokenRecord, "rotated", lasting)
    said = world.one(3, small()).violations
    assert any("GET /access is answered with 200" in v for v in said)


@pytest.mark.usefixtures("often")
def test_a_limit_that_does_not_hold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "matches", lambda patterns, name: True)
    said = world.one(3, small()).violations
    assert any("a token for other runs sees" in v for v in said)


@pytest.mark.usefixtures("often")
def test_a_refusal_that_is_not_noted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def note(*_: object) -> None: ...

    monkeypatch.setattr(Audit, "note", note)
    said = world.one(3, small()).violations
    assert any("was refused, and the audit log says []" in v for v in said)


def test_an_audit_that_finds_a_fault_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def verify(*_: object) -> audit.Verified:
        return audit.Verified(1, 0, 0, (audit.TapeDifference(1, "", "made up"),))

    monkeypatch.setattr(audit, "verify", verify)
    assert any(v.startswith("audit") for v in world.one(1, small()).violations)


def test_a_stream_is_heard_while_it_goes_on(tmp_path: Any) -> None:
    """Until the listener goes away: then the process may open as many as before."""

    async def main() -> tuple[int, str, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        broker, net = MemoryBroker(), Net(loop, Random(1), small(), world.Counter())
        machine = Host(
            loop, "coordinator", tmp_path, lambda *a: FarBus(broker, a[0], a[1], net), coordinator
        )
        machine.start()
        await asyncio.sleep(5.0)
        status, said = await RestCalls(machine).listen("/events/stream", "", 40.0)
        await asyncio.sleep(1.0)
        streams = machine.app.coordinator.api.state.streams  # type: ignore[union-attr]
        return status, said, streams.open

    status, said, open_ = play(main(), Random(1))
    assert status == 200 and said.startswith(": open") and ": still here" in said
    assert open_ == 0
