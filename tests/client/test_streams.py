"""Streams of a server that answers from a script: what comes, and how they end."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from diloco_client import ApiError, Client, Unreachable

RUN = {"name": "demo", "state": "running", "created_at": 1.0}
GONE = httpx.Response(404, json={"title": "No such run", "detail": "known: none"})


def client(handle: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client("http://c:1", "t0ken", transport=httpx.MockTransport(handle))


def streaming(text: str, then: httpx.Response = GONE) -> Client:
    """What its streams send before they end, and what it says of the run afterwards."""

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=text) if "stream" in request.url.path else then

    return client(handle)


def until_the_end(read: Any, found: list[Any]) -> None:
    for view in read:
        found.append(view)


def test_they_yield_what_they_are_sent_and_skip_the_rest() -> None:
    sent = ': open\n\nid: 3\ndata: {"seq": 3}\n\n: still here\n\nid: 4\ndata: {"seq": 4}\n\n'
    found: list[Any] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/runs/gone/stream":
            return httpx.Response(404, json={"title": "No such run", "detail": "known: demo"})
        assert dict(request.url.params) == {"run": "demo", "after": "2"}
        return httpx.Response(200, text=sent)

    with client(handle) as c:
        with pytest.raises(Unreachable, match="a stream from http://c:1 ended, although events"):
            until_the_end(c.stream_events("demo", after=2), found)
        assert found == [{"seq": 3}, {"seq": 4}]
        with pytest.raises(ApiError, match="known: demo"):
            list(c.stream_status("gone"))


@pytest.mark.parametrize("half", ['data: {"seq": 4', "data: ", 'data: {"name": "d'])
def test_half_an_event_is_a_link_that_was_cut(half: str) -> None:
    found: list[Any] = []
    with streaming('data: {"seq": 3}\n\n' + half) as c:
        for read in (c.stream_events(), c.stream_status("demo")):
            with pytest.raises(Unreachable, match="ended in the middle of an event"):
                until_the_end(read, found)
    assert found == [{"seq": 3}] * 2


def test_a_run_is_looked_at_until_it_is_over() -> None:
    sent = 'data: {"state": "running"}\n\ndata: {"state": "finished"}\n\n'
    with streaming(sent, httpx.Response(500)) as c:
        assert [view["state"] for view in c.stream_status("demo")] == ["running", "finished"]


@pytest.mark.parametrize("sent", ["", 'data: {"state": "running", "created_at": 1.0}\n\n'])
def test_a_stream_that_ends_before_the_run_does_was_cut(sent: str) -> None:
    with (
        streaming(sent, httpx.Response(200, json=RUN)) as c,
        pytest.raises(Unreachable, match="ended, although run 'demo' is running"),
    ):
        list(c.stream_status("demo"))
    with streaming(sent, httpx.Response(401, json={})) as c, pytest.raises(ApiError) as caught:
        list(c.stream_status("demo"))
    assert caught.value.status == 401, "its token is not good any more"


@pytest.mark.parametrize("then", [GONE, httpx.Response(200, json=RUN | {"created_at": 2.0})])
def test_the_stream_of_a_run_that_was_deleted_just_ends(then: httpx.Response) -> None:
    with streaming('data: {"state": "running", "created_at": 1.0}\n\n', then) as c:
        (view,) = c.stream_status("demo")
    assert view["state"] == "running"


@pytest.mark.parametrize("last", ['{"done": true}', '{"failed": "why"}', ""])
def test_a_sample_says_when_it_is_complete(last: str) -> None:
    sent = 'data: {"text": "b"}\n\n' + (f"data: {last}\n\n" if last else "")
    found: list[Any] = []
    with client(lambda _: httpx.Response(200, text=sent)) as c:
        if last:
            until_the_end(c.sample("demo"), found)
            assert len(found) == 2
        else:
            with pytest.raises(Unreachable, match="although the text is not complete"):
                until_the_end(c.sample("demo"), found)
            assert found == [{"text": "b"}]
