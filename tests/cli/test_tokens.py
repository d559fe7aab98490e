"""Commands about tokens and the audit log, against a server that answers from a table."""

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

import diloco_cli.api
from diloco_cli.cluster import Where, endpoint_of, token_of
from diloco_cli.commands.tokens import audit_lines, expiry_of, seconds_of, token_line
from diloco_cli.up.folder import Folder, supervisor_of
from diloco_cli.words import CONFLICT, INVALID, REFUSED, CliError
from diloco_client import Client

Diloco = Callable[..., tuple[int, str, str]]
EVE: dict[str, Any] = {
    "name": "eve",
    "scopes": ["read", "operate"],
    "runs": [],
    "sites": [],
    "expires_at": None,
    "used_at": None,
    "previous_until": 0.0,
    "created_by": "admin",
}


@pytest.fixture(autouse=True)
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """What a cluster at http://far:1 was asked: method and path, token, body."""
    found: list[tuple[str, str, Any]] = []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        place = f"{request.method} {request.url.path}"
        found.append((place, request.headers["Authorization"], body))
        return httpx.Response(200, json={"token": "n3w", "tokens": [EVE], "members": []})

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")
    return found


def test_a_token_is_made_with_scopes_limits_and_an_end(diloco: Diloco, asked: Any) -> None:
    limits = ("--run", "mine-*", "--run", "demo", "--site", "paris-*", "--expires", "12h")
    assert diloco("token", "make", "eve", "read", "operate", *limits) == (0, "n3w\n", "")
    assert asked[-1][2] == {
        "name": "eve",
        "scopes": ["read", "operate"],
        "runs": ["mine-*", "demo"],
        "sites": ["paris-*"],
        "expires_in_s": 43_200.0,
    }
    assert diloco("token", "make", "bob", "fault", "--expires", "never")[0] == 0
    assert asked[-1][2]["never"] is True
    assert diloco("token", "make", "bob", "viewer")[0] == 2
    assert diloco("token", "make", "bob")[0] == 2


def test_tokens_are_listed_and_revoked(diloco: Diloco, asked: Any) -> None:
    assert diloco("token", "list")[1].startswith("eve: read, operate; never expires")
    assert json.loads(diloco("token", "list", "--json")[1]) == [EVE]
    assert diloco("token", "revoke", "eve") == (0, "the token eve is revoked\n", "")
    assert asked[-1][0] == "DELETE /v1/tokens/eve"


def test_a_token_is_changed_over(diloco: Diloco, asked: Any) -> None:
    assert diloco("token", "rotate", "admin", "--overlap", "1h") == (0, "n3w\n", "")
    assert asked[-1][0::2] == ("POST /v1/tokens/admin/rotate", {"overlap_s": 3600.0})
    assert diloco("token", "rotate", "eve", "--overlap", "soon")[0] == 2
    _, out, _ = diloco("token", "rotate", "eve", "--json")
    assert json.loads(out) == {"name": "eve", "token": "n3w"}


def test_a_new_token_goes_into_a_file_of_its_owner(
    diloco: Diloco, asked: Any, tmp_path: Path
) -> None:
    file = tmp_path / "eve"
    status, out, _ = diloco("token", "make", "eve", "read", "--to", str(file))
    assert status == 0 and "n3w" not in out and str(file) in out
    assert file.read_text() == "n3w\n" and stat.S_IMODE(file.stat().st_mode) == 0o600
    before = len(asked)
    assert diloco("token", "rotate", "eve", "--to", str(file))[0] == CONFLICT
    assert len(asked) == before, "the old secret is not replaced by one that cannot be kept"


def test_no_token_is_made_for_a_file_that_nobody_may_look_for(
    diloco: Diloco, asked: Any, tmp_path: Path, shut: Callable[[Path], None]
) -> None:
    shut(tmp_path)
    status, _, err = diloco("token", "make", "eve", "read", "--to", str(tmp_path / "eve"))
    assert status and err.endswith("/eve cannot be written: permission denied\n")
    assert not asked


