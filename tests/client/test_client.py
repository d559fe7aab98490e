"""The client against a server that answers from a script."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from diloco_client import ApiError, Client, Lost, Silent, Unreachable

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> Client:
    return Client("http://c:1", "t0ken", transport=httpx.MockTransport(handler))


def test_the_token_travels_in_the_header_and_nowhere_else() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer t0ken"
        assert "t0ken" not in str(request.url)
        return httpx.Response(200, json={"name": "admin", "scopes": ["read"], "chaos": True})

    with client(handle) as c:
        assert c.access()["scopes"] == ["read"]


def test_lists_are_read_page_by_page() -> None:
    pages = {"": ("a", "b", "b"), "b": ("c", None, None)}

    def handle(request: httpx.Request) -> httpx.Response:
        *names, cursor = pages[request.url.params.get("after", "")]
        runs = [{"name": n} for n in names if n and n != cursor] + (
            [{"name": cursor}] if cursor else []
        )
        return httpx.Response(200, json={"runs": runs, "next": cursor})

    with client(handle) as c:
        assert [r["name"] for r in c.runs()] == ["a", "b", "c"]


def test_events_are_read_until_a_page_is_not_full() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        after = int(request.url.params["after"])
        found = [{"seq": n} for n in range(after + 1, min(after + 1000, 1500) + 1)]
        return httpx.Response(200, json={"events": found, "next": found[-1]["seq"]})

    with client(handle) as c:
        assert [e["seq"] for e in c.events("demo")] == list(range(1, 1501))


def told_by(there: list[dict[str, Any]], release: str) -> Handler:
    """Events as a coordinator tells them, which has seen where the hub lost the newest of them. The
    mark of each is its text."""

    def handle(request: httpx.Request) -> httpx.Response:
        after, mark = int(request.url.params["after"]), request.url.params["mark"]
        texts = {e["seq"]: e["text"] for e in there}
        others = release != "0.2" and bool(mark) and texts.get(after, mark) != mark
        goes_on = 0 if others else min(after, len(there) - 50)
        again = others or after > len(there)
        found = [e for e in there if e["seq"] > (goes_on if again else after)][:1000]
        page: dict[str, Any] = {"events": found, "next": found[-1]["seq"] if found else after}
        if release != "0.2":
            page |= {"mark": texts[page["next"]] if found else mark, "again": again}
        return httpx.Response(200, json=page)

    return handle


@pytest.mark.parametrize("release", ["0.2", "0.3"])
def test_who_asks_for_events_now_and_then_is_told_to_begin_anew(release: str) -> None:
    there = [{"seq": n, "text": f"first {n}"} for n in range(1, 1501)]
    with client(told_by(there, release)) as c:
        told = c.events_since("demo")
        assert (told.events, told.again) == (there, False)
        nothing = c.events_since("demo", told.cursor)
        assert (nothing.events, nothing.cursor, nothing.again) == ([], told.cursor, False)
        del there[1200:]
        fewer = c.events_since("demo", told.cursor)
        assert (fewer.events, fewer.again) == (there, True)
        assert c.events("demo", after=1500) == there


def test_who_asks_for_events_learns_that_others_have_come_up_to_its_cursor() -> None:
    there = [{"seq": n, "text": f"first {n}"} for n in range(1, 1501)]
    with client(told_by(there, "0.3")) as c:
        told = c.events_since("demo")
        there[1400:] = [{"seq": n, "text": f"then {n}"} for n in range(1401, 1600)]
        anew = c.events_since("demo", told.cursor)
        assert (anew.events, anew.again) == (there, True)
        assert anew.cursor == (1599, "then 1599")
        assert not c.events_since("demo", anew.cursor).again


def test_two_coordinators_that_differ_send_nobody_back_for_ever() -> None:
    """One of them has not seen yet what the hub lost; a proxy asks the one and then the other."""
    there, asked = [{"seq": n} for n in range(1, 2501)], list[str]()

    def handle(request: httpx.Request) -> httpx.Response:
        after, mark = int(request.url.params["after"]), request.url.params["mark"]
        asked.append(mark)
        assert len(asked) < 20, "without end"
        mine = f"of {len(asked) % 2}"
        again = mark not in ("", mine)
        found = there[0 if again else after :][:1000]
        return httpx.Response(200, json={"events": found, "mark": mine, "again": again})

    with client(handle) as c:
        told = c.events_since("demo")
        assert (told.events, told.again) == (there, True)
        assert told.cursor == (2500, f"of {len(asked) % 2}")


def test_a_refusal_carries_the_servers_words_and_paths() -> None:
    errors = [{"path": "algorithm.quorum", "message": "too small"}]
    problem = {"title": "Invalid run", "detail": "1 fault", "status": 422, "errors": errors}

    refusing = client(lambda _: httpx.Response(422, json=problem))
    with refusing as c, pytest.raises(ApiError) as caught:
        c.create_run({})
    error = caught.value
    assert (error.status, error.title, error.detail) == (422, "Invalid run", "1 fault")
    assert error.errors == errors
    assert str(error) == "Invalid run: 1 fault"


@pytest.mark.parametrize("body", ["<h1>Bad gateway</h1>", "[1]", ""])
def test_a_refusal_that_is_no_problem_detail_is_told_anyway(body: str) -> None:
    with client(lambda _: httpx.Response(502, text=body)) as c, pytest.raises(ApiError) as caught:
        c.members()
    assert (caught.value.status, caught.value.title) == (502, "Bad Gateway")


@pytest.mark.parametrize("body", [b"<h1>Sign in</h1>", b'{"runs": [', b"\xff"])
def test_an_answer_of_something_else_is_told_with_the_address(body: bytes) -> None:
    """As of a proxy that wants a password first."""
    said = "No API there: what answers at http://c:1 sends no JSON"
    page = client(lambda _: httpx.Response(200, content=body))
    with page as c, pytest.raises(ApiError, match=said) as caught:
        c.runs()
    assert caught.value.status == 200


@pytest.mark.parametrize("body", [[], {}, "ok", {"runs": []}, {"message": "Not yours"}])
def test_json_of_something_else_is_told_with_the_address(body: Any) -> None:
    said = "what answers at http://c:1 sends other JSON than a coordinator does"
    with client(lambda _: httpx.Response(200, json=body)) as c:
        for call in (c.runs, lambda: c.run("demo"), lambda: c.rounds("demo"), c.members, c.faults):
            with pytest.raises(ApiError, match=said):
                call()


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("https://c:1/v1/runs?limit=1000", "sends on to https://c:1: use that address"),
        ("https://far/api/v1/runs", "sends on to https://far/api: use that address"),
        ("/login?back=s3cret", "sends on to http://c:1/login, which is not where"),
    ],
)
def test_a_redirect_says_where_to_ask(location: str, told: str) -> None:
    there = {"Location": location}
    with client(lambda _: httpx.Response(301, headers=there)) as c:
        for call in (c.runs, lambda: [*c.export_file("r", "e", "f")]):
            with pytest.raises(ApiError, match="The address is another one") as caught:
                call()
            assert caught.value.status == 301 and "s3cret" not in str(caught.value)
        with pytest.raises(ApiError, match=re.escape(told)):
            c.runs()


def test_below_a_path_a_redirect_is_told_in_full() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(308, headers={"Location": f"https://c{request.url.path}"})

    with (
        Client("http://c/diloco/", "t0ken", transport=httpx.MockTransport(handle)) as c,
        pytest.raises(ApiError, match="sends on to https://c/diloco: use that address"),
    ):
        c.runs()


@pytest.mark.parametrize("url", ["http://a..b", "http://xn--a", f"http://{'a' * 70}"])
def test_a_host_that_cannot_be_is_one_where_nobody_answers(url: str) -> None:
    with Client(url, "t0ken", environ={}) as c:
        for call in (
            c.runs,
            lambda: list(c.stream_events()),
            lambda: [*c.export_file("r", "e", "f")],
        ):
            with pytest.raises(Unreachable, match=f"{url} \\(no host can have that name"):
                call()
        assert not c.ready() and c.trouble() == ""


@pytest.mark.parametrize(("newest", "asked"), [(1000, "1000"), (1001, None)])
def test_more_of_the_newest_rounds_than_are_given_at_once_are_taken_of_all(
    newest: int, asked: str | None
) -> None:
    wanted = list[str | None]()

    def handle(request: httpx.Request) -> httpx.Response:
        wanted.append(request.url.params.get("newest"))
        return httpx.Response(
            200, json={"rounds": [{"round": n} for n in range(1500)], "next": None}
        )

    with client(handle) as c:
        found = c.rounds("demo", newest=newest)
    assert wanted == [asked]
    assert [r["round"] for r in found] == list(range(1500 - newest, 1500))


def test_rounds_are_asked_for_as_they_are_read() -> None:
    """A run may have more than fit in memory."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["after"])
        page = [{"seq": int(asked[-1]) + 1}, {"seq": int(asked[-1]) + 2}]
        more = page[-1]["seq"] if len(asked) < 9 else None
        return httpx.Response(200, json={"rounds": page, "next": more})

    with client(handle) as c:
        found = c.each_round("demo", after=4)
        assert [next(found)["seq"] for _ in range(3)] == [5, 6, 7]
    assert asked == ["4", "6"]


