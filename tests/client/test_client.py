"""The client against a server that answers from a script."""

import json
from collections.abc import Callable

import httpx
import pytest

from diloco_client import ApiError, Client, Silent, Unreachable

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


def test_changes_say_what_they_are_based_on() -> None:
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"name": "demo"})

    with client(handle) as c:
        c.set_quorum("demo", 2)
        c.set_quorum("demo", 3, revision=7)
        c.create_run({"name": "demo"}, idempotency_key="k")
        c.chaos("kill", "a", at_step=4)
    assert "If-Match" not in asked[0].headers
    assert asked[1].headers["If-Match"] == '"7"'
    assert asked[2].headers["Idempotency-Key"] == "k"
    assert json.loads(asked[3].content) == {"kind": "kill", "target": "a", "at_step": 4}


def test_names_cannot_lead_elsewhere() -> None:
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.raw_path.decode())
        return httpx.Response(200, json={})

    with client(handle) as c:
        c.run("../members/a?x=1")
        c.drain("a/b")
    assert asked == ["/v1/runs/..%2Fmembers%2Fa%3Fx%3D1", "/v1/members/a%2Fb/drain"]


def test_streams_yield_what_they_are_sent_and_skip_the_rest() -> None:
    sent = ': open\n\nid: 3\ndata: {"seq": 3}\n\n: still here\n\nid: 4\ndata: {"seq": 4}\n\n'

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/runs/gone/stream":
            return httpx.Response(404, json={"title": "No such run", "detail": "known: demo"})
        assert dict(request.url.params) == {"run": "demo", "after": "2"}
        return httpx.Response(200, text=sent)

    with client(handle) as c:
        assert [e["seq"] for e in c.stream_events("demo", after=2)] == [3, 4]
        with pytest.raises(ApiError, match="known: demo"):
            list(c.stream_status("gone"))


def test_a_sample_is_asked_for_and_comes_in_pieces() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert (request.method, request.url.path) == ("POST", "/v1/runs/demo/samples")
        if json.loads(request.content) == {"prompt": "a", "tokens": 3}:
            return httpx.Response(200, text='data: {"text": "b"}\n\ndata: {"done": true}\n\n')
        return httpx.Response(429, json={"title": "Another", "detail": "wait for it"})

    with client(handle) as c:
        assert list(c.sample("demo", prompt="a", tokens=3)) == [{"text": "b"}, {"done": True}]
        with pytest.raises(ApiError, match="wait for it"):
            list(c.sample("demo"))


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
