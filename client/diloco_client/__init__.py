"""Typed client of the REST API, over httpx.

    with Client("http://127.0.0.1:8400", token) as client:
        client.create_run(spec)

Every method raises ApiError, with the server's own words or for what no server needs to be asked,
or Unreachable.
"""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, Self

import httpx

from diloco_client.answers import (
    BEGINNING,
    CHECKPOINT_S,
    DELETE_S,
    LIST_S,
    PAGE,
    REMOVE_S,
    ROUNDS_S,
    SUBMIT_S,
    Asking,
    at_once,
    began_anew,
    part,
    read,
    refusal,
)
from diloco_client.answers import ApiError as ApiError
from diloco_client.answers import Cursor as Cursor
from diloco_client.answers import Lost as Lost
from diloco_client.answers import Silent as Silent
from diloco_client.answers import Told as Told
from diloco_client.answers import Unanswered as Unanswered
from diloco_client.answers import Unreachable as Unreachable
from diloco_client.answers import Untrusted as Untrusted
from diloco_client.reaching import cut_off, proxy_of, trusted, what_failed, without_password

# What a request ends with when nobody is there; UnicodeError where no name of a host can be so.
_NOBODY = (httpx.HTTPError, UnicodeError)
# Streams say something at least every 15 seconds; twice that is silence.
SILENCE_S = 35.0
# Before the first word of a sample, in seconds: a model is read and compiled, and the coordinator
# ends what takes more than three minutes.
SAMPLE_S = 200.0
# So many of the newest rounds are asked for by their number, as the API allows.
NEWEST_MAX = 1000
OVER = ("finished", "stopped")


