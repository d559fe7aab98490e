"""Which readers of streams are none of ours, with a server that a test plays."""

from collections.abc import Callable
from typing import Any

import pytest

from diloco_shared.bus.nats import strays
from diloco_shared.bus.nats.api import NS_PER_S, ApiRefused
from diloco_shared.bus.nats.link import Raw
from diloco_shared.bus.nats.pulls import INACTIVE_S, open_consumer
from diloco_shared.bus.nats.strays import Strays, fault
from diloco_shared.bus.port import NoStream, Stray, Unavailable

pytestmark = pytest.mark.virtual

LASTING = {"durable_name": "d"}
STRAY = "it lasts for good"


class Server:
    """Answers about one stream, S, a page of two at a time. `hidden`: that no list has."""

    def __init__(self, **there: dict[str, Any]) -> None:
        self.there = there
        self.hidden: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []
        self.away = ""  # calls that get no answer

    async def call(self, _: object, call: str, body: dict[str, Any], *, what: str) -> Any:
        self.asked.append(call)
        if self.away and call.startswith(self.away):
            raise Unavailable(what)
        kind, stream, *name = call.removeprefix("CONSUMER.").split(".")
        if stream != "S":
            raise NoStream(what)
        if kind == "LIST":
            names = sorted(self.there)
            page = names[body["offset"] :][:2]
            consumers = [{"name": n, "config": self.there[n]} for n in page]
            return {"consumers": consumers, "total": len(names)}
        found = self.there | self.hidden
        if name[0] not in found:
            raise ApiRefused("consumer not found", 10014)
        if kind == "DELETE":
            self.there.pop(name[0], None)
            self.hidden.pop(name[0], None)
        return {"config": found[name[0]]}


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Server], Strays]:
    def play(server: Server) -> Strays:
        monkeypatch.setattr(strays, "api_call", server.call)
        return Strays(None)  # type: ignore[arg-type]

    return play


def news(what: str, name: str, stream: str = "S") -> Raw:
    return Raw(f"$JS.EVENT.ADVISORY.CONSUMER.{what}.{stream}.{name}", b"", "", {})


async def test_our_own_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    async def call(_: object, call: str, body: dict[str, Any], *, what: str) -> dict[str, Any]:
        made.append(body["config"])
        return {}

    monkeypatch.setattr("diloco_shared.bus.nats.pulls.api_call", call)
    for headers_only in (False, True):
        await open_consumer(
            None,  # type: ignore[arg-type]
            "S",
            "s.>",
            name="r1",
            start_seq=1,
            headers_only=headers_only,
        )
    assert len(made) == 2 and not any(map(fault, made))


@pytest.mark.parametrize("to", ["_INBOX_coord.x.y", "_INBOX.x", "$JS.M.x", "$JS.S.x"])
def test_what_delivers_to_nobody_else_may_stay(to: str) -> None:
    """The server's own, for copies of a stream, and of whoever asks with other tools."""
    assert fault({"deliver_subject": to, "inactive_threshold": 10 * NS_PER_S}) == ""
    assert fault({"deliver_subject": to, **LASTING}) == STRAY


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LASTING, STRAY),
        ({"deliver_subject": "ctl.r.beat"}, "it delivers to ctl.r.beat"),
        ({"inactive_threshold": INACTIVE_S * NS_PER_S}, ""),
        ({"inactive_threshold": INACTIVE_S * NS_PER_S + 1}, "it lasts longer than 60 s"),
    ],
)
def test_what_lasts_or_delivers_is_none_of_ours(config: dict[str, Any], why: str) -> None:
    assert fault(config).startswith(why) and bool(why) == bool(fault(config))


async def test_all_pages_are_looked_through(played: Callable[[Server], Strays]) -> None:
    server = Server(a=LASTING, b={}, c={}, d={}, e=LASTING)
    found = await played(server).sweep(["S", "gone"])
    assert found == [Stray("S", "a", STRAY), Stray("S", "e", STRAY)]
    assert sorted(server.there) == ["b", "c", "d"]


async def test_a_list_that_has_no_end_is_gone_on_with_at_the_next_look(
    played: Callable[[Server], Strays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hides behind many that are none."""
    monkeypatch.setattr(strays, "PAGES_MAX", 2)
    server = Server(**{f"a{n}": {} for n in range(7)}, z=LASTING)
    looking = played(server)
    assert await looking.sweep(["S"]) == []
    assert await looking.sweep(["S"]) == [Stray("S", "z", STRAY)]
    assert await looking.sweep(["S"]) == []


async def test_one_that_no_list_has_is_found_where_its_making_was_heard(
    played: Callable[[Server], Strays],
) -> None:
    server = Server(b={})
    server.hidden = {"h": LASTING, "m": {"deliver_subject": "$JS.M.x"}, "unheard": LASTING}
    looking = played(server)
    for what, name in (
        *(("CREATED", n) for n in ("h", "m", "b", "gone", "late")),
        ("DELETED", "late"),
    ):
        looking.hear(news(what, name))
    looking.hear(news("CREATED", "h", stream="others"))
    looking.hear(Raw("up.r.CREATED.S.unheard", b"", "", {}))  # stored, and delivered there
    assert await looking.sweep(["S"]) == [Stray("S", "h", STRAY)]
    asked = [call for call in server.asked if "INFO" in call]
    assert asked == [f"CONSUMER.INFO.S.{name}" for name in ("h", "m", "gone")]
    assert await looking.sweep(["S"]) == []
    assert "m" in server.hidden and [c for c in server.asked if "INFO" in c] == asked


async def test_what_was_heard_is_kept_until_the_server_answers(
    played: Callable[[Server], Strays],
) -> None:
    server = Server()
    server.hidden = {"h": LASTING}
    looking = played(server)
    looking.hear(news("CREATED", "h"))
    server.away = "CONSUMER.INFO"
    with pytest.raises(Unavailable):
        await looking.sweep(["S"])
    server.away = ""
    assert await looking.sweep(["S"]) == [Stray("S", "h", STRAY)]
