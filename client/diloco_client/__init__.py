"""Typed client of the REST API, over httpx.

    with Client("http://127.0.0.1:8400", token) as client:
        client.create_run(spec)

Every method raises ApiError with the server's own words, or Unreachable.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from diloco_client.reaching import proxy_of, trusted, what_failed


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


class Silent(Unreachable):
    """Somebody took the request, and has not answered it in time."""


class Untrusted(Unreachable):
    """Somebody answers, and cannot prove to be the server."""


# What a request ends with when nobody is there; UnicodeError where no name of a host can be so.
_NOBODY = (httpx.HTTPError, UnicodeError)
# Streams say something at least every 15 seconds; twice that is silence.
SILENCE_S = 35.0
# Before the first word of a sample, in seconds: a model is read and compiled, and the coordinator
# ends what takes more than three minutes.
SAMPLE_S = 200.0


class Client:
    """One server. Times out after `timeout_s` seconds a request.

    `ca`: a file with the certificates of the authorities to trust, instead of DILOCO_CA,
    SSL_CERT_FILE, or all known ones; ValueError for one that holds none, or for an address that is
    none. `environ`: where these and the proxy are looked for (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY,
    NO_PROXY), if not in the process's. An address of this machine is asked without a proxy.
    ImportError for a proxy that needs a package which is not here.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
        ca: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.url = url
        self.proxy = proxy_of(url, environ) if transport is None else ""
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=timeout_s,
                transport=transport,
                verify=trusted(url, ca, environ),
                proxy=self.proxy or None,
                # What is looked for there is said above; it would also take passwords of ~/.netrc.
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            through = f", or its proxy {_without_password(self.proxy)}," if self.proxy else ""
            raise ValueError(f"{url}{through} is no address: {error}") from None

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
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise self._silent() from None
        except _NOBODY as error:
            raise self._unreachable(error, "no coordinator answers at") from None
        if response.is_success:
            return self._body(response) if response.content else None
        raise _refusal(response)

    def _body(self, response: httpx.Response) -> Any:
        """ApiError for the page of something else, as of a proxy that asks for a password."""
        try:
            return response.json()
        except ValueError:
            text = f"what answers at {self.url} sends no JSON: is it the address of a coordinator?"
            raise ApiError(response.status_code, "No API there", text) from None

    def _silent(self) -> Silent:
        """A connection was made: to say that nobody is there would blame the wrong process."""
        waited_s = self._http.timeout.read or 0.0
        return Silent(
            f"the coordinator at {self.url}{self._through()} took the request, and has not "
            f"answered it within {waited_s:g} s"
        )

    def _through(self) -> str:
        return f", through the proxy {_without_password(self.proxy)}" if self.proxy else ""

    def _unreachable(self, error: httpx.HTTPError | UnicodeError, what: str) -> Unreachable:
        if isinstance(error, UnicodeError):
            return Unreachable(f"{what} {self.url} (no host can have that name)")
        if distrust := what_failed(error, self.url):
            return Untrusted(distrust)
        return Unreachable(f"{what} {self.url}{self._through()} ({error})")

    # --- health --------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether the coordinator answers and has its bus."""
        try:
            return self._http.get("/readyz").is_success
        except _NOBODY:
            return False

    def trouble(self) -> str:
        """Why the coordinator can do nothing although it answers; "" if it can."""
        try:
            found = self._http.get("/readyz")
        except _NOBODY:
            return ""
        return found.text.strip() if found.status_code == 503 else ""

    # --- runs ----------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Answers if the process does, whatever its bus does."""
        health: dict[str, Any] = self._call("GET", "/healthz")
        return health

    def create_run(self, spec: dict[str, Any], *, idempotency_key: str = "") -> dict[str, Any]:
        """Submit a run; with a key, a repeat of the same request creates nothing twice."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        run: dict[str, Any] = self._call("POST", "/v1/runs", json=spec, headers=headers)
        return run

    def runs(self) -> list[dict[str, Any]]:
        """Every run, page by page."""
        return list(self._pages("/v1/runs", "runs", {}))

    def run(self, name: str) -> dict[str, Any]:
        run: dict[str, Any] = self._call("GET", f"/v1/runs/{_part(name)}")
        return run

    def pause(self, name: str) -> dict[str, Any]:
        return self._verb(name, "pause")

    def resume(self, name: str) -> dict[str, Any]:
        return self._verb(name, "resume")

    def stop(self, name: str) -> dict[str, Any]:
        return self._verb(name, "stop")

    def _verb(self, name: str, verb: str) -> dict[str, Any]:
        run: dict[str, Any] = self._call("POST", f"/v1/runs/{_part(name)}/{verb}")
        return run

    def set_quorum(self, name: str, quorum: int, *, revision: int | None = None) -> dict[str, Any]:
        """Change K; with the `revision` of a run's view, only if nobody changed it since."""
        headers = {} if revision is None else {"If-Match": f'"{revision}"'}
        path, body = f"/v1/runs/{_part(name)}", {"quorum": quorum}
        run: dict[str, Any] = self._call("PATCH", path, json=body, headers=headers)
        return run

    def delete_run(self, name: str) -> None:
        self._call("DELETE", f"/v1/runs/{_part(name)}")

    def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[dict[str, Any]]:
        """Every closed round after the tape sequence `after`; of these the `newest` so many alone,
        unless that is 0: up to 1000."""
        wanted = {"after": after, "newest": newest} if newest else {"after": after}
        found = list(self._pages(f"/v1/runs/{_part(name)}/rounds", "rounds", wanted))
        return found[-newest:]  # a coordinator before 0.3 tells of all

    def metrics(self, name: str) -> dict[str, Any]:
        metrics: dict[str, Any] = self._call("GET", f"/v1/runs/{_part(name)}/metrics")
        return metrics

    def recoveries(self, name: str) -> list[dict[str, Any]]:
        """How learners came back, or came new to the run."""
        page = self._call("GET", f"/v1/runs/{_part(name)}/recoveries")
        return list(page["recoveries"])

    # --- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, run: str) -> dict[str, Any]:
        """Begin a run-wide checkpoint; `status.checkpoint_state` of the run tells the rest."""
        begun: dict[str, Any] = self._call("POST", f"/v1/runs/{_part(run)}/checkpoints")
        return begun

    def checkpoints(self, run: str = "") -> list[dict[str, Any]]:
        """Complete ones of a run, or of all that are kept where most are; oldest first."""
        return self.all_checkpoints(run)["checkpoints"]

    def all_checkpoints(self, run: str = "") -> dict[str, list[dict[str, Any]]]:
        """As `checkpoints`, and beside them those that are `damaged`: `ref`, `run` and `reason`."""
        path = f"/v1/runs/{_part(run)}/checkpoints" if run else "/v1/checkpoints"
        found: dict[str, list[dict[str, Any]]] = self._call("GET", path)
        return {"damaged": [], **found}  # a coordinator before 0.3 leaves them out

    def show_checkpoint(self, run: str, number: int) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", f"/v1/runs/{_part(run)}/checkpoints/{number}")
        return found

    def delete_checkpoint(self, run: str, number: int) -> None:
        self._call("DELETE", f"/v1/runs/{_part(run)}/checkpoints/{number}")

    def delete_stored(self, ref: str) -> None:
        """Remove a checkpoint FOLDER/NUMBER, of a deleted run perhaps."""
        folder, _, number = ref.partition("/")
        self._call("DELETE", f"/v1/checkpoints/{_part(folder)}/{_part(number)}")

    def restore(self, run: str, number: int, *, as_run: str = "") -> dict[str, Any]:
        """Take a run back to a checkpoint, or begin a new one with it."""
        path = f"/v1/runs/{_part(run)}/checkpoints/{number}/restore"
        body = {"as": as_run} if as_run else {}
        restored: dict[str, Any] = self._call("POST", path, json=body)
        return restored

    def begin_again(self, run: str) -> dict[str, Any]:
        """A new epoch from the published parameters, for a run whose state no syncer has."""
        begun: dict[str, Any] = self._call("POST", f"/v1/runs/{_part(run)}/begin-again")
        return begun

    def create_run_from(self, checkpoint: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Submit a run that begins with a checkpoint: FOLDER/NUMBER, or an address of its own."""
        params = {"checkpoint": checkpoint}
        path = "/v1/checkpoints/submit"
        run: dict[str, Any] = self._call("POST", path, json=spec, params=params)
        return run

    # --- exports -------------------------------------------------------------------------------

    def export(
        self,
        run: str,
        *,
        version: int | None = None,
        checkpoint: str | None = None,
        dtype: str = "fp32",
    ) -> dict[str, Any]:
        """Begin to take the weights out; `show_export` tells how far it is."""
        body = {"version": version, "checkpoint": checkpoint, "dtype": dtype}
        begun: dict[str, Any] = self._call("POST", f"/v1/runs/{_part(run)}/exports", json=body)
        return begun

    def exports(self, run: str) -> list[dict[str, Any]]:
        """Those of a run, oldest first."""
        found: list[dict[str, Any]] = self._call("GET", f"/v1/runs/{_part(run)}/exports")["exports"]
        return found

    def show_export(self, run: str, export: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", f"/v1/runs/{_part(run)}/exports/{_part(export)}")
        return found

    def delete_export(self, run: str, export: str) -> None:
        self._call("DELETE", f"/v1/runs/{_part(run)}/exports/{_part(export)}")

    def export_file(self, run: str, export: str, file: str, start: int = 0) -> Iterator[bytes]:
        """A file from byte `start` on, in pieces; Unreachable when it is cut off."""
        path = f"/v1/runs/{_part(run)}/exports/{_part(export)}/files/{_part(file)}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                if start and response.status_code != 206:
                    raise ApiError(response.status_code, "Not a part", f"{file}: all of it came")
                # As it comes: what was gathered first would be lost with a link that breaks.
                yield from response.iter_bytes()
        except _NOBODY as error:
            raise self._unreachable(error, f"{file} was cut off from") from None

    # --- members, events, chaos ----------------------------------------------------------------

    def members(self) -> list[dict[str, Any]]:
        """Every process that is or was a member."""
        members: list[dict[str, Any]] = self._call("GET", "/v1/members")["members"]
        return members

    def all_members(self) -> dict[str, Any]:
        """`members`, and beside them `cut_off`: why that may be old by now, else empty."""
        found: dict[str, Any] = self._call("GET", "/v1/members")
        if "cut_off" not in found:  # a coordinator before 0.3 says it elsewhere alone
            trouble = self.trouble()
            found["cut_off"] = f"{trouble}; this is what was heard last" if trouble else ""
        return found

    def member(self, name: str) -> dict[str, Any]:
        member: dict[str, Any] = self._call("GET", f"/v1/members/{_part(name)}")
        return member

    def drain(self, name: str) -> dict[str, Any]:
        """Take a member's work away and give it no more, until `undrain`."""
        member: dict[str, Any] = self._call("POST", f"/v1/members/{_part(name)}/drain")
        return member

    def undrain(self, name: str) -> dict[str, Any]:
        member: dict[str, Any] = self._call("DELETE", f"/v1/members/{_part(name)}/drain")
        return member

    def forget(self, name: str) -> None:
        self._call("DELETE", f"/v1/members/{_part(name)}")

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
        """Inflict a fault; `settings`: run, at_step, after_s, duration_s, factor."""
        body = {"kind": kind, "target": target, **settings}
        fault: dict[str, Any] = self._call("POST", "/v1/chaos", json=body)
        return fault

    def faults(self) -> list[dict[str, Any]]:
        faults: list[dict[str, Any]] = self._call("GET", "/v1/chaos")["faults"]
        return faults

    def plan(self, **wishes: Any) -> dict[str, Any]:
        """Settings for hardware and links that one may not have yet: see `diloco plan --help`.

        `params` and `chips` must be given; the answer has `settings` with their `reasons`,
        `predicted`, `hub` and `sensitivity`. ApiError 422 where no settings do.
        """
        found: dict[str, Any] = self._call("POST", "/v1/plan", json=wishes)
        return found

    # --- tokens --------------------------------------------------------------------------------

    def access(self) -> dict[str, Any]:
        """What the token in use may do, and whether faults are allowed there."""
        access: dict[str, Any] = self._call("GET", "/v1/access")
        return access

    def tokens(self) -> list[dict[str, Any]]:
        tokens: list[dict[str, Any]] = self._call("GET", "/v1/tokens")["tokens"]
        return tokens

    def make_token(
        self,
        name: str,
        scopes: Sequence[str],
        *,
        runs: Sequence[str] = (),
        sites: Sequence[str] = (),
        **expiry: Any,
    ) -> str:
        """The new token, which the server shows this once.

        `scopes` of read, operate, fault and administer. `runs` and `sites` limit it to names, or
        beginnings of names with a * behind them. `expiry`: expires_in_s, expires_at (seconds since
        1970) or never=True; 90 days if nothing is said.
        """
        body = {"name": name, "scopes": [*scopes], "runs": [*runs], "sites": [*sites], **expiry}
        return str(self._call("POST", "/v1/tokens", json=body)["token"])

    def rotate_token(self, name: str, *, overlap_s: float = 600.0) -> str:
        """A new secret under the same name; the old one stays good for `overlap_s` seconds."""
        path, body = f"/v1/tokens/{_part(name)}/rotate", {"overlap_s": overlap_s}
        return str(self._call("POST", path, json=body)["token"])

    def revoke_token(self, name: str) -> None:
        self._call("DELETE", f"/v1/tokens/{_part(name)}")

    def audit(self, newest: int = 200, *, actor: str = "", after: int = 0) -> list[dict[str, Any]]:
        """Who changed what, and who was refused; oldest first. At most 1000 rows."""
        params = {"limit": newest, "actor": actor, "after": after}
        rows: list[dict[str, Any]] = self._call("GET", "/v1/audit", params=params)["rows"]
        return rows

    # --- streams -------------------------------------------------------------------------------

    def stream_events(self, run: str = "", after: int = 0) -> Iterator[dict[str, Any]]:
        """Events as they happen, without end; go on after a break with the last one's `seq`."""
        return self._stream("/v1/events/stream", {"run": run, "after": after})

    def stream_status(self, name: str) -> Iterator[dict[str, Any]]:
        """The run whenever it changes; ends when it is over."""
        return self._stream(f"/v1/runs/{_part(name)}/stream", {})

    def sample(self, run: str, **wish: Any) -> Iterator[dict[str, Any]]:
        """What the run's exported model writes: {"begun"}, {"text"} …, {"done"} or {"failed"}.

        `wish`: prompt, tokens, temperature, seed, chat, export; see `POST /v1/runs/RUN/samples`.
        """
        path = f"/v1/runs/{_part(run)}/samples"
        return self._stream(path, {}, "POST", silence_s=SAMPLE_S, json=wish)

    def _stream(
        self,
        path: str,
        params: dict[str, Any],
        method: str = "GET",
        *,
        silence_s: float = SILENCE_S,
        **sent: Any,
    ) -> Iterator[dict[str, Any]]:
        timeout = httpx.Timeout(self._http.timeout.connect, read=silence_s)
        try:
            with self._http.stream(
                method, path, params=params, timeout=timeout, **sent
            ) as response:
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except _NOBODY as error:
            raise self._unreachable(error, "a stream ended from") from None

    def _pages(self, path: str, key: str, params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while True:
            page = self._call("GET", path, params={**params, "limit": 1000})
            yield from page[key]
            if page["next"] is None:
                return
            params = {**params, "after": page["next"]}


def _part(name: str) -> str:
    """A name as one part of a path, whatever it contains."""
    return quote(name, safe="") or "-"


def _without_password(proxy: str) -> str:
    """An address without what stands before its host."""
    scheme, _, rest = proxy.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _refusal(response: httpx.Response) -> ApiError:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):  # a proxy's page, perhaps
        problem = {}
    return ApiError(
        response.status_code,
        str(problem.get("title", response.reason_phrase)),
        str(problem.get("detail", response.text[:500])),
        problem.get("errors"),
    )
