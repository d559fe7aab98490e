"""A client waits as long as a coordinator may take, where that is more than a moment."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from waiting import until

from diloco_client import Client, Silent, answers
from diloco_coordinator.api import runs_io, vaults_io
from diloco_coordinator.exports.child_io import ExportFault
from diloco_shared.protocol import subjects
from diloco_shared.spec.run import Data

SPEC: dict[str, Any] = {
    "name": "demo",
    "budget": {"steps": 96},
    "algorithm": {"fragments": 2, "sync_every_steps": 8},
}


def asked_by(call: Callable[[Client], Any]) -> httpx.Request:
    """What a call of the client asks; its answer never comes."""
    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        raise httpx.ReadTimeout("timed out")

    with (
        Client("http://c", "t0ken", transport=httpx.MockTransport(handle)) as client,
        pytest.raises(Silent) as caught,
    ):
        call(client)
    (request,) = asked
    assert caught.value.changes == (request.method != "GET")
    assert f"within {waited_s(request):g} s" in str(caught.value)
    return request


def waited_s(request: httpx.Request) -> float:
    return float(request.extensions["timeout"]["read"])


class Exporter:
    """Takes nothing out."""

    async def make(self, *_: Any) -> None:
        raise ExportFault("not here")


CALLS: dict[str, Callable[[Client], Any]] = {
    "rounds": lambda c: c.rounds("demo"),
    "newest rounds": lambda c: c.rounds("demo", newest=2),
    "show": lambda c: c.show_checkpoint("demo", 3),
    "list": lambda c: c.all_checkpoints("demo"),
    "list all": lambda c: c.checkpoints(),
    "make": lambda c: c.checkpoint("demo"),
    "go back": lambda c: c.restore("demo", 3),
    "restore": lambda c: c.restore("demo", 3, as_run="again"),
    "export": lambda c: c.export("demo", checkpoint="3"),
    "remove": lambda c: c.delete_checkpoint("demo", 3),
    "remove stored": lambda c: c.delete_stored("gone.ab12/1"),
    "remove folder": lambda c: c.delete_folder("gone.ab12"),
    "submit": lambda c: c.create_run_from("gone.ab12/000001", {**SPEC, "name": "other"}),
}


@pytest.mark.parametrize("name", CALLS)
async def test_whoever_asks_for_what_is_kept_waits_until_the_coordinator_gives_up(
    name: str, world: Any, kept: Any, closed: Any, status: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And hears from it what does not answer."""
    seconds, answered = [], vaults_io._answered

    async def noted(threads: Any, read: Any, seconds_max: float) -> Any:
        seconds.append(seconds_max)
        return await answered(threads, read, seconds_max)

    request = asked_by(CALLS[name])
    world.exporter = Exporter()
    async with world.coordinator() as desk:
        kept((await desk.ask("POST", "/v1/runs", SPEC)).json()["spec"], 3)
        kept({**SPEC, "name": "gone", "id": "ab12"}, 1)
        await world.tape("demo", *(closed(n) for n in range(4)))
        await world.bus.purge(subjects.tape_stream("demo"), ">", below_seq=4)  # it is archived
        await world.says(status())
        await until(lambda: desk.registry.statuses)
        monkeypatch.setattr(vaults_io, "_answered", noted)
        path, body = request.url.raw_path.decode(), json.loads(request.content or b"null")
        answer = await desk.ask(request.method, path, body)
        assert answer.is_success, answer.text
    assert seconds and waited_s(request) >= sum(seconds) + answers.MARGIN_S


def test_whoever_deletes_a_run_waits_until_its_keys_are_removed() -> None:
    request = asked_by(lambda client: client.delete_run("demo"))
    (most,) = (m.le for m in Data.model_fields["virtual_shards"].metadata if hasattr(m, "le"))
    left_s = runs_io.LEAVE_LOOKS * runs_io.LEAVE_LOOK_S
    assert waited_s(request) == answers.DELETE_S >= left_s + most * 0.009


def test_whoever_wants_longer_answers_waits_for_them() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(204))
    with Client("http://c", "t0ken", transport=transport, timeout_s=900.0) as client:
        assert client._timeout(answers.DELETE_S).read == 900.0
