"""An exported tape is what was written, or the place of the first change is named (I9)."""

import json
import os
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syncer.recording import Recording

from diloco_cli import tape_file
from diloco_cli.tape_file import FORMATS, Rows, check, plain


def records() -> list[dict[str, Any]]:
    recording = Recording()
    recording.begin()
    for _ in range(3):
        recording.round()
    return [
        {"seq": seq, **record.model_dump(mode="json")}
        for seq, record in enumerate(recording.tape, 1)
    ]


def written(records: Iterable[dict[str, Any]], form: str) -> list[bytes]:
    """The rows of a file."""
    rows = Rows(form)
    return [*map(rows.row, records), rows.end()]


RECORDS = records()
FILES = {form: written(RECORDS, form) for form in FORMATS}
both = pytest.mark.parametrize("form", FORMATS)


@both
def test_what_was_written_is_sound(form: str) -> None:
    assert len(FILES[form]) == len(RECORDS) + 1
    assert check(b"".join(FILES[form]), form) == (len(RECORDS), "")
    assert check(b"".join(written([], form)), form) == (0, "")


class Reading(BytesIO):
    """A file of which `most` bytes are in memory at once, at the most: those that are asked for."""

    most = 0

    def read(self, size: int | None = -1) -> bytes:
        return self._given(super().read(size))

    def readline(self, size: int | None = -1) -> bytes:
        return self._given(super().readline(size))

    def _given(self, found: bytes) -> bytes:
        self.most = max(self.most, len(found))
        return found


@both
def test_a_file_is_read_a_piece_at_a_time(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of many learners and days has more bytes than this machine has memory."""
    whole = b"".join(FILES[form])
    for piece in (1, 7, len(whole) // 2):
        monkeypatch.setattr(tape_file, "_PIECE_BYTES", piece)
        for data in (whole, whole[:-1], b""):
            file = Reading(data)
            assert check(file, form) == check(data, form)
            assert file.most <= (piece if form == ".msgpack" else max(map(len, FILES[form])))


@both
def test_what_is_larger_than_any_row_is_not_read_to_its_end(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody names another file, or a byte that is damaged tells of a string of gigabytes."""
    monkeypatch.setattr(tape_file, "ROW_BYTES_MAX", 200_000)
    begun = b"{" if form == ".jsonl" else b"\xdb\x04\x00\x00\x00"  # a string of 64 MiB
    file = Reading(begun + b"x" * 1_000_000)
    assert check(file, form) == (0, "row 1, after the beginning: not a row as it was written")
    assert file.tell() < 300_000


@both
def test_a_file_that_grows_shorter_while_it_is_read_ends_there(form: str, tmp_path: Path) -> None:
    """Nor does what a disk cannot give end the process, as it would where the file is mapped."""
    rows = written([{"seq": n, "text": "x" * 999} for n in range(1, 500)], form)
    file = tmp_path / f"tape{form}"
    file.write_bytes(b"".join(rows))
    with file.open("rb") as there:
        there.peek()
        os.truncate(file, 0)
        sound, fault = check(there, form)
    assert sound < 499 and fault.startswith(f"row {sound + 1}, after ")


def test_lines_are_json_with_the_record_in_them() -> None:
    rows = [json.loads(line) for line in FILES[".jsonl"]]
    assert [{k: v for k, v in r.items() if k != "chain"} for r in rows[:-1]] == plain(RECORDS)
    assert rows[-1]["records"] == len(RECORDS)


@both
@given(st.data())
def test_one_changed_byte_is_found_in_its_row(form: str, data: st.DataObject) -> None:
    rows = FILES[form]
    n = data.draw(st.integers(0, len(rows) - 1))
    place = data.draw(st.integers(0, len(rows[n]) - 1))
    changed = bytearray(rows[n])
    changed[place] ^= data.draw(st.integers(1, 255))
    sound, fault = check(b"".join([*rows[:n], bytes(changed), *rows[n + 1 :]]), form)
    assert (sound, fault.startswith(f"row {n + 1}, after ")) == (n, True)


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", '"\\ud800"', "[" * 900 + "]" * 900])
def test_a_row_that_nobody_could_have_written_is_named(value: str) -> None:
    """What reads JSON takes more than what writes it."""
    row = f'{{"seq": 2, "loss": {value}, "chain": "x"}}\n'.encode()
    sound, fault = check(FILES[".jsonl"][0] + row, ".jsonl")
    assert sound == 1 and fault.startswith("row 2, after record 1: ")


@both
@given(st.data())
def test_rows_that_are_missing_repeated_or_exchanged_are_found(
    form: str, data: st.DataObject
) -> None:
    rows = FILES[form]
    n = data.draw(st.integers(0, len(rows) - 2))
    kind = data.draw(st.sampled_from(["missing", "repeated", "exchanged"]))
    other = {
        "missing": [*rows[:n], *rows[n + 1 :]],
        "repeated": [*rows[: n + 1], *rows[n:]],
        "exchanged": [*rows[:n], rows[n + 1], rows[n], *rows[n + 2 :]],
    }[kind]
    sound, fault = check(b"".join(other), form)
    assert fault
    assert sound <= n + 1


@both
@given(st.data())
def test_a_file_that_is_cut_short_is_found(form: str, data: st.DataObject) -> None:
    whole = b"".join(FILES[form])
    kept = data.draw(st.integers(0, len(whole) - 1))
    assert check(whole[:kept], form)[1]


@both
def test_what_follows_the_end_is_found(form: str) -> None:
    whole = b"".join(FILES[form])
    for more in (b"\n", b"\x00", FILES[form][-1]):
        assert check(whole + more, form) == (
            len(RECORDS),
            f"row {len(RECORDS) + 1}, after record {len(RECORDS)}: something follows the end",
        )


@both
@given(st.binary(max_size=100))
def test_anything_else_is_no_export(form: str, data: bytes) -> None:
    assert check(data, form)[1]
