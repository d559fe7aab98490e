"""Tokens: made, shown once, expiring, changed over, revoked; the administrator's in a file."""

import asyncio
import errno
import json
import os
import re
import stat
import threading
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from settled import Settled
from waiting import until

from diloco_coordinator.access import DAY_S, digest
from diloco_coordinator.api import admin_token_io, auth_io
from diloco_coordinator.api.admin_token_io import FILE, AdminToken, NoToken, admin_token
from diloco_shared import ambient
from diloco_shared.ambient import System

LONG = "0123456789abcdef0123456789"


class Later(System):
    """The machine's clocks, put forward by `by_s`."""

    by_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.by_s

    def monotonic(self) -> float:
        return super().monotonic() + self.by_s


@contextmanager
def clock() -> Iterator[Later]:
    with ambient.using(later := Later()):
        yield later


async def test_a_token_is_shown_once_kept_as_a_digest_and_revoked_at_once(world: Any) -> None:
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read", runs=["mine"])
        again = await desk.ask("POST", "/v1/tokens", {"name": "eve", "scopes": ["read"]})
        assert again.status_code == 409
        listed = await desk.ask("GET", "/v1/tokens")
        (shown,) = listed.json()["tokens"]
        assert (shown["scopes"], shown["runs"], shown["created_by"]) == (
            ["read"],
            ["mine"],
            "admin",
        )
        assert eve not in listed.text and "digest" not in listed.text
        kept = (await world.bus.kv_get("tokens", "eve")).value
        assert eve.encode() not in kept and digest(eve).encode() in kept
        access = (await desk.asks_as(eve, "GET", "/v1/access")).json()
        assert (access["name"], access["scopes"], access["chaos"]) == ("eve", ["read"], True)
        assert (await desk.ask("DELETE", "/v1/tokens/eve")).status_code == 204
        assert (await desk.ask("DELETE", "/v1/tokens/eve")).status_code == 404
        assert (await desk.asks_as(eve, "GET", "/v1/runs")).status_code == 401


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"name": "E"}, "name"),
        ({"name": "admin"}, "name"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["viewer"]}, "scopes.0"),
        ({"scopes": ["administer"], "runs": ["a"]}, "scopes"),
        ({"runs": ["a b"]}, "runs.0"),
        ({"expires_in_s": 0}, "expires_in_s"),
        ({"expires_in_s": 1e12}, "expires_in_s"),
        ({"expires_at": 5.0}, "expires_at"),
        ({"expires_at": 1e12}, "expires_at"),
        ({"expires_in_s": 9, "never": True}, "expires_in_s"),
    ],
)
async def test_what_no_token_can_be_is_named(world: Any, wrong: Any, path: str) -> None:
    async with world.coordinator() as desk:
        body = {"name": "eve", "scopes": ["read"]} | wrong
        answer = await desk.ask("POST", "/v1/tokens", body)
        assert answer.status_code == 422
        assert path in [e["path"] for e in answer.json()["errors"]]
        assert (await desk.get("/v1/tokens"))["tokens"] == []


async def test_a_token_expires_after_ninety_days_unless_it_is_said_otherwise(world: Any) -> None:
    with clock() as later:
        async with world.coordinator() as desk:
            eve = await desk.makes("eve", "read")
            short = await desk.makes("short", "read", expires_in_s=60)
            ever = await desk.makes("ever", "read", never=True)
            later.by_s = 61.0
            gone = await desk.asks_as(short, "GET", "/v1/runs")
            assert gone.status_code == 401 and "has expired" in gone.json()["detail"]
            assert (await desk.asks_as(eve, "GET", "/v1/runs")).status_code == 200
            later.by_s = 90 * DAY_S + 61
            assert (await desk.asks_as(eve, "GET", "/v1/runs")).status_code == 401
            assert (await desk.asks_as(ever, "GET", "/v1/runs")).status_code == 200


async def test_a_token_is_changed_over_without_a_gap(world: Any) -> None:
    with clock() as later:
        async with world.coordinator() as desk:
            old = await desk.makes("eve", "read", expires_in_s=1000.0)
            later.by_s = 900.0
            rotated = (await desk.ask("POST", "/v1/tokens/eve/rotate", {"overlap_s": 50})).json()
            new = rotated["token"]
            assert rotated["expires_at"] == pytest.approx(ambient.wall() + 1000, abs=30)
            assert "digest" not in rotated and "previous_digest" not in rotated
            for token in (old, new):
                assert (await desk.asks_as(token, "GET", "/v1/runs")).status_code == 200
            later.by_s = 951.0
            assert (await desk.asks_as(old, "GET", "/v1/runs")).status_code == 401
            assert (await desk.asks_as(new, "GET", "/v1/runs")).status_code == 200
            at_once = await desk.ask("POST", "/v1/tokens/eve/rotate", {"overlap_s": 0})
            assert (await desk.asks_as(new, "GET", "/v1/runs")).status_code == 401
            newest = at_once.json()["token"]
            assert (await desk.asks_as(newest, "GET", "/v1/runs")).status_code == 200
            assert (await desk.ask("POST", "/v1/tokens/bob/rotate")).status_code == 404