def test_an_address_that_is_none_is_told() -> None:
    with pytest.raises(ValueError, match="is no address"):
        Client("http://a\tb", "t0ken", environ={})


def test_nobody_there_is_told_with_the_address() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with client(handle) as c:
        assert not c.ready()
        for call in (c.health, c.runs, lambda: list(c.stream_events())):
            with pytest.raises(Unreachable, match="http://c:1"):
                call()


@pytest.mark.parametrize("late", [httpx.ReadTimeout, httpx.WriteTimeout])
def test_who_took_the_request_and_does_not_answer_is_there(late: type[httpx.HTTPError]) -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        raise late("timed out")

    said = r"^the coordinator at http://c:1 took the request, and has not answered it within 10 s$"
    with client(handle) as c, pytest.raises(Silent, match=said):
        c.runs()

    def closed(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("timed out")

    with client(closed) as c, pytest.raises(Unreachable, match="no coordinator answers") as caught:
        c.runs()
    assert not isinstance(caught.value, Silent)


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """The address of somebody who answers that to the first request, and ends the connection."""

    def serve() -> None:
        taken, _ = listening.accept()
        with taken:
            while not taken.recv(65536).endswith((b"\r\n\r\n", b"}")):
                pass
            taken.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve)
        server.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.join()


