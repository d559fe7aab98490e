"""The process that makes an export, as its coordinator sees it: well, ill, dead, and mute."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from waiting import until

from diloco_coordinator.app import Settings
from diloco_coordinator.exports.child_io import ChildExporter, ExportFault
from diloco_coordinator.exports.exports import Asked, ExportRecord
from diloco_coordinator.exports.sampling_io import ChildSampler
from diloco_shared.protocol.exports import LINE_BYTES_MAX

SAY = """
import os, signal, sys, time
def say(text): print(text, flush=True)
def moved(n): say('{"kind":"moved","stage":"fetching","done":%d,"total":9}' % n)
def done(): say('{"kind":"done"}')
"""


def record(**asked: Any) -> ExportRecord:
    wanted = Asked.model_validate(asked)
    return ExportRecord(
        id="e1", run="demo", run_id="ab", folder="demo.ab", asked=wanted, begun_at=0.0
    )


async def made(program: str, silence_s: float = 60.0, **asked: Any) -> list[int]:
    """What a process says that carries out `program`: how far it was."""
    found: list[int] = []
    command = (sys.executable, "-c", SAY + program)
    exporter = ChildExporter(dict(os.environ), command, silence_s)
    await exporter.make(record(**asked), Path("/nowhere/files"), lambda m: found.append(m.done))
    return found


async def test_progress_is_heard_until_it_is_done() -> None:
    assert await made("moved(1); moved(9); done()") == [1, 9]


async def test_its_arguments_say_what_is_wanted() -> None:
    check = "assert sys.argv[1:] == %r, sys.argv; done()"
    common = ["demo", "--run-id", "ab", "--to", "/nowhere/files"]
    common += ["--owner", str(os.getpid()), "--dtype"]
    await made(check % [*common, "fp32"])
    await made(check % [*common, "bf16", "--version", "0"], version=0, dtype="bf16")
    await made(check % [*common, "fp32", "--checkpoint", "r/1"], checkpoint="r/1")


async def test_what_it_writes_for_people_is_logged() -> None:
    with structlog.testing.capture_logs() as logs:
        await made("print('careful', file=sys.stderr); done()")
    assert [(e["run"], e["id"], e["line"]) for e in logs if e["event"] == "export"] == [
        ("demo", "e1", "careful")
    ]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ('say(\'{"kind":"failed","reason":"version 7 is not kept"}\'); sys.exit(1)', "7 is not"),
        ("sys.exit(3)", r"ended \(status 3\)$"),
        ("done(); sys.exit(1)", r"ended \(status 1\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"ended \(SIGKILL\)"),
        ("moved(1)", r"ended \(status 0\)"),
        ("raise MemoryError('no more')", r"status 1\), and said last: MemoryError: no more"),
    ],
)
async def test_one_that_does_not_make_it_says_why(program: str, says: str) -> None:
    with pytest.raises(ExportFault, match=says):
        await made(program)


async def test_lines_beyond_measure_are_cut_and_others_passed_over() -> None:
    assert await made(f"say('x' * {3 * LINE_BYTES_MAX}); say('?'); moved(2); done()") == [2]
    long = f"sys.stderr.write('y' * {3 * LINE_BYTES_MAX} + chr(10)); moved(2); done()"
    assert await made(long) == [2]


async def test_one_that_says_nothing_is_ended() -> None:
    with pytest.raises(ExportFault, match="said nothing for 0 s: try again"):
        await made("time.sleep(600)", silence_s=0.2)


async def test_one_whose_coordinator_stops_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    task = asyncio.ensure_future(
        made(f"open({str(mark)!r}, 'w').write(str(os.getpid())); moved(1); time.sleep(600)")
    )
    pid = int(await until(lambda: mark.exists() and mark.read_text()))
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_no_program_is_no_export() -> None:
    exporter = ChildExporter({}, ("/nonexistent/python",))
    with pytest.raises(ExportFault, match="no process can be started for it"):
        await exporter.make(record(), Path("/nowhere"), lambda m: None)


def test_it_is_told_of_the_coordinators_bus_and_not_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DILOCO_ID", "coordinator")
    monkeypatch.setenv("DILOCO_NATS_URL", "nats://other:1")
    settings = Settings(nats_url="nats://hub:4", nats_token="t", data=tmp_path)
    told = ChildExporter.of(settings).environment
    assert (told["DILOCO_NATS_URL"], told["DILOCO_NATS_TOKEN"]) == ("nats://hub:4", "t")
    assert told["DILOCO_CHECKPOINTS"] == str(tmp_path / "checkpoints")
    assert "DILOCO_ID" not in told


def test_an_export_reads_with_credentials_of_its_own_and_a_sample_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(nats_url="nats://hub:4", nats_credentials="/hub/coordinator", data=tmp_path)
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", "/secret")
    monkeypatch.setenv("DILOCO_ADMIN_TOKEN_FILE", "/secret")
    told = ChildExporter.of(settings, "/hub/reader").environment
    assert told["DILOCO_NATS_CREDENTIALS"] == "/hub/reader"
    assert ChildExporter.of(settings).environment["DILOCO_NATS_CREDENTIALS"] == "/hub/coordinator"
    sampling = ChildSampler.of(settings).environment
    assert not [name for name in sampling if "NATS" in name or "ADMIN" in name]
    assert "/secret" not in {*told.values(), *sampling.values()}