@pytest.mark.parametrize("admin", [False, True])
async def test_a_token_that_is_rotated_again_for_want_of_an_answer_cuts_off_nobody(
    world: Any, admin: bool, tmp_path: Path
) -> None:
    with clock() as later:
        if admin:
            world.admin = AdminToken.at(tmp_path, None)
        async with world.coordinator() as desk:
            if admin:
                name = "admin"
                held = desk.token = (tmp_path / FILE).read_text("ascii").strip()
            else:
                name, held = "eve", await desk.makes("eve", "read", never=True)
            for _ in range(3):  # the answers to the first two never came
                answer = await desk.ask("POST", f"/v1/tokens/{name}/rotate", {"overlap_s": 50})
                newest = answer.json()["token"]
                later.by_s += 10.0
            for token in (held, newest):
                assert (await desk.asks_as(token, "GET", "/v1/runs")).status_code == 200
            if not admin:
                assert "earlier" not in answer.json()
            later.by_s = 51.0
            assert (await desk.asks_as(held, "GET", "/v1/runs")).status_code == 401
            desk.token = newest if admin else desk.token
            answer = await desk.ask("POST", f"/v1/tokens/{name}/rotate", {"overlap_s": 0})
            assert (await desk.asks_as(newest, "GET", "/v1/runs")).status_code == 401
            if not admin:
                assert desk.registry.tokens["eve"].earlier == ()


async def test_last_use_is_known_to_some_minutes_and_costs_one_write(world: Any) -> None:
    with clock() as later:
        async with world.coordinator() as desk:
            eve = await desk.makes("eve", "read")

            async def used() -> tuple[Any, int]:
                (shown,) = (await desk.get("/v1/tokens"))["tokens"]
                return shown["used_at"], desk.registry.revisions["tokens", "eve"]

            assert (await used())[0] is None
            for _ in range(5):
                await desk.asks_as(eve, "GET", "/v1/runs")
            await until(lambda: desk.registry.tokens["eve"].used_at is not None)
            first = await used()
            await desk.asks_as(eve, "GET", "/v1/runs")
            assert await used() == first
            later.by_s = auth_io.USED_S + 1
            await desk.asks_as(eve, "GET", "/v1/runs")
            await until(lambda: desk.registry.tokens["eve"].used_at > first[0])
            assert (await desk.asks_as(eve, "GET", "/v1/runs")).status_code == 200


async def test_another_coordinator_knows_what_one_has_changed(world: Any) -> None:
    async with world.coordinator() as one, world.coordinator() as two:
        eve = await one.makes("eve", "read")
        await until(lambda: "eve" in two.registry.tokens)
        new = (await two.ask("POST", "/v1/tokens/eve/rotate", {"overlap_s": 0})).json()["token"]
        await until(lambda: one.registry.tokens["eve"].rotated_at is not None)
        assert (await one.asks_as(eve, "GET", "/v1/runs")).status_code == 401
        assert (await one.asks_as(new, "GET", "/v1/runs")).status_code == 200


# --- the administrator's --------------------------------------------------------------------------


def test_a_token_is_of_the_chance_that_whoever_makes_it_is_told() -> None:
    """A world tells its own, so that a seed plays it again."""

    class Told(System):
        def token(self, size: int) -> str:
            return bytes(range(size)).hex()

    with ambient.using(Told()):
        made = admin_token_io.new_token()
    assert urlsafe_b64decode(made + "=") == bytes(range(32))
    others = {admin_token_io.new_token() for _ in range(8)}
    assert len(others) == 8 and all(re.fullmatch(r"[\w-]{43}", other) for other in others)


def test_the_admin_token_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    token = admin_token(tmp_path / "data")
    assert len(token) >= 40
    assert admin_token(tmp_path / "data") == token
    file = tmp_path / "data" / "admin-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_text("")
    assert len(admin_token(tmp_path / "data")) >= 40, "an empty token must not open the door"