@pytest.mark.parametrize("answer", [b"", b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"na'])
def test_an_answer_that_was_cut_off_is_not_said_to_be_nobodys(answer: bytes) -> None:
    with saying(answer) as url, Client(url, "t0ken") as c:
        said = f"^the coordinator at {url} took the request, and its answer was lost"
        with pytest.raises(Lost, match=said) as caught:
            c.stop("demo")
        assert caught.value.changes
    with saying(answer) as url, Client(url, "t0ken") as c, pytest.raises(Lost) as caught:
        c.run("demo")
    assert not caught.value.changes


def test_who_speaks_something_else_than_http_is_no_coordinator() -> None:
    with (
        saying(b"220 mail.test\r\n\r\n") as url,
        Client(url, "t0ken") as c,
        pytest.raises(Unreachable, match="no coordinator answers at") as caught,
    ):
        c.run("demo")
    assert not isinstance(caught.value, Lost)


def test_all_checkpoints_are_asked_for_page_by_page() -> None:
    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        after = request.url.params.get("after", "")
        page = {"checkpoints": [{"ref": "a/1"}], "damaged": [], "next": "a/2"}
        left = {"damaged": [{"ref": "a/3"}], "tapes": [{"ref": "b/tape"}]}
        last = {"checkpoints": [], **left, "next": None}
        return httpx.Response(200, json=last if after else page)

    with client(handle) as c:
        found = c.all_checkpoints("demo")
    assert found == {
        "checkpoints": [{"ref": "a/1"}],
        "damaged": [{"ref": "a/3"}],
        "tapes": [{"ref": "b/tape"}],
    }
    assert asked == [{"limit": "100"}, {"limit": "100", "after": "a/2"}]
    old = client(lambda _: httpx.Response(200, json={"checkpoints": [{"ref": "a/1"}]}))
    with old as c:  # before 0.3 there were no pages
        all_ = {"checkpoints": [{"ref": "a/1"}], "damaged": [], "tapes": []}
        assert c.all_checkpoints() == all_


def test_changes_say_what_they_are_based_on() -> None:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"name": "demo"})

    with client(handle) as c:
        c.set_quorum("demo", 2)
        c.set_quorum("demo", 3, revision=7)
        c.create_run({"name": "demo"}, idempotency_key="k")
        c.chaos("kill", "a", at_step=4, idempotency_key="l")
    assert "If-Match" not in asked[0].headers
    assert asked[1].headers["If-Match"] == '"7"'
    assert asked[2].headers["Idempotency-Key"] == "k"
    assert asked[3].headers["Idempotency-Key"] == "l"
    assert json.loads(asked[3].content) == {"kind": "kill", "target": "a", "at_step": 4}


def test_names_cannot_lead_elsewhere() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(200, json={"name": "demo", "state": "queued"})

    with client(handle) as c:
        c.run("../members/a?x=1")
        c.drain("a/b")
    assert asked == ["/v1/runs/..%2Fmembers%2Fa%3Fx%3D1", "/v1/members/a%2Fb/drain"]


