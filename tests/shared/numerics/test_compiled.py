"""Where machine code is kept: beside the sources, or where an operator says."""

from pathlib import Path

import numba
import pytest

from diloco_shared.numerics import compiled


def test_machine_code_goes_where_numba_is_told_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose own files nobody may write."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    folder = compiled._folder()
    assert folder is not None and folder.parent == tmp_path / "kernels" and folder.is_dir()
    assert compiled._folder() == folder, "the same sources, the same folder"


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    assert compiled._folder() is None


def test_a_changed_table_of_a_codec_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels hold the tables as constants."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    before = compiled._folder()
    (rows,) = compiled.ROWS
    changed = tmp_path / "codecs.py"
    changed.write_text(rows.read_text("utf-8").replace("levels=(0, 0.5, 1,", "levels=(0, 0.5, 2,"))
    monkeypatch.setattr(compiled, "ROWS", (changed,))
    assert changed.read_text("utf-8") != rows.read_text("utf-8")
    assert compiled._folder() not in (before, None)