def test_a_new_admin_token_is_on_the_disk_and_its_name_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves another one than people were told."""
    settled = Settled(monkeypatch)
    token = admin_token(tmp_path / "data")
    assert settled.calls[1:] == [{"data"}, len(token) + 1, {"admin-token"}]


def test_a_disk_that_fails_keeps_nobody_from_the_admin_token_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = admin_token(tmp_path / "data")

    def fails(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    assert admin_token(tmp_path / "data") == token


async def test_a_replaced_file_is_taken_up_without_a_restart(world: Any, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_text(f"{LONG}-1\n")
    world.admin = AdminToken(file)
    with clock() as later:
        async with world.coordinator() as desk:

            async def good(*tokens: str) -> list[bool]:
                later.by_s += admin_token_io.LOOK_S
                answers = [await desk.asks_as(f"{LONG}-{t}", "GET", "/v1/runs") for t in tokens]
                return [a.status_code == 200 for a in answers]

            assert await good("1", "2") == [True, False]
            file.write_text(f"{LONG}-2\n\n{LONG}-1\n")
            assert await good("1", "2") == [True, True], "both lines are good"
            file.write_text(f"{LONG}-2\n")
            assert await good("1", "2") == [False, True]
            for broken in (b"", b"short", b"\xff" * 40):
                file.write_bytes(broken)
                assert await good("2") == [True], "somebody is writing it"
            file.unlink()
            assert await good("2") == [True]


async def test_the_admin_token_is_changed_over_without_a_gap(world: Any, tmp_path: Path) -> None:
    data = tmp_path / "data"
    world.admin = AdminToken.at(data, None)
    with clock() as later:
        async with world.coordinator() as desk:
            desk.token = old = (data / "admin-token").read_text().strip()
            new = (await desk.ask("POST", "/v1/tokens/admin/rotate", {"overlap_s": 60})).json()
            assert (data / "admin-token").read_text().strip() == new["token"] != old
            assert old not in (data / "admin-token.before").read_text()
            for path in data.iterdir():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            for token in (old, new["token"]):
                assert (await desk.asks_as(token, "GET", "/v1/runs")).status_code == 200
        world.admin = AdminToken.at(data, None)
        async with world.coordinator() as desk:
            assert (await desk.asks_as(old, "GET", "/v1/runs")).status_code == 200, "a restart"
            later.by_s = 61.0
            assert (await desk.asks_as(old, "GET", "/v1/runs")).status_code == 401
            desk.token = new["token"]
            assert (await desk.ask("GET", "/v1/runs")).status_code == 200
            assert (await desk.ask("DELETE", "/v1/tokens/admin")).status_code == 409


async def test_two_who_change_the_admin_token_over_at_once_each_get_a_good_one(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admin = AdminToken.at(tmp_path / "data", None)
    rotate, began = world.admin.rotate, threading.Barrier(2)

    def slowly(overlap_s: float) -> Any:
        """Both read the file before one writes it, where nothing keeps the second one out."""
        with suppress(threading.BrokenBarrierError):
            began.wait(0.2)
        return rotate(overlap_s)

    write = admin_token_io.replace_for_owner

    def late(*given: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            began.wait(0.2)
        write(*given)

    monkeypatch.setattr(world.admin, "rotate", slowly)
    monkeypatch.setattr(admin_token_io, "replace_for_owner", late)
    async with world.coordinator() as desk:
        desk.token = (tmp_path / "data" / "admin-token").read_text().strip()
        asked = [desk.ask("POST", "/v1/tokens/admin/rotate") for _ in "12"]
        answers = await asyncio.gather(*asked)
        assert [a.status_code for a in answers] == [200, 200], [a.text for a in answers]
        for token in (desk.token, *(a.json()["token"] for a in answers)):
            assert (await desk.asks_as(token, "GET", "/v1/runs")).status_code == 200


async def test_a_file_that_cannot_be_written_says_what_to_do(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admin = AdminToken.at(tmp_path / "data", None)
    async with world.coordinator() as desk:
        desk.token = (tmp_path / "data" / "admin-token").read_text().strip()

        def refuse(*_: object) -> None:
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(admin_token_io, "replace_for_owner", refuse)
        answer = await desk.ask("POST", "/v1/tokens/admin/rotate")
        assert answer.status_code == 409 and "second line" in answer.json()["detail"]
        assert (await desk.ask("GET", "/v1/runs")).status_code == 200


@pytest.mark.parametrize("content", ["", "\n\n", "short\n", "\xff"])
def test_a_file_without_a_secret_opens_nothing(tmp_path: Path, content: str) -> None:
    file = tmp_path / "given"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(NoToken, match="given"):
        AdminToken(file)
    with pytest.raises(NoToken, match="nowhere"):
        AdminToken(tmp_path / "nowhere")


async def test_no_answer_and_no_event_shows_a_secret(world: Any, tmp_path: Path) -> None:
    world.admin = AdminToken.at(tmp_path / "data", None)
    async with world.coordinator() as desk:
        desk.token = admin = (tmp_path / "data" / "admin-token").read_text().strip()
        eve = await desk.makes("eve", "read")
        await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
        texts = [
            (await desk.asks_as(token, method, path)).text
            for token in (eve, admin, "wrong-one")
            for method, path in (("DELETE", "/v1/runs/demo"), ("GET", "/v1/tokens"))
        ]
        texts += [json.dumps(await desk.get(p)) for p in ("/v1/events", "/v1/audit", "/v1/access")]
        for secret in (admin, eve, "wrong-one", digest(admin), digest(eve)):
            assert not [text for text in texts if secret in text]