def test_an_event_says_whose_request_caused_it(
    diloco: Diloco, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = {
        "at": 0.0,
        "source": "coordinator",
        "kind": "run-paused",
        "text": "pausing run demo",
    }
    both = [event | {"data": {"actor": "anna"}}, event | {"data": {}}]
    monkeypatch.setattr(Client, "events", lambda *_: both)
    assert diloco("events")[1].splitlines() == [
        "00:00:00 coordinator run-paused: pausing run demo (by anna)",
        "00:00:00 coordinator run-paused: pausing run demo",
    ]


def test_a_token_on_the_command_line_is_warned_of_and_a_file_is_not(
    diloco: Diloco, asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert diloco("members")[2] == ""
    status, _, err = diloco("members", "--token", "s3cret")
    assert status == 0 and "--token-file" in err and "s3cret" not in err
    monkeypatch.delenv("DILOCO_TOKEN")
    file = tmp_path / "token"
    file.write_text("new-one\nold-one\n")
    assert diloco("members", "--token-file", str(file))[2] == ""
    monkeypatch.setenv("DILOCO_TOKEN_FILE", str(file))
    assert diloco("members")[2] == ""
    # Each command asks for the members, and how the hub is.
    bearers = [bearer for _, bearer, _ in asked]
    assert bearers == [
        f"Bearer {token}" for token in ("t0ken", "s3cret", *2 * ["new-one"]) for _ in "12"
    ]
    file.write_text("\n")
    status, _, err = diloco("members")
    assert status == REFUSED and "is empty" in err


def test_other_commands_find_the_token_where_the_coordinator_was_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.announce(url="http://127.0.0.1:1")
    assert endpoint_of(tmp_path)["token_file"] == str(tmp_path / "admin-token")
    monkeypatch.setenv("DILOCO_ADMIN_TOKEN_FILE", str(tmp_path / "given"))
    folder.announce(url="http://127.0.0.1:1")
    (tmp_path / "given").write_text("t0ken\n")
    assert token_of(Where(data=tmp_path)) == "t0ken"


@pytest.fixture
def announced(tmp_path: Path) -> Path:
    """A data folder in which a cluster runs."""
    (tmp_path / "admin-token").write_text("t0ken\n")
    Folder(tmp_path).announce(url="http://127.0.0.1:1", nats="127.0.0.1:2")
    return tmp_path


def refusal(data: Path) -> str:
    """Why what is said there of a cluster is not believed."""
    with pytest.raises(CliError) as caught:
        token_of(Where(data=data))
    assert caught.value.status == REFUSED
    return str(caught.value)


@pytest.mark.parametrize("name", ["", "endpoint.json"])
def test_what_everybody_may_write_is_not_believed(announced: Path, name: str) -> None:
    """Somebody else's folder, where a command is typed, would be sent any file's beginning."""
    assert token_of(Where(data=announced)) == "t0ken"
    path = announced / name
    path.chmod(path.stat().st_mode | stat.S_IWOTH)
    assert f"everybody may write {path}" in refusal(announced)
    assert f"chmod o-w {path}" in refusal(announced)


def test_a_cluster_begins_in_no_folder_that_everybody_may_write(tmp_path: Path) -> None:
    """No other command would believe what it says there."""
    tmp_path.chmod(0o777)
    with pytest.raises(CliError, match="everybody may write"):
        Folder(tmp_path).take()
    assert supervisor_of(tmp_path) == 0


@pytest.mark.parametrize("name", ["", "endpoint.json"])
def test_what_somebody_else_owns_is_not_believed(
    announced: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = announced / name
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        path = announced
    else:
        os.chown(path, 4711, 4711)
    assert f"{path} belongs to somebody else (user {path.stat().st_uid})" in refusal(announced)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"url": "http://evil:80"}, "http://evil:80 is not on this machine"),
        ({"url": "http://127.0.0.1:80@evil:80"}, "is not on this machine"),
        ({"url": "http://127.0.0.1.evil.org:80"}, "is not on this machine"),
        ({"nats": "evil:4222"}, "evil:4222 is not on this machine"),
        ({"token_file": "/etc/hostname"}, "set DILOCO_ADMIN_TOKEN_FILE=/etc/hostname"),
        ({"token_file": "{data}/../secret"}, "lies outside"),
        ({"token_file": ""}, "lies outside"),
    ],
)
def test_an_endpoint_names_this_machine_and_its_own_folder_alone(
    announced: Path, written: dict[str, str], said: str
) -> None:
    path = announced / "endpoint.json"
    named = {key: value.format(data=announced) for key, value in written.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    assert said in refusal(announced)
    path.write_text("[]")
    assert "not what 'diloco up' writes" in refusal(announced)


def test_an_endpoint_is_believed_whatever_the_umask_was(announced: Path) -> None:
    before = os.umask(0)
    try:
        Folder(announced).announce(url="http://localhost:1", nats="[::1]:2")
    finally:
        os.umask(before)
    assert endpoint_of(announced)["url"] == "http://localhost:1"


def test_lists_say_what_each_may_and_until_when() -> None:
    assert token_line(EVE, 0.0) == "eve: read, operate; never expires; not used yet; made by admin"
    limited = EVE | {
        "runs": ["a", "b-*"],
        "sites": ["paris-*"],
        "expires_at": 86_400.0 * 2,
        "used_at": 3600.0,
        "previous_until": 7200.0,
        "created_by": "",
    }
    assert token_line(limited, 4000.0) == (
        "eve: read, operate; only runs a b-*; only members paris-*; expires 1970-01-03; used "
        "1970-01-01 01:00; the one it replaces is good until 1970-01-01 02:00"
    )
    assert "; expired 1970-01-03" in token_line(limited, 1e6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("90d", {"expires_in_s": 7_776_000.0}),
        ("1.5h", {"expires_in_s": 5400.0}),
        ("never", {"never": True}),
        ("1970-01-02", {"expires_at": 172_800.0}),
    ],
)
def test_an_end_is_a_length_of_time_a_day_or_never(text: str, said: dict[str, Any]) -> None:
    assert expiry_of(text) == said


