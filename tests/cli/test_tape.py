"""`diloco tape` and `diloco replay`: lines for people, and what a user may get wrong."""

import asyncio
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from cli.test_tape_file import written

from diloco_cli.__main__ import main
from diloco_cli.commands import tape
from diloco_cli.commands.tape import KEEP_ALL, _no_other, replayed_lines
from diloco_cli.tape_file import FORMATS, plain
from diloco_cli.tape_lines import record_line
from diloco_cli.words import FAILED, INVALID, NO_CLUSTER, CliError
from diloco_shared.bus.port import Stored, StreamSpec
from diloco_shared.checkpoints import tape_archive_io
from diloco_shared.checkpoints.tape_archive_io import archives_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeEnd, TapeInit, TapeRecord, TapeSetting, TapeTerm
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.bus import MemoryBroker, MemoryBus
from diloco_syncer.history.audit_io import BATCH_MANIFESTS, Replayed, TapeDifference


def diloco(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["diloco", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.parametrize(
    "command", [["tape", "show", "r"], ["tape", "verify", "r"], ["replay", "r"]]
)
def test_without_a_cluster_it_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: list[str],
) -> None:
    assert diloco(monkeypatch, *command, "--data", str(tmp_path)) == NO_CLUSTER
    assert "no cluster runs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ((), "DATA/checkpoints"),
        (("--nats-url", "tls://hub:4222"), "s3://bucket/checkpoints"),
        (("--nats-url", "tls://hub:4222", "--checkpoints", "/other"), "/other"),
        (("--checkpoints", "/other"), "/other"),
    ],
)
def test_archives_of_a_hub_are_looked_for_where_its_processes_are_told(
    given: tuple[str, ...], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the cluster of this machine the profile says nothing: 'diloco up' passes it on to none."""
    asked = list[str]()

    class Nobody:
        async def close(self) -> None:
            pass

    async def bus_of(*_: Any) -> Nobody:
        return Nobody()

    async def recorded(bus: Any, run: str, shard: int, root: str) -> Any:
        asked.append(root)
        raise CliError("enough")

    monkeypatch.setattr(tape, "bus_of", bus_of)
    monkeypatch.setattr(tape, "_recorded", recorded)
    monkeypatch.delenv("DILOCO_NATS_URL", raising=False)
    monkeypatch.setenv("DILOCO_CHECKPOINTS", "s3://bucket/checkpoints")
    assert diloco(monkeypatch, "tape", "verify", "r", "--data", str(tmp_path), *given) == FAILED
    assert asked == [place.replace("DATA", str(tmp_path))]


class Counted(MemoryBus):
    """Is asked for a batch at a time, as what lies there may be larger than any memory."""

    async def fetch(self, *where: Any, limit: int | None = None, **more: Any) -> list[Stored]:
        assert limit is not None and limit <= max(tape_archive_io.BATCH_RECORDS, BATCH_MANIFESTS)
        return await super().fetch(*where, limit=limit, **more)

    async def close(self) -> None:
        pass


@pytest.fixture
def long_tape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TapeTerm]:
    """Of a run `r` whose place of checkpoints is `c`: batches of 4 records, of 15, 10 archived."""
    monkeypatch.setattr(tape_archive_io, "BATCH_RECORDS", 4)
    broker = MemoryBroker()
    records = [TapeTerm(epoch=0, term=n, leader="s", at=float(n)) for n in range(1, 16)]

    async def work() -> None:
        bus = MemoryBus(broker, "a")
        for stream, filled in (
            ("tape", subjects.tape_stream("r")),
            ("up", subjects.up_stream("r")),
        ):
            await bus.ensure_stream(StreamSpec(filled, (f"{stream}.r.>",), 1 << 20))
        await bus.ensure_bucket(subjects.RUNS)
        spec = RunSpec.model_validate({"name": "r", "id": "ab", "budget": {"steps": 1}})
        run = RunRecord(
            name="r", spec=spec.model_dump(mode="json"), desired="running", quorum=1, created_at=0.0
        )
        await bus.kv_put(subjects.RUNS, "r", encode(run))
        for record in records:
            await bus.append(subjects.tape("r", 0), encode(record))
        (archive,) = archives_of(spec, str(tmp_path / "c"))
        stored = await bus.fetch(subjects.tape_stream("r"), "tape.r.0", limit=10)
        archive.write(stored[:3])
        archive.write(stored[3:])
        await bus.purge(subjects.tape_stream("r"), "tape.r.0", below_seq=11)

    asyncio.run(work())

    async def bus_of(*_: Any) -> MemoryBus:
        return Counted(broker, "b")

    monkeypatch.setattr(tape, "bus_of", bus_of)
    return records


def test_a_long_tape_is_shown_and_written_record_by_record(
    long_tape: list[TapeTerm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--checkpoints", str(tmp_path / "c")]
    lines = [record_line(seq, record) for seq, record in enumerate(long_tape, 1)]
    rows = [{"seq": n, **record.model_dump(mode="json")} for n, record in enumerate(long_tape, 1)]
    for begin in (0, 1, 9, 16):
        first = max(begin - 1, 0)
        assert diloco(monkeypatch, "tape", "show", "r", "--from", str(begin), *where) == 0
        assert capsys.readouterr().out.splitlines() == (lines[first:] or ["the tape is empty"])
        command = ["tape", "show", "r", "--from", str(begin), "--json", *where]
        assert diloco(monkeypatch, *command) == 0
        assert capsys.readouterr().out == json.dumps(rows[first:]) + "\n"
    for form in FORMATS:
        file = tmp_path / f"tape{form}"
        assert diloco(monkeypatch, "tape", "export", "r", str(file), *where) == 0
        assert file.read_bytes() == b"".join(written(rows, form))
        assert capsys.readouterr().out == f"15 records in {file}\n"


@pytest.mark.parametrize("command", [["tape", "verify"], ["replay"]])
def test_a_long_tape_is_judged_record_by_record(
    command: list[str],
    long_tape: list[TapeTerm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ["--checkpoints", str(tmp_path / "c"), "--data", str(tmp_path)]
    assert diloco(monkeypatch, *command, "r", *where, "--json") == 0
    assert json.loads(capsys.readouterr().out)["records"] == 15


def test_an_export_that_ends_half_way_leaves_the_file_of_before(
    long_tape: list[TapeTerm],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, archived = tmp_path / "tape.jsonl", sorted((tmp_path / "c").glob("*/tape/*/*.z"))
    before = b"".join(written([{"seq": 1}], ".jsonl"))
    file.write_bytes(before)
    archived[1].write_bytes(b"torn")
    command = ["tape", "export", "r", str(file), "--checkpoints", str(tmp_path / "c")]
    assert diloco(monkeypatch, *command) == FAILED
    assert "--checkpoints names another place" in capsys.readouterr().err
    assert file.read_bytes() == before and [*tmp_path.glob("tape*")] == [file]


def test_an_export_needs_a_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert diloco(monkeypatch, "tape", "export", "r", str(tmp_path / "x.txt")) == INVALID
    assert ".jsonl or .msgpack" in capsys.readouterr().err


def test_an_exported_file_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tape.jsonl"
    file.write_bytes(b"".join(written([{"seq": 1, "kind": "term"}, {"seq": 2}], ".jsonl")))
    assert diloco(monkeypatch, "tape", "check", str(file)) == 0
    assert "2 records, all as they were written" in capsys.readouterr().out
    file.write_bytes(file.read_bytes().replace(b"term", b"tern"))
    assert diloco(monkeypatch, "tape", "check", str(file)) == FAILED
    assert "row 1, after the beginning: the digest of this row" in capsys.readouterr().out
    assert diloco(monkeypatch, "tape", "check", str(tmp_path / "none.msgpack")) != 0
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="there is none on this system")
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_whose_disk_is_damaged_cannot_be_read(form: str, tmp_path: Path) -> None:
    """This one, too, answers with an input/output error once it is open."""
    file = tmp_path / f"tape{form}"
    file.symlink_to("/proc/self/mem")
    for look in (tape.check_file, tape._checked):
        with pytest.raises(CliError, match="cannot be read: input/output error"):
            look(file)


def test_records_are_lines() -> None:
    assert record_line(1, TapeTerm(epoch=0, term=2, leader="s", at=1.0)) == (
        "     1  term        s leads in term 2, epoch 0"
    )
    setting = TapeSetting(term=2, name="quorum", value=3, reason="as the user asked", at=2.0)
    assert (
        record_line(7, setting) == "     7  setting     quorum becomes 3, term 2: as the user asked"
    )
    end = TapeEnd(
        term=2, outcome="stopped", reason="as the user asked", versions=(3, -1, 2), at=3.0
    )
    assert record_line(8, end) == (
        "     8  end         the run is stopped, versions 2 to 3, term 2: as the user asked"
    )
    begun = TapeInit(
        run="r",
        config_hash="0" * 32,
        layout=(),
        anchor_digests=("0" * 32,),
        subjects=("in.r",),
        learner="a",
        incarnation=1,
        at=0.0,
    )
    assert record_line(1, begun).endswith("(life 1) are accepted: 0 tensors in 1 fragment")


@pytest.mark.parametrize("kind", typing.get_args(typing.get_args(TapeRecord)[0]))
def test_no_record_is_shown_as_the_program_keeps_it(kind: Any) -> None:
    """Lists of versions and digests are for `--json`."""
    fields: dict[str, Any] = {"versions": (3, 3), "anchor_digests": (), "layout": ()}
    fields |= {"verdicts": (), "subjects": (), "leader": "s", "reason": "as asked", "counts": ()}
    record = kind.model_construct(**{**dict.fromkeys(kind.model_fields, 1), **fields})
    record = record.model_copy(update={"kind": kind.model_fields["kind"].default})
    line = record_line(9, record)
    assert line.startswith(f"     9  {record.kind} ")
    assert not any(bad in line for bad in "=()[]{}") or kind is TapeInit


def test_a_replay_says_how_to_keep_what_it_lacks() -> None:
    whole = Replayed(0, 3, 2, None)
    assert replayed_lines(whole) == [
        "3 records from the beginning on, 2 merges: every digest is the same"
    ]
    late = replayed_lines(Replayed(508, 1, 1, None))
    assert late[0].startswith("1 record from the snapshot of record 508 on, 1 merge:")
    assert late[1].endswith(KEEP_ALL)
    purged = replayed_lines(
        Replayed(508, 2, 1, TapeDifference(511, "up.r", "up.r is not there", True))
    )
    assert purged[1] == "record 511: up.r is not there"
    assert "run this again" in purged[2] and purged[2].endswith(KEEP_ALL)
    other = replayed_lines(Replayed(0, 2, 1, TapeDifference(3, "", "another digest")))
    assert other == [
        "the first difference, after 2 records from the beginning on, 1 merge:",
        "record 3: another digest",
    ]


def test_floats_that_json_cannot_say_become_null() -> None:
    assert plain({"norm": float("nan"), "of": [1.0, float("inf")]}) == {
        "norm": None,
        "of": [1.0, None],
    }


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        (b"", False),
        (b"".join(written([{"seq": 1}], ".jsonl")), False),
        (b'{"text": "a corpus of somebody"}\n', True),
        (b"[run]\nname = 'x'\n", True),
    ],
)
def test_an_export_overwrites_exports_alone(tmp_path: Path, content: bytes, refused: bool) -> None:
    file = tmp_path / "data.jsonl"
    _no_other(file)
    file.write_bytes(content)
    if not refused:
        _no_other(file)
        return
    with pytest.raises(CliError, match="is no export of a tape"):
        _no_other(file)
