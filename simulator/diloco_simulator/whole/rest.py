"""A user's requests to the coordinator of a world: its own API, without a socket."""

import asyncio
from typing import Any

import httpx

from diloco_simulator.whole.processes import TOKEN, CoordinatorApp, Machine

# As the product's own client waits, in virtual seconds.
TIMEOUT_S = 10.0


class NoAnswer(Exception):
    """The process is dead, stands still, died over it, or takes too long: nobody knows."""


class Rest:
    """To whatever process runs under the coordinator's name."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.under_way: set[asyncio.Task[None]] = set()

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> tuple[int, Any]:
        """(status, what it says) of `/v1` and `path`. Raises NoAnswer."""
        process, app = self.machine.process, self.machine.app
        if process is None or not isinstance(app, CoordinatorApp):
            raise NoAnswer("nobody listens")
        answer: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()

        async def asked() -> None:
            transport = httpx.ASGITransport(app.coordinator.api, raise_app_exceptions=False)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://coordinator/v1", headers=headers
            ) as client:
                response = await client.request(method, path, json=body)
            if not answer.done():
                answer.set_result(response)

        # It goes on when nobody waits for the answer any more, as behind a server.
        task = process.run(asked())
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await answer
        except TimeoutError:
            raise NoAnswer(f"{method} {path}: no answer") from None
        return response.status_code, response.json() if response.content else None