@pytest.mark.parametrize("name", [".", ".."])
def test_names_that_are_a_way_up_are_nobodys(name: str) -> None:
    """Without the last part of its path, a request for an export would be one for the run."""

    def handle(request: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{request.method} {request.url} was asked for")

    with client(handle) as c:
        for call in (
            lambda: c.delete_export("demo", name),
            lambda: c.delete_run(name),
            lambda: c.forget(name),
            lambda: c.revoke_token(name),
            lambda: c.delete_folder(name),
            lambda: c.delete_stored(f"{name}/1"),
            lambda: [*c.export_file("demo", "e", name)],
        ):
            with pytest.raises(ApiError, match="No such name: nothing is called") as caught:
                call()
            assert caught.value.status == 404


@pytest.mark.parametrize("ref", ["demo.a/.", "demo.a/..", "demo.a/", "demo.a", "demo.a/1/2", "a/²"])
def test_a_checkpoint_without_a_number_is_none(ref: str) -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(204)

    with client(handle) as c:
        with pytest.raises(ApiError, match="is not FOLDER/NUMBER") as caught:
            c.delete_stored(ref)
        assert caught.value.status == 404
        c.delete_stored("demo.a/000001")
    assert asked == ["/v1/checkpoints/demo.a/000001"]


def test_bytes_that_are_no_letters_name_nobody() -> None:
    """As a terminal hands them on: each is half a character."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(404, json={"title": "No such run", "detail": "there is none"})

    with client(handle) as c:
        with pytest.raises(ApiError, match="No such run"):
            c.run("a\udcff")
        for call in (
            lambda: c.audit(actor="\udcff"),
            lambda: c.create_run({"name": "\ud800"}),
            lambda: c.create_run({}, idempotency_key="é"),
            lambda: [*c.stream_events("\udcff")],
        ):
            with pytest.raises(ApiError, match=r"no request can carry .* at that place") as caught:
                call()
            assert caught.value.status == 422
    assert asked == ["/v1/runs/a%5Cudcff"]


def test_members_and_tokens_speak_to_their_addresses() -> None:
    asked: list[str] = []
    answers = {
        "GET /v1/members": {"members": [{"id": "a"}]},
        "GET /v1/tokens": {"tokens": [{"name": "eve"}]},
        "POST /v1/tokens": {"name": "eve", "token": "new"},
        "GET /v1/chaos": {"faults": [{"id": "f"}]},
    }

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        if request.method == "DELETE" and not request.url.path.endswith("drain"):
            return httpx.Response(204)
        return httpx.Response(200, json=answers.get(asked[-1], {"id": "a"}))

    with client(handle) as c:
        assert c.members() == [{"id": "a"}]
        assert c.tokens() == [{"name": "eve"}]
        assert c.make_token("eve", ["read"]) == "new"
        assert c.faults() == [{"id": "f"}]
        c.revoke_token("eve")
        c.undrain("a")
        c.forget("a")
        c.delete_run("demo")
    assert asked[4:] == [
        "DELETE /v1/tokens/eve",
        "DELETE /v1/members/a/drain",
        "DELETE /v1/members/a",
        "DELETE /v1/runs/demo",
    ]


def test_a_token_is_made_and_changed_over_as_it_was_asked_for() -> None:
    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else dict(request.url.params)
        asked.append((f"{request.method} {request.url.path}", body))
        return httpx.Response(200, json={"token": "new", "rows": [{"seq": 1}]})

    with client(handle) as c:
        assert c.make_token("eve", ["read"], runs=["a*"], sites=["b"], expires_in_s=60) == "new"
        assert c.rotate_token("eve", overlap_s=5) == "new"
        assert c.audit(5, actor="eve") == [{"seq": 1}]
    limits = {"scopes": ["read"], "runs": ["a*"], "sites": ["b"], "expires_in_s": 60}
    assert asked == [
        ("POST /v1/tokens", {"name": "eve"} | limits),
        ("POST /v1/tokens/eve/rotate", {"overlap_s": 5}),
        ("GET /v1/audit", {"limit": "5", "actor": "eve", "after": "0"}),
    ]


def test_a_plan_is_asked_for_with_the_wishes_and_a_short_one_is_refused_in_words() -> None:
    asked = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path, json.loads(request.content)))
        if len(asked) > 1:
            return httpx.Response(422, json={"title": "No settings do", "detail": "add chips"})
        return httpx.Response(200, json={"settings": {"sync_every_steps": 24}})

    with client(handle) as c:
        assert c.plan(params=5e9, chips=4096)["settings"] == {"sync_every_steps": 24}
        with pytest.raises(ApiError, match="add chips"):
            c.plan(params=5e9, chips=1)
    assert asked[0] == ("POST", "/v1/plan", {"params": 5e9, "chips": 4096})


@pytest.mark.parametrize(
    ("status", "text", "told"),
    [(200, "ready\n", ""), (503, "the bus is away\n", "the bus is away"), (404, "what?", "")],
)
def test_it_tells_why_a_coordinator_can_do_nothing(status: int, text: str, told: str) -> None:
    with client(lambda _: httpx.Response(status, text=text)) as c:
        assert c.trouble() == told