def test_no_token_outlives_the_calendar(diloco: Diloco, asked: Any) -> None:
    status, _, err = diloco("token", "make", "eve", "read", "--expires", "9999-12-31")
    said = "--expires 9999-12-31: no day comes after it; name an earlier one, or never"
    assert (status, err, asked) == (INVALID, f"diloco: {said}\n", [])
    assert diloco("token", "make", "eve", "read", "--expires", "9999-12-30")[0] == 0


@pytest.mark.parametrize("text", ["", "90", "d", "-1d", "1e3s", "2027-13-01", "9" * 12 + "d"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="90d"):
        seconds_of(text, "--expires")


@pytest.mark.parametrize("width", [20, 80, 120, 200])
def test_audit_rows_fit_the_terminal_and_lose_nothing(width: int) -> None:
    row = {
        "at": 0.0,
        "actor": "anna",
        "address": "10.0.0.1",
        "method": "POST",
        "route": "/v1/runs/{run}/checkpoints/{number}/restore",
        "target": {"run": "demo", "number": "3", "as": "again"},
        "status": 403,
        "outcome": "refused",
        "why": "The token does not allow this",
        "left_out": 5,
    }
    lines = list(audit_lines([row, row | {"actor": ""}], width))
    assert all(len(line) <= width for line in lines)
    text = "".join("".join(lines).split())
    for part in ("1970-01-01", "anna", "/v1/runs/demo/checkpoints/3/restore", "as=again", "(403)"):
        assert part in text
    assert "(unknown)" in text and "5refused" in text


@pytest.mark.parametrize("given", ["abc\n", "  abc", "abc\r\n"])
def test_a_token_may_come_with_the_end_of_its_line(given: str) -> None:
    assert token_of(Where(url="http://h", token=given)) == "abc"


@pytest.mark.parametrize("given", ["a b", "a\nb", "tökén", "a\x00b"])
def test_what_is_no_token_is_not_shown(given: str) -> None:
    with pytest.raises(CliError) as refused:
        token_of(Where(url="http://h", token=given))
    assert given not in str(refused.value) and refused.value.status == REFUSED