class Client:
    """One server. Times out after `timeout_s` seconds a request; where a coordinator may take more,
    after what `diloco_client.answers` says.

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
            through = f", or its proxy {without_password(self.proxy)}," if self.proxy else ""
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
        """Let go of its connections; `with` does it by itself."""
        self._http.close()

    def _call(
        self,
        method: str,
        path: str,
        *,
        wait_s: float = 0.0,
        has: tuple[str, ...] = (),
        **kwargs: Any,
    ) -> dict[str, Any]:
        """`wait_s`: for how long an answer is waited for, if that is more than `timeout_s`. `has`:
        what a coordinator tells there."""
        timeout, changes = self._timeout(wait_s), method != "GET"
        try:
            response = self._http.send(self._request(method, path, timeout=timeout, **kwargs))
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise self._silent(timeout, changes) from None
        except _NOBODY as error:
            if cut_off(error):
                raise self._lost(error, changes) from None
            raise self._unreachable(error, "no coordinator answers at") from None
        if not response.is_success:
            raise refusal(response, self.url)
        return read(response, self.url, has) if response.content else {}

    def _request(self, method: str, path: str, **sent: Any) -> httpx.Request:
        """ApiError for words that no request can carry."""
        try:
            return self._http.build_request(method, path, **sent)
        except UnicodeEncodeError as error:
            what = repr(error.object[error.start : error.end])
            text = f"no request can carry {what} at that place: leave it out, or type it anew"
            raise ApiError(422, "Not a text", text) from None

    def _timeout(self, wait_s: float) -> httpx.Timeout:
        usual = self._http.timeout
        read_s = max(usual.read or 0.0, wait_s)
        return httpx.Timeout(connect=usual.connect, read=read_s, write=usual.write, pool=usual.pool)

    def _silent(self, timeout: httpx.Timeout, changes: bool) -> Silent:
        """A connection was made: to say that nobody is there would blame the wrong process."""
        return Silent(
            f"the coordinator at {self.url}{self._through()} took the request, and has not "
            f"answered it within {timeout.read or 0.0:g} s",
            changes=changes,
        )

    def _lost(self, error: Exception, changes: bool) -> Lost:
        return Lost(
            f"the coordinator at {self.url}{self._through()} took the request, and its answer was "
            f"lost ({error})",
            changes=changes,
        )

    def _through(self) -> str:
        return f", through the proxy {without_password(self.proxy)}" if self.proxy else ""

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

    def health(self) -> dict[str, Any]:
        """Answers if the process does, whatever its bus does."""
        return self._call("GET", "/healthz")

    # --- runs ----------------------------------------------------------------------------------

    def create_run(self, spec: dict[str, Any], *, idempotency_key: str = "") -> dict[str, Any]:
        """Submit a run; with a key, a repeat of the same request creates nothing twice."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        return self._call("POST", "/v1/runs", wait_s=SUBMIT_S, json=spec, headers=headers)

    def runs(self) -> list[dict[str, Any]]:
        """Every run, page by page."""
        return list(self._pages("/v1/runs", "runs", {}))

    def run(self, name: str) -> dict[str, Any]:
        """One run: what was asked for, where it stands and why."""
        path = f"/v1/runs/{part(name)}"
        return self._call("GET", path, has=("name", "state"))

    def pause(self, name: str) -> dict[str, Any]:
        """Hold every learner of a run after its step."""
        return self._verb(name, "pause")

    def resume(self, name: str) -> dict[str, Any]:
        """Let a run that was held go on."""
        return self._verb(name, "resume")

    def stop(self, name: str) -> dict[str, Any]:
        """End a run before its budget is used up: it merges once more, and evaluates."""
        return self._verb(name, "stop")

    def _verb(self, name: str, verb: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/runs/{part(name)}/{verb}")

    def set_quorum(self, name: str, quorum: int, *, revision: int | None = None) -> dict[str, Any]:
        """Change K; with the `revision` of a run's view, only if nobody changed it since."""
        headers = {} if revision is None else {"If-Match": f'"{revision}"'}
        path, body = f"/v1/runs/{part(name)}", {"quorum": quorum}
        return self._call("PATCH", path, json=body, headers=headers)

    def delete_run(self, name: str) -> None:
        """Remove a run that is over, with everything the message server keeps of it."""
        self._call("DELETE", f"/v1/runs/{part(name)}", wait_s=DELETE_S)

    def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[dict[str, Any]]:
        """Every closed round after the tape sequence `after`; of these the `newest` so many alone,
        unless that is 0. More than 1000 of these take as long as all of them."""
        asked = newest if newest <= NEWEST_MAX else 0
        # A coordinator before 0.3 tells of all.
        return [*deque(self.each_round(name, after, asked), newest or None)]

    def each_round(
        self, name: str, after: int = 0, newest: int = 0, *, further: Asking = at_once
    ) -> Iterator[dict[str, Any]]:
        """As `rounds`, page by page: a long run has more than anybody keeps in memory. `further`
        asks for every page but the first: whoever has read many may ask again for one."""
        wanted = {"after": after} | ({"newest": newest} if newest else {})
        path = f"/v1/runs/{part(name)}/rounds"
        yield from self._pages(path, "rounds", wanted, wait_s=ROUNDS_S, further=further)

    def metrics(self, name: str) -> dict[str, Any]:
        """The losses of a run, and other figures of it."""
        path = f"/v1/runs/{part(name)}/metrics"
        return self._call("GET", path, has=("evaluations",))

    def recoveries(self, name: str) -> list[dict[str, Any]]:
        """How learners came back, or came new to the run."""
        page = self._call("GET", f"/v1/runs/{part(name)}/recoveries", has=("recoveries",))
        return list(page["recoveries"])

    # --- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, run: str) -> dict[str, Any]:
        """Begin a run-wide checkpoint; `status.checkpoint_state` of the run tells the rest."""
        path = f"/v1/runs/{part(run)}/checkpoints"
        return self._call("POST", path, wait_s=CHECKPOINT_S, has=("number",))

    def checkpoints(self, run: str = "") -> list[dict[str, Any]]:
        """Complete ones of a run, or of all that are kept where most are; oldest first."""
        return self.all_checkpoints(run)["checkpoints"]

    def all_checkpoints(self, run: str = "") -> dict[str, list[dict[str, Any]]]:
        """As `checkpoints`, and beside them those that are `damaged`: `ref`, `run` and `reason`.

        And `tapes`, with `ref` and `run`: what is left of the tapes of deleted runs. Page by page:
        a coordinator reads a manifest for each, from a place that may be far away.
        """
        path = f"/v1/runs/{part(run)}/checkpoints" if run else "/v1/checkpoints"
        found: dict[str, list[dict[str, Any]]] = {"checkpoints": [], "damaged": [], "tapes": []}
        after: str | None = ""
        while after is not None:
            params = {"limit": PAGE} | ({"after": after} if after else {})
            page = self._call("GET", path, wait_s=LIST_S, has=("checkpoints",), params=params)
            found["checkpoints"] += page["checkpoints"]
            # A coordinator before 0.3 leaves these out, and knows no pages.
            for kind in ("damaged", "tapes"):
                found[kind] += page.get(kind, [])
            after = page.get("next")
        return found

    def show_checkpoint(self, run: str, number: int) -> dict[str, Any]:
        """What one checkpoint holds."""
        path = f"/v1/runs/{part(run)}/checkpoints/{number}"
        return self._call("GET", path, wait_s=CHECKPOINT_S)

    def delete_checkpoint(self, run: str, number: int) -> None:
        """Remove one, of a run that is there."""
        self._call("DELETE", f"/v1/runs/{part(run)}/checkpoints/{number}", wait_s=REMOVE_S)

    def delete_stored(self, ref: str) -> None:
        """Remove a checkpoint FOLDER/NUMBER, of a deleted run perhaps."""
        folder, _, number = ref.partition("/")
        if not (number.isascii() and number.isdecimal()):
            raise ApiError(404, "No such checkpoint", f"{ref!r} is not FOLDER/NUMBER")
        path = f"/v1/checkpoints/{part(folder)}/{number}"
        self._call("DELETE", path, wait_s=REMOVE_S)

    def delete_folder(self, folder: str) -> None:
        """Remove all that is left of a deleted run: its checkpoints, and its archived tape."""
        self._call("DELETE", f"/v1/checkpoints/{part(folder)}", wait_s=REMOVE_S)

    def restore(self, run: str, number: int, *, as_run: str = "") -> dict[str, Any]:
        """Take a run back to a checkpoint, or begin a new one with it: the `run` that is told."""
        path = f"/v1/runs/{part(run)}/checkpoints/{number}/restore"
        body = {"as": as_run} if as_run else {}
        wait_s = SUBMIT_S if as_run else CHECKPOINT_S
        return self._call("POST", path, wait_s=wait_s, json=body)

    def begin_again(self, run: str) -> dict[str, Any]:
        """A new epoch from the published parameters, for a run whose state no syncer has."""
        return self._call("POST", f"/v1/runs/{part(run)}/begin-again")

    def create_run_from(self, checkpoint: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Submit a run that begins with a checkpoint: FOLDER/NUMBER, or an address of its own."""
        params = {"checkpoint": checkpoint}
        path = "/v1/checkpoints/submit"
        return self._call("POST", path, wait_s=SUBMIT_S, json=spec, params=params)

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
        path = f"/v1/runs/{part(run)}/exports"
        return self._call("POST", path, wait_s=CHECKPOINT_S, json=body)

    def exports(self, run: str) -> list[dict[str, Any]]:
        """Those of a run, oldest first."""
        page = self._call("GET", f"/v1/runs/{part(run)}/exports", has=("exports",))
        found: list[dict[str, Any]] = page["exports"]
        return found

    def show_export(self, run: str, export: str) -> dict[str, Any]:
        """One export: its state, and its files once they are there."""
        return self._call("GET", f"/v1/runs/{part(run)}/exports/{part(export)}")

    def delete_export(self, run: str, export: str) -> None:
        """Remove an export for good; one that is being made is ended."""
        self._call("DELETE", f"/v1/runs/{part(run)}/exports/{part(export)}")

    def export_file(self, run: str, export: str, file: str, start: int = 0) -> Iterator[bytes]:
        """A file from byte `start` on, in pieces; Unreachable when it is cut off."""
        path = f"/v1/runs/{part(run)}/exports/{part(export)}/files/{part(file)}"
        headers = {"Range": f"bytes={start}-"} if start else {}
        timeout = httpx.Timeout(self._http.timeout.connect, read=SILENCE_S)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    response.read()
                    raise refusal(response, self.url)
                if start and response.status_code != 206:
                    raise ApiError(response.status_code, "Not a part", f"{file}: all of it came")
                # As it comes: what was gathered first would be lost with a link that breaks.
                yield from response.iter_bytes()
        except _NOBODY as error:
            raise self._unreachable(error, f"{file} was cut off from") from None

    # --- members, events, faults, plans ---------------------------------------------------------

    def members(self) -> list[dict[str, Any]]:
        """Every process that is or was a member."""
        page = self._call("GET", "/v1/members", has=("members",))
        return list(page["members"])

    def all_members(self) -> dict[str, Any]:
        """`members`, and beside them `cut_off`: why that may be old by now, else empty."""
        found = self._call("GET", "/v1/members", has=("members",))
        if "cut_off" not in found:  # a coordinator before 0.3 says it elsewhere alone
            trouble = self.trouble()
            found["cut_off"] = f"{trouble}; this is what was heard last" if trouble else ""
        return found

    def member(self, name: str) -> dict[str, Any]:
        """One process: what it works for, and how it does."""
        return self._call("GET", f"/v1/members/{part(name)}")

    def drain(self, name: str) -> dict[str, Any]:
        """Take a member's work away and give it no more, until `undrain`."""
        return self._call("POST", f"/v1/members/{part(name)}/drain")

    def undrain(self, name: str) -> dict[str, Any]:
        """Let a drained member have work again."""
        return self._call("DELETE", f"/v1/members/{part(name)}/drain")

    def forget(self, name: str) -> None:
        """Free the place of a member that is gone and will not come back."""
        self._call("DELETE", f"/v1/members/{part(name)}")

    def events(self, run: str = "", after: int = 0) -> list[dict[str, Any]]:
        """Every event after the number `after`, of one run or of all."""
        return self.events_since(run, (after, "")).events

    def events_since(self, run: str = "", cursor: Cursor = BEGINNING) -> Told:
        """As `events`, for whoever asks now and then; all of them where events were lost."""
        found, again = list[dict[str, Any]](), False
        while True:
            # Two coordinators behind one address may differ in what they have seen of a loss: each
            # would say for ever that the other's mark is not its own. One beginning is enough.
            after, mark = (cursor[0], "") if again else cursor
            params = {"run": run, "after": after, "mark": mark, "limit": 1000}
            page = self._call("GET", "/v1/events", has=("events",), params=params)
            if after > 0 and began_anew(page, after):
                found, cursor, again = [], BEGINNING, True
                continue
            found += page["events"]
            newest = page["events"][-1]["seq"] if page["events"] else after
            cursor = (newest, page.get("mark", ""))
            if len(page["events"]) < 1000:
                return Told(found, cursor, again)

    def chaos(
        self, kind: str, target: str, *, idempotency_key: str = "", **settings: Any
    ) -> dict[str, Any]:
        """Inflict a fault; `settings`: run, at_step, after_s, duration_s, factor. With a key, a
        repeat of the same request inflicts nothing twice."""
        headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
        body = {"kind": kind, "target": target, **settings}
        return self._call("POST", "/v1/chaos", json=body, headers=headers)

    def faults(self) -> list[dict[str, Any]]:
        """Faults that were inflicted: planned, applied and healed ones."""
        return list(self._call("GET", "/v1/chaos", has=("faults",))["faults"])

    def plan(self, **wishes: Any) -> dict[str, Any]:
        """Settings for hardware and links that one may not have yet: see `diloco plan --help`.

        `params` and `chips` must be given; the answer has `settings` with their `reasons`,
        `predicted`, `hub` and `sensitivity`. ApiError 422 where no settings do.
        """
        return self._call("POST", "/v1/plan", json=wishes)

    # --- tokens --------------------------------------------------------------------------------

    def access(self) -> dict[str, Any]:
        """What the token in use may do, and whether faults are allowed there."""
        return self._call("GET", "/v1/access")

    def tokens(self) -> list[dict[str, Any]]:
        """What each token may do, until when, and when it was used last."""
        return list(self._call("GET", "/v1/tokens", has=("tokens",))["tokens"])

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
        path, body = f"/v1/tokens/{part(name)}/rotate", {"overlap_s": overlap_s}
        return str(self._call("POST", path, json=body)["token"])

    def revoke_token(self, name: str) -> None:
        """Make a token useless at once."""
        self._call("DELETE", f"/v1/tokens/{part(name)}")

    def audit(self, newest: int = 200, *, actor: str = "", after: int = 0) -> list[dict[str, Any]]:
        """Who changed what, and who was refused; oldest first. At most 1000 rows."""
        params = {"limit": newest, "actor": actor, "after": after}
        page = self._call("GET", "/v1/audit", has=("rows",), params=params)
        rows: list[dict[str, Any]] = page["rows"]
        return rows

    # --- streams -------------------------------------------------------------------------------

    def stream_events(self, run: str = "", after: int = 0) -> Iterator[dict[str, Any]]:
        """Events as they happen, without end. Unreachable for every break, and also where it comes
        between two events; go on after it with the last one's `seq`."""
        yield from self._stream("/v1/events/stream", {"run": run, "after": after})
        raise self._ended("events may follow")

    def stream_status(self, name: str) -> Iterator[dict[str, Any]]:
        """The run whenever it changes; ends when it is over, or deleted.

        Of a run that is over, the last view has the `state` "finished" or "stopped"; of one that
        was deleted before it was seen to be over, it has another. Unreachable where the stream ends
        and the run goes on: ask for it again.
        """
        view: dict[str, Any] = {}
        for view in self._stream(f"/v1/runs/{part(name)}/stream", {}):
            yield view
        if view.get("state") in OVER:
            return
        try:
            now = self.run(name)
        except ApiError as error:
            if error.status == 404:
                return  # it was deleted
            raise
        if view and now.get("created_at") != view.get("created_at"):
            return  # it was deleted, and its name is another run's
        raise self._ended(f"run {name!r} is {now['state']}")

    def sample(self, run: str, **wish: Any) -> Iterator[dict[str, Any]]:
        """What the run's exported model writes: {"begun"}, {"text"} …, {"done"} or {"failed"}.

        `wish`: prompt, tokens, temperature, seed, chat, export; see `POST /v1/runs/RUN/samples`.
        Unreachable where it ends with neither of the last two.
        """
        path, piece = f"/v1/runs/{part(run)}/samples", dict[str, Any]()
        for piece in self._stream(path, {}, "POST", silence_s=SAMPLE_S, json=wish):
            yield piece
        if not {"done", "failed"} & piece.keys():
            raise self._ended("the text is not complete")

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
            request = self._request(method, path, params=params, timeout=timeout, **sent)
            with closing(self._http.send(request, stream=True)) as response:
                if not response.is_success:
                    response.read()
                    raise refusal(response, self.url)
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        yield self._event(line.removeprefix("data: "))
        except _NOBODY as error:
            raise self._unreachable(error, "a stream ended from") from None

    def _event(self, data: str) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError:  # not all of it came: what cuts a link may end it in good order
            text = f"a stream from {self.url}{self._through()} ended in the middle of an event"
            raise Unreachable(text) from None
        return event

    def _ended(self, why: str) -> Unreachable:
        return Unreachable(f"a stream from {self.url}{self._through()} ended, although {why}")

    def _pages(
        self,
        path: str,
        key: str,
        params: dict[str, Any],
        *,
        wait_s: float = 0.0,
        further: Asking = at_once,
    ) -> Iterator[dict[str, Any]]:
        get = partial(self._call, "GET", path, wait_s=wait_s, has=(key, "next"))
        ask: Asking = at_once
        while True:
            page = ask(partial(get, params={**params, "limit": 1000}))
            yield from page[key]
            if page["next"] is None:
                return
            params, ask = {**params, "after": page["next"]}, further
