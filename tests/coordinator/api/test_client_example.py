"""The script on the reference page of the Python client works, as it stands there."""

import asyncio
import runpy
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

import diloco_client

EXAMPLE = Path(__file__).parents[3] / "site" / "client_example.py"
RUN = "by-script"


class OfLoop(httpx.BaseTransport):
    """From a thread to an application that an event loop serves."""

    def __init__(self, app: Any) -> None:
        self.there, self.loop = httpx.ASGITransport(app), asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return asyncio.run_coroutine_threadsafe(self._answer(request), self.loop).result(60.0)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        answer = await self.there.handle_async_request(request)
        content = await answer.aread()
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script asks again every second."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))


async def test_the_script_submits_waits_reads_and_restores(
    world: Any,
    kept: Any,
    status: Any,
    closed: Any,
    term: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at_once: None,
) -> None:
    async with world.coordinator() as desk:
        (tmp_path / "diloco-data").mkdir()
        (tmp_path / "diloco-data" / "admin-token").write_text(f"{desk.token}\n")
        monkeypatch.chdir(tmp_path)
        there = partial(diloco_client.Client, transport=OfLoop(desk.app))
        monkeypatch.setattr(diloco_client, "Client", there)
        script = asyncio.create_task(asyncio.to_thread(runpy.run_path, str(EXAMPLE)))
        runs = desk.registry.runs
        await until(lambda: script.done() or RUN in runs)
        await world.tape(RUN, term, closed(1))
        await world.says(status(run=RUN))
        await until(lambda: script.done() or runs[RUN].checkpoint == 1)
        spec = runs[RUN].spec
        kept({**spec, "algorithm": {**spec["algorithm"], "fragments": 2}}, 1)  # as `kept` has them
        await world.tells("end", RUN)
        await until(lambda: "end" in [e.kind for _, e in desk.registry.told.after(0, RUN)])
        await world.says(status(run=RUN, state="finished"))
        await script
        assert {*runs} == {RUN, f"{RUN}-again"}
        said = capsys.readouterr().out
        assert "run-created" in said and "end end" in said
