"""Who changed what: rows of the audit log, in files of a bounded size, and actors on events."""

import asyncio
import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from settled import Settled
from structlog.testing import capture_logs
from waiting import until

from diloco_coordinator.access import Asking, TokenRecord
from diloco_coordinator.api import audit_io
from diloco_coordinator.api.audit_io import Audit
from diloco_coordinator.api.gateway_io import BODY_BYTES_MAX
from diloco_coordinator.audit import REFUSED_BURST, ROWS_KEPT, AuditTrail

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}


def asking(name: str = "eve", **target: str) -> Asking:
    token = TokenRecord(name=name, scopes=("operate",), digest="", created_at=0.0)
    return Asking("10.0.0.1", "operate", token=token, target=target)


async def test_every_change_and_every_refusal_is_a_row(world: Any, tmp_path: Path) -> None:
    async with world.coordinator() as desk:
        anna = await desk.makes("anna", "read", "operate", runs=["demo"])
        await desk.asks_as(anna, "POST", "/v1/runs", SPEC)
        await desk.asks_as(anna, "POST", "/v1/runs/demo/pause")
        await desk.asks_as(anna, "GET", "/v1/runs/demo")
        await desk.asks_as(anna, "PATCH", "/v1/runs/demo", {"quorum": 99})
        await desk.asks_as(anna, "POST", "/v1/runs", {**SPEC, "name": "other"})
        await desk.asks_as(anna, "GET", "/v1/runs/other")
        await desk.asks_as("wrong", "GET", "/v1/runs/demo")
        rows = (await desk.get("/v1/audit"))["rows"]
        shown = [
            (r["actor"], f"{r['method']} {r['route']}", r["target"], r["outcome"], r["status"])
            for r in rows
        ]
        assert shown == [
            ("admin", "POST /v1/tokens", {"name": "anna"}, "done", 201),
            ("anna", "POST /v1/runs", {"run": "demo"}, "done", 201),
            ("anna", "POST /v1/runs/{run}/pause", {"run": "demo"}, "done", 200),
            ("anna", "PATCH /v1/runs/{run}", {"run": "demo"}, "failed", 422),
            ("anna", "POST /v1/runs", {"run": "other"}, "refused", 403),
            ("anna", "GET /v1/runs/{run}", {"run": "other"}, "refused", 403),
            ("", "GET /v1/runs/{run}", {"run": "demo"}, "refused", 401),
        ]
        assert [r["why"] for r in rows[3:5]] == ["Invalid change", "The token does not allow this"]
        assert {r["address"] for r in rows} == {"127.0.0.1"}
        assert [r["seq"] for r in rows] == list(range(1, 8))
        of_anna = (await desk.get("/v1/audit?actor=anna&after=3&limit=2"))["rows"]
        assert [r["seq"] for r in of_anna] == [4, 5]
        file = tmp_path / "audit.jsonl"
        assert [json.loads(line)["seq"] for line in file.read_text().splitlines()] == list(
            range(1, 8)
        )
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with world.coordinator() as desk:  # a restart
        assert (await desk.get("/v1/audit"))["rows"] == rows
        await desk.ask("DELETE", "/v1/tokens/anna")
        assert (await desk.get("/v1/audit?limit=1"))["rows"][0]["seq"] == 8


async def test_events_say_whose_request_caused_them(world: Any) -> None:
    async with world.coordinator() as desk:
        anna = await desk.makes("anna", "operate")
        await desk.asks_as(anna, "POST", "/v1/runs", SPEC)
        await desk.ask("POST", "/v1/runs/demo/pause")
        await world.joins("a")
        await world.joins("syncer-1", role="syncer")
        await until(lambda: {"run-created", "run-paused", "assigned"} <= _kinds(desk))
        actors = {e.kind: e.data.get("actor") for _, e in desk.registry.events}
        assert actors["run-created"] == "anna" and actors["run-paused"] == "admin"
        assert actors["assigned"] is None, "the coordinator did that of itself"
        texts = {e.kind: e.text for _, e in desk.registry.events}
        assert texts["run-paused"] == "pausing run demo"


def _kinds(desk: Any) -> set[str]:
    return {e.kind for _, e in desk.registry.events}


async def test_a_mistake_of_ours_is_a_row_too(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)

        async def fail(*_: object) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(desk.registry, "update_run", fail)
        with pytest.raises(RuntimeError):  # the transport of the test passes it on
            await desk.ask("POST", "/v1/runs/demo/pause")
        assert (await desk.get("/v1/audit"))["rows"][-1]["status"] == 500


def test_a_stranger_cannot_fill_it_and_what_is_left_out_is_counted() -> None:
    trail, nobody = AuditTrail(), Asking("10.0.0.1", "read")
    for _ in range(REFUSED_BURST + 5):
        trail.add(nobody, "GET", "/v1/runs", 401, at=1.0, now=1.0)
    assert len(trail.rows) == REFUSED_BURST
    row = trail.add(asking(run="x" * 500), "POST", "/v1/runs", 201, at=2.0, now=1.0)
    assert row is not None and row.left_out == 5 and len(row.target["run"]) == 63
    assert trail.add(asking(), "GET", "/v1/runs", 200, at=2.0, now=1.0) is None
    for _ in range(2 * ROWS_KEPT):
        trail.add(asking(), "POST", "/v1/runs", 201, at=2.0, now=1.0)
    assert len(trail.rows) == ROWS_KEPT


