"""A stream as a file and back, when the server refuses, falls silent or sends too fast."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.bus.nats import backups
from diloco_shared.bus.nats.backups import CHUNK_BYTES, SILENT_S, load, save, streams_of
from diloco_shared.bus.nats.link import Raw
from diloco_shared.bus.port import NoStream, Refused, Unavailable

pytestmark = pytest.mark.virtual

ABOUT = {"config": {"name": "S"}, "state": {"last_seq": 3}}


def raw(payload: bytes = b"", reply: str = "", **headers: str) -> Raw:
    return Raw("inbox", payload, reply, headers)


def error(code: int, description: str) -> dict[str, Any]:
    return {"error": {"err_code": code, "description": description}}


class Server:
    """Answers of JetStream's API by the end of the call's name, and what a snapshot consists of."""

    api = "$JS.API"
    several_nodes = False

    def __init__(self, *sent: Raw, **answers: Any) -> None:
        self.sent, self.answers = sent, answers
        self.asked: list[tuple[str, bytes]] = []
        self.taken: list[str] = []
        self.deliver: Callable[[Raw], None] = lambda raw: None

    def new_inbox(self) -> str:
        return "inbox"

    def heard_leader(self) -> None:
        pass

    @asynccontextmanager
    async def subscribed(self, subject: str, deliver: Callable[[Raw], None]) -> AsyncIterator[str]:
        self.deliver = deliver
        yield subject

    async def publish(self, subject: str, payload: bytes) -> None:
        self.taken.append(subject)

    async def request(self, subject: str, body: bytes, *, timeout_s: float) -> Raw:
        self.asked.append((subject, body))
        call = subject.split(".")[3] if subject.startswith(self.api) else subject
        answer = self.answers[call]
        if call == "SNAPSHOT":
            for one in self.sent:
                self.deliver(one)
        if isinstance(answer, list):
            answer = answer.pop(0)
        return raw(answer if isinstance(answer, bytes) else json.dumps(answer).encode())


async def saved(tmp_path: Path, *sent: Raw, answer: Any = ABOUT) -> tuple[Any, bytes, Server]:
    server: Any = Server(*sent, SNAPSHOT=answer)
    about = await save(server, "S", tmp_path / "file")
    return about, (tmp_path / "file").read_bytes(), server


async def test_chunks_are_asked_for_as_they_are_taken(tmp_path: Path) -> None:
    about, written, server = await saved(tmp_path, raw(b"ab", "1"), raw(b"c", "2"), raw())
    assert (about, written, server.taken) == (ABOUT, b"abc", ["1", "2"])


async def test_a_stream_that_is_gone_is_no_backup_and_no_trouble(tmp_path: Path) -> None:
    server: Any = Server(SNAPSHOT=error(10059, "stream not found"))
    assert await save(server, "S", tmp_path / "file") is None
    assert not (tmp_path / "file").exists()


async def test_a_snapshot_that_the_server_ends_or_forgets_is_none(tmp_path: Path) -> None:
    ended = raw(b"", Status="408", Description="No Flow Response")
    with pytest.raises(Unavailable, match=r"the server ended it \(No Flow Response\)"):
        await saved(tmp_path, raw(b"ab", "1"), ended)
    (tmp_path / "file").unlink()
    with pytest.raises(Unavailable, match=f"sent nothing for {SILENT_S:g} s"):
        await saved(tmp_path, raw(b"ab", "1"))


async def test_a_disk_that_is_slower_than_the_server_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backups, "WAITING_MAX", 2)
    with pytest.raises(Unavailable, match="this disk is slower than the server sends"):
        await saved(tmp_path, *(raw(b"x", "r") for _ in range(3)), raw())


def restoring(tmp_path: Path, to: Any, content: bytes = b"abc") -> Any:
    (tmp_path / "file").write_bytes(content)
    return Server(RESTORE={"deliver_subject": "to"}, to=to, DELETE={})


async def test_a_file_is_given_chunk_by_chunk_and_its_end_is_told(tmp_path: Path) -> None:
    content = bytes(CHUNK_BYTES) + b"end"
    server = restoring(tmp_path, [b"", b"", {"state": {"last_seq": 3}}], content)
    await load(server, "S", tmp_path / "file", ABOUT)
    (_, asked), *given = server.asked
    assert json.loads(asked) == ABOUT
    assert [(to, len(chunk)) for to, chunk in given] == [("to", CHUNK_BYTES), ("to", 3), ("to", 0)]


async def test_a_chunk_that_is_refused_ends_it_with_the_servers_words(tmp_path: Path) -> None:
    server = restoring(tmp_path, [error(10047, "insufficient storage"), {"state": {"last_seq": 3}}])
    with pytest.raises(Refused, match="restore of S: insufficient storage"):
        await load(server, "S", tmp_path / "file", ABOUT)


async def test_a_word_that_is_no_refusal_is_none(tmp_path: Path) -> None:
    server = restoring(tmp_path, [b"+OK", {"state": {"last_seq": 3}}])
    await load(server, "S", tmp_path / "file", ABOUT)


@pytest.mark.parametrize("last", [3, 4])
async def test_what_was_written_meanwhile_may_come_along(tmp_path: Path, last: int) -> None:
    server = restoring(tmp_path, [b"", {"state": {"last_seq": last}}])
    await load(server, "S", tmp_path / "file", ABOUT)


async def test_a_stream_that_came_back_in_part_is_removed(tmp_path: Path) -> None:
    server = restoring(tmp_path, [b"", {"state": {"last_seq": 2}}])
    with pytest.raises(Refused, match="it ends at message 2, not at 3"):
        await load(server, "S", tmp_path / "file", ABOUT)
    assert server.asked[-1][0] == "$JS.API.STREAM.DELETE.S"


async def test_a_restore_that_is_refused_gives_nothing(tmp_path: Path) -> None:
    server: Any = Server(RESTORE=error(10059, "stream not found"))
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(NoStream):
        await load(server, "S", tmp_path / "file", ABOUT)
    assert len(server.asked) == 1


async def test_names_come_page_by_page() -> None:
    pages = [{"streams": ["b", "c"], "total": 3}, {"streams": ["a"], "total": 3}]
    server: Any = Server(NAMES=pages)
    assert await streams_of(server) == ["a", "b", "c"]
    assert [json.loads(body)["offset"] for _, body in server.asked] == [0, 2]
    assert await streams_of(Server(NAMES={"streams": None, "total": 0})) == []  # type: ignore[arg-type]
