"""Typed client of the REST API, over httpx.

    with Client("http://127.0.0.1:8400", token) as client:
        client.create_run(spec)

Every method raises ApiError with the server's own words, or Unreachable.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx


class ApiError(Exception):
    """The server said no: `status`, `title`, `detail`, and per-field `errors` if there are any."""

    def __init__(
        self, status: int, title: str, detail: str, errors: list[dict[str, str]] | None = None
    ) -> None:
        super().__init__(f"{title}: {detail}")
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = errors or []


class Unreachable(Exception):
    """Nobody answers at the address."""


class Client:
    """One server. Times out after `timeout_s` seconds a request."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = self._http.request(method, path, **kwargs)
        except httpx.HTTPError as error:
            raise Unreachable(f"no coordinator answers at {self.url} ({error})") from None
        if response.is_success:
            return response.json() if response.content else None
        try:
            problem = response.json()
        except ValueError:
            problem = {}
        raise ApiError(
            response.status_code,
            str(problem.get("title", response.reason_phrase)),
            str(problem.get("detail", response.text[:500])),
            problem.get("errors"),
        )

    # --- health --------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the coordinator answers and has its bus."""
        try:
            return self._http.get("/readyz").is_success
        except httpx.HTTPError:
            return False

    # --- runs ----------------------------------------------------------------------------------

    def create_run(self, spec: dict[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = self._call("POST", "/v1/runs", json=spec)
        return run

    def runs(self) -> list[dict[str, Any]]:
        """Every run, page by page."""
        return list(self._pages("/v1/runs", "runs", {}))

    def run(self, name: str) -> dict[str, Any]:
        run: dict[str, Any] = self._call("GET", f"/v1/runs/{name}")
        return run

    def pause(self, name: str) -> dict[str, Any]:
        return self._verb(name, "pause")

    def resume(self, name: str) -> dict[str, Any]:
        return self._verb(name, "resume")

    def stop(self, name: str) -> dict[str, Any]:
        return self._verb(name, "stop")

    def _verb(self, name: str, verb: str) -> dict[str, Any]:
        run: dict[str, Any] = self._call("POST", f"/v1/runs/{name}/{verb}")
        return run

    def set_quorum(self, name: str, quorum: int) -> dict[str, Any]:
        run: dict[str, Any] = self._call("PATCH", f"/v1/runs/{name}", json={"quorum": quorum})
        return run

    def delete_run(self, name: str) -> None:
        self._call("DELETE", f"/v1/runs/{name}")

    def rounds(self, name: str, after: int = 0) -> list[dict[str, Any]]:
        """Every closed round after the tape sequence `after`."""
        return list(self._pages(f"/v1/runs/{name}/rounds", "rounds", {"after": after}))

    def metrics(self, name: str) -> dict[str, Any]:
        metrics: dict[str, Any] = self._call("GET", f"/v1/runs/{name}/metrics")
        return metrics

    # --- members, events, chaos ----------------------------------------------------------------

    def members(self) -> list[dict[str, Any]]:
        members: list[dict[str, Any]] = self._call("GET", "/v1/members")["members"]
        return members

    def member(self, name: str) -> dict[str, Any]:
        member: dict[str, Any] = self._call("GET", f"/v1/members/{name}")
        return member

    def forget(self, name: str) -> None:
        self._call("DELETE", f"/v1/members/{name}")

    def events(self, run: str = "", after: int = 0) -> list[dict[str, Any]]:
        """Every event after the cursor `after`, of one run or of all."""
        found: list[dict[str, Any]] = []
        while True:
            params = {"run": run, "after": after, "limit": 1000}
            page = self._call("GET", "/v1/events", params=params)
            found += page["events"]
            if len(page["events"]) < 1000:
                return found
            after = page["next"]

    def chaos(self, kind: str, target: str, **settings: Any) -> dict[str, Any]:
        """Inflict a fault; `settings`: at_step, after_s, duration_s, factor."""
        body = {"kind": kind, "target": target, **settings}
        fault: dict[str, Any] = self._call("POST", "/v1/chaos", json=body)
        return fault

    def faults(self) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = self._call("GET", "/v1/chaos")["faults"]
        return faults

    def _pages(self, path: str, key: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call("GET", path, params={**params, "limit": 1000})
            yield from page[key]
            if page["next"] is None:
                return
            params = {**params, "after": page["next"]}
