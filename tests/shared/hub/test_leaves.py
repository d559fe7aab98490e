"""Sites' message servers are cut off at the hub's, which may refuse or say nothing."""

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.hub import leaves as hub_leaves
from diloco_shared.hub.leaves import PASSWORD, cut, place

Answer = Callable[[str, dict[str, Any]], Any]


def hub(
    folder: Path, answer: Answer, asked: list[tuple[str, Any]]
) -> tuple[Path, threading.Thread]:
    """A server that knows the login and answers one connection; its configuration."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = folder / "hub.conf"
    config.write_text(f"listen: 0.0.0.0:{listening.getsockname()[1]}\n")
    (folder / PASSWORD).write_text("secret\n")

    def serve() -> None:
        with listening, suppress(OSError):
            sock = listening.accept()[0]
            with sock, sock.makefile("rb") as lines:
                sock.sendall(b'INFO {"server_id": "N1"}\r\n')
                while line := lines.readline():
                    word, *rest = line.decode().split()
                    if word == "CONNECT":
                        login = json.loads(line.partition(b" ")[2])
                        assert (login["user"], login["pass"]) == ("SYS", "secret")
                    elif word == "PUB":
                        body = json.loads(lines.read(int(rest[2]) + 2))
                        asked.append((rest[0], body))
                        said = answer(rest[0], body)
                        if isinstance(said, bytes):
                            sock.sendall(said)
                        elif said is not None:
                            text = json.dumps(said)
                            sock.sendall(f"MSG {rest[1]} 1 {len(text)}\r\n{text}\r\n".encode())

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    return config, serving


LEAVES = {"data": {"leafs": [{"id": 7}, {"id": 9}]}}


def test_every_leaf_is_ended(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []
    config, serving = hub(tmp_path, lambda subject, _: LEAVES if "LEAFZ" in subject else {}, asked)
    assert cut(tmp_path, config) == 2
    serving.join(10)
    kick = "$SYS.REQ.SERVER.N1.KICK"
    assert asked == [("$SYS.REQ.SERVER.N1.LEAFZ", {}), (kick, {"cid": 7}), (kick, {"cid": 9})]


@pytest.mark.parametrize("said", [{"data": {}}, {"data": {"leafs": None}}, {}])
def test_a_hub_without_leaves_has_none_to_end(tmp_path: Path, said: dict[str, Any]) -> None:
    config, _ = hub(tmp_path, lambda *_: said, [])
    assert cut(tmp_path, config) == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"error": {"description": "no such account"}}, "no such account"),
        (b"-ERR 'Permissions Violation'\r\n", "Permissions Violation"),
        (b"HMSG x 1 20 20\r\n", "HMSG"),  # nobody answers there
        (b"MSG x 1 99999999\r\n", "an answer of 99999999 bytes"),
    ],
)
def test_a_refusal_is_told_with_its_words(tmp_path: Path, said: Any, words: str) -> None:
    config, _ = hub(tmp_path, lambda *_: said, [])
    with pytest.raises(ValueError, match=words):
        cut(tmp_path, config)


def test_one_that_says_nothing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_leaves, "PATIENCE_S", 0.2)
    config, _ = hub(tmp_path, lambda *_: None, [])
    with pytest.raises(TimeoutError):
        cut(tmp_path, config)


def test_where_no_hub_runs_or_none_takes_leaves_there_is_nobody_to_cut_off(tmp_path: Path) -> None:
    config = tmp_path / "hub.conf"
    with socket.create_server(("127.0.0.1", 0)) as free:
        config.write_text(f"# no leafnodes\nlisten: 127.0.0.1:{free.getsockname()[1]}\n")
    assert cut(tmp_path, config) == 0, "it has no password for it"
    (tmp_path / PASSWORD).write_text("secret")
    assert cut(tmp_path, config) == 0, "it does not run"


@pytest.mark.parametrize("line", ["leafnodes {", '  "leafnodes": {', "leafnodes: {"])
def test_a_hub_that_takes_leaves_and_has_no_password_says_that_they_stay(
    tmp_path: Path, line: str
) -> None:
    config, _ = hub(tmp_path, lambda *_: LEAVES, [])
    config.write_text(f"{config.read_text()}{line} listen: 0.0.0.0:7422 }}\n")
    (tmp_path / PASSWORD).unlink()
    with pytest.raises(ValueError, match=f"there is no {PASSWORD} in {tmp_path}"):
        cut(tmp_path, config)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('listen: "[::1]:4222"', ("::1", 4222)),
        ("listen: 0.0.0.0:4222", ("127.0.0.1", 4222)),
        ('  listen: ":4222"', ("127.0.0.1", 4222)),
        ("listen: hub.example:4222", ("hub.example", 4222)),
    ],
)
def test_a_server_is_reached_where_it_listens(
    tmp_path: Path, line: str, found: tuple[str, int]
) -> None:
    config = tmp_path / "hub.conf"
    config.write_text(f"# a hub\n{line}\nhttp: 127.0.0.1:8222\n")
    assert place(config) == found and place(config, "http") == ("127.0.0.1", 8222)
    with pytest.raises(ValueError, match="no line leafnodes: ADDRESS:PORT"):
        place(config, "leafnodes")