def test_its_files_stay_within_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I12."""
    monkeypatch.setattr(audit_io, "FILE_BYTES_MAX", 1000)

    async def note() -> None:
        audit = Audit(tmp_path)
        for _ in range(60):
            await audit.note(asking(run="demo"), "POST", "/v1/runs/{run}/stop", 200)

    asyncio.run(note())
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["audit.jsonl", *(f"audit.jsonl.{n}" for n in range(1, 5))]
    assert all(p.stat().st_size <= 1000 for p in tmp_path.iterdir())
    kept = [
        json.loads(line)["seq"]
        for name in [*reversed(names[1:]), names[0]]
        for line in (tmp_path / name).read_text().splitlines()
    ]
    assert kept == list(range(kept[0], 61)), "the newest, in order"
    again = Audit(tmp_path)
    assert again.trail.next_seq == 61 and len(again.trail.rows) > 3


async def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path) -> None:
    await Audit(tmp_path).note(asking(), "POST", "/v1/runs", 201)
    with (tmp_path / "audit.jsonl").open("a") as file:
        file.write('{"seq": 2, "at"')
    audit = Audit(tmp_path)
    await audit.note(asking(), "POST", "/v1/runs", 409)
    assert [r.status for r in Audit(tmp_path).trail.rows] == [201, 409]


async def test_a_full_disk_keeps_nobody_from_stopping_a_run(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        monkeypatch.setattr(audit_io, "_append", full)
        assert (await desk.ask("POST", "/v1/runs/demo/stop")).status_code == 200
        assert (await desk.get("/v1/audit"))["rows"][-1]["route"] == "/v1/runs/{run}/stop"


async def test_rows_that_come_during_a_write_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, kept = list[int](), audit_io._append

    def counted(path: Path, rows: Any) -> None:
        writes.append(len(rows))
        kept(path, rows)

    monkeypatch.setattr(audit_io, "_append", counted)
    audit = Audit(tmp_path)
    await asyncio.gather(*(audit.note(asking(), "POST", "/v1/runs", 409) for _ in range(50)))
    assert sum(writes) == 50 and len(writes) <= 3
    assert [row.seq for row in Audit(tmp_path).trail.rows] == list(range(1, 51))


async def test_a_disk_that_hangs_keeps_no_answer_and_gets_the_rows_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lets_go, kept = threading.Event(), audit_io._append

    def hangs(path: Path, rows: Any) -> None:
        lets_go.wait(30)
        kept(path, rows)

    monkeypatch.setattr(audit_io, "_append", hangs)
    monkeypatch.setattr(audit_io, "WRITTEN_S_MAX", 0.02)
    monkeypatch.setattr(audit_io, "WAITING_MAX", 3)
    audit = Audit(tmp_path)
    with capture_logs() as logs:
        for _ in range(6):  # one is being written, three wait, and two find no place
            await audit.note(asking(), "POST", "/v1/runs", 201)
    assert not (tmp_path / audit_io.FILE).exists()
    said = [line["event"] for line in logs]
    assert said == [
        "audit rows are late: the disk is slow or hangs",
        *["audit row not written"] * 2,
    ]
    lets_go.set()
    monkeypatch.setattr(audit_io, "WRITTEN_S_MAX", 30.0)
    monkeypatch.setattr(audit_io, "WAITING_MAX", 100)
    await audit.note(asking(), "POST", "/v1/runs", 409)
    assert [row.seq for row in Audit(tmp_path).trail.rows] == [1, 2, 3, 4, 7]


async def test_what_is_refused_before_its_route_looks_at_the_token_is_a_row_with_the_actor(
    world: Any,
) -> None:
    async with world.coordinator() as desk:
        anna = await desk.makes("anna", "read", "operate")
        for token in (anna, "wrong"):
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            for content in (b" " * (BODY_BYTES_MAX + 1), b"\xff\xfe{", b"[" * 100_000):
                answer = await desk.http.post("/v1/runs", content=content, headers=headers)
                assert answer.status_code in (400, 413), answer.text
        rows = (await desk.get("/v1/audit"))["rows"][1:]
        shown = [(r["actor"], r["route"], r["status"], r["outcome"]) for r in rows]
        route, statuses = "/v1/runs", (413, 400, 400)
        assert shown == [
            *(("anna", route, status, "failed") for status in statuses),
            *(("", route, status, "refused") for status in statuses),
        ]
        for path in ("/", "/v1/nothing"):
            await desk.http.post(path, content=b"{")
        assert len((await desk.get("/v1/audit"))["rows"]) == 1 + len(rows), (
            "nothing asks for tokens"
        )


def test_half_a_character_hides_no_row() -> None:
    """JSON can say one and UTF-8 cannot: its row would take those beside it along."""
    row = AuditTrail().add(asking(run="a\ud800"), "POST", "/v1/runs", 403, at=1.0, now=1.0)
    assert row is not None and json.loads(row.line)["target"] == {"run": "a\\ud800"}


async def test_the_name_of_a_new_log_is_put_on_the_disk_before_its_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut takes all rows with it."""
    settled, audit = Settled(monkeypatch), Audit(tmp_path)
    await audit.note(asking(), "POST", "/v1/runs", 201)
    names, rows = settled.calls
    assert names == {audit_io.FILE} and isinstance(rows, int) and rows > 0
    await audit.note(asking(), "POST", "/v1/runs", 201)
    assert len(settled.calls) == 3, "once"
