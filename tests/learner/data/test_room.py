"""A text that becomes more than the disk takes: others find room, and nobody fills it again."""

import errno
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
from learner.data.test_corpus import data, one, unused_for_long
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import load
from diloco_learner.data.room import CorpusRoom, _wanted
from diloco_learner.data.unused import bytes_of
from diloco_shared.budget.terms import shown
from diloco_shared.corpora.mix import Mixture
from diloco_shared.corpora.prepare import _Writer
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.spec.run import Data


def is_free(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> list[int]:
    """So many bytes, one look after another, and the last of them from then on; those to come."""
    left = list(sizes)
    at = "diloco_learner.data.room.free_bytes"
    monkeypatch.setattr(at, lambda folder: left.pop(0) if len(left) > 1 else left[0])
    return left


class Disk:
    """Of so many bytes, where a cache lies; `others` take some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size, self.others = size, 0
        monkeypatch.setattr("diloco_learner.data.room.free_bytes", self.free)

    def free(self, cache: Path) -> int:
        taken = (path.stat().st_size for path in cache.glob("*/*") if path.is_file())
        return self.size - self.others - sum(taken)


def remembered(cache: CorpusCache) -> int:
    """What did not do."""
    (kept,) = cache.folder.glob(".*.short")
    return int(json.loads(kept.read_text())["free"])


@pytest.mark.parametrize("again", ["more room", "later", "damaged"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_text_that_found_no_room_is_not_begun_again_before_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, again: str
) -> None:
    """Learners try a run every half minute: they would fill the disk for ever."""
    quota = number == errno.EDQUOT
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache")

    def full(writer: Any) -> None:
        raise OSError(number, os.strerror(number))

    Disk(monkeypatch, 80_000)
    with monkeypatch.context() as patch:
        patch.setattr("diloco_shared.corpora.prepare._Writer.closed", full)
        says = (
            rf"has no room \({os.strerror(number)}\): it takes about .*"
            rf"{'of which' if quota else 'it could have 80 kB'}"
        )
        with pytest.raises(ValueError, match=says) as first:
            load(data(folder), cache=cache)
    (kept,) = (tmp_path / "cache").iterdir()  # what was written is gone: a full disk is not left so
    over = f"{'an hour' if quota else 'a day'} is over; remove {kept.name} in DILOCO_CORPORA to try"
    when = f"once {'' if quota else '90 kB are free, or '}{over}"
    assert kept.suffix == ".short" and when in str(first.value)
    with monkeypatch.context() as patch:
        patch.setattr("diloco_learner.data.cache.prepare_locked", None)  # nobody may begin
        is_free(patch, 89_999)
        with pytest.raises(ValueError) as second:
            load(data(folder), cache=CorpusCache(tmp_path / "cache"))
        assert str(second.value) == str(first.value), "an event comes when it changes"
    if again == "more room":
        is_free(monkeypatch, 90_000)
    elif again == "later":
        before = kept.stat().st_mtime - (3600 if quota else 86_400)
        os.utime(kept, (before, before))
    else:
        kept.write_text("[")
    assert len(one(load(data(folder), cache=cache)).train)
    assert not kept.exists()


@pytest.mark.parametrize(
    ("free", "falls_to", "left"),
    [(100 << 30, (8 << 30) - 1, "8.59 GB"), (4000, 999, "1 kB")],  # of a small disk a quarter
)
def test_who_prepares_a_text_leaves_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, falls_to: int, left: str
) -> None:
    """A hub that finds its disk full stops every run."""
    monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
    # Some fifty chunks for large disks, and four of them for small ones.
    folder = folder_of(tmp_path / "a", 100 if free > 4000 else 8)
    cache = CorpusCache(tmp_path / "cache")
    looks = is_free(monkeypatch, free, falls_to + 1, falls_to + 1, falls_to, 0)
    with pytest.raises(ValueError, match=rf"\(others need what is left\): .* {left} are left to"):
        load(data(folder), cache=cache)
    assert looks == [0], "at the third look, with half of the text to come"
    assert [path.suffix for path in cache.folder.iterdir()] == [".short"]


def test_a_text_that_fits_is_begun_again_once_others_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint lay there for a while: the text was refused for a day, though it fits."""
    monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache")
    disk = Disk(monkeypatch, 400_000)

    def look(self: CorpusRoom, done: int, total: int) -> None:
        disk.others = 399_000 if 2 * done > total else 0
        whole(self, done, total)

    whole = CorpusRoom.look
    with monkeypatch.context() as patch:
        patch.setattr(CorpusRoom, "look", look)
        with pytest.raises(ValueError, match="100 kB are left to others, and it could have 1 kB"):
            load(data(folder), cache=cache)
    assert 100_000 < remembered(cache) < 300_000, "what it takes, and what is left to others"
    with pytest.raises(ValueError, match="has no room"):
        load(data(folder), cache=cache)
    disk.others = 0
    assert len(one(load(data(folder), cache=cache)).train)


class Old:
    """A corpus of an earlier run in the cache, on a disk where another as large has no room."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
        self.told = list[str]()
        self.cache = CorpusCache(tmp_path / "cache", tell=self.told.append)
        self.text, self.new = folder_of(tmp_path / "old", 60), folder_of(tmp_path / "new", 60)
        self.reader: Corpus | None = one(load(data(self.text), cache=self.cache))
        assert self.reader.folder is not None
        self.folder = self.reader.folder
        self.takes = sum(path.stat().st_size for path in self.folder.iterdir())
        self.disk = Disk(monkeypatch, self.takes * 7 // 4)

    def closed(self) -> None:
        """As when its learner ends."""
        self.reader = None
        gc.collect()

    def left(self) -> None:
        """Nobody uses it any more."""
        self.closed()
        unused_for_long(self.folder)


def test_corpora_that_nobody_uses_give_way_to_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text was refused for a day, after hours, while the cache itself held the room."""
    old = Old(tmp_path, monkeypatch)
    old.left()
    assert len(one(load(data(old.new), cache=old.cache)).train)
    assert not old.folder.exists()
    assert f"removed the prepared corpus {old.folder}: another one needed its room" in old.told


@pytest.mark.parametrize("late", [False, True])  # the file system tells of what was let go
def test_a_disk_that_old_corpora_fill_takes_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """The first file that is written finds no byte: there is no look before that."""
    old = Old(tmp_path, monkeypatch)
    old.disk.size = old.takes
    old.left()

    def closed(writer: Any) -> Any:
        return whole(writer) if old.disk.free(old.cache.folder) > 0 else _full()

    whole = _Writer.closed
    monkeypatch.setattr(_Writer, "closed", closed)
    left = list[int]()
    monkeypatch.setattr(CorpusRoom, "found", lambda room: left.append(room.spare))
    if late:
        is_free(monkeypatch, 0)
    small = folder_of(tmp_path / "small", 20)
    assert len(one(load(data(small), cache=old.cache)).train)
    assert not old.folder.exists()
    assert left == [old.takes // 4], "the second attempt leaves room to others"


def test_a_disk_that_stays_full_takes_one_corpus_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tell of room much later, or never: an earlier build has its file open."""
    old = Old(tmp_path, monkeypatch)
    one(load(data(folder_of(tmp_path / "older", 10)), cache=old.cache))
    old.left()
    others = set(old.cache.folder.iterdir()) - {old.folder}
    for path in others:
        os.utime(path, (0, 0))
    monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", _full)
    with pytest.raises(ValueError, match="has no room"):
        load(data(old.new), cache=old.cache)
    assert old.folder.exists() and not any(path.exists() for path in others)


def unused_corpora(cache: Path, many: int) -> list[Path]:
    """Of 1000 bytes each; they go in this order."""
    folders = [cache / (name * 32) for name in "abcde"[:many]]
    for folder in folders:
        folder.mkdir()
        (folder / "train-00000.bin").write_bytes(bytes(1000))
    return folders


def test_others_find_more_room_once_corpora_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a large text took what one corpus after another gave, the disk was nearly full."""
    folders, free = unused_corpora(tmp_path, 5), is_free(monkeypatch, 400)
    room = CorpusRoom(tmp_path / ("f" * 32))

    def left_where(told: int) -> int:
        free[:] = [told]
        room.look(1, 2)
        return sum(folder.exists() for folder in folders)

    assert left_where(100) == 5, "a quarter of what was free"
    assert left_where(99) == 3, "a quarter of all that it could have: 1350"
    assert left_where(2099) == left_where(1350) == 3
    assert left_where(1349) == left_where(2349) == 2
    monkeypatch.setattr("diloco_learner.data.room.let_go", lambda path: False)
    assert left_where(1300) == 2
    monkeypatch.setattr("diloco_learner.data.room.unused", None)  # no more is looked for
    assert left_where(100) == 2


def test_no_second_corpus_goes_for_a_text_that_is_known_not_to_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk each day's attempt took one of them, though all would not have done."""
    monkeypatch.setattr("diloco_learner.data.room.FIRST_BYTES", 500)
    folders, free = unused_corpora(tmp_path, 3), is_free(monkeypatch, 0)
    folder, full = tmp_path / ("f" * 32), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def attempt(before: CorpusRoom | None = None) -> CorpusRoom:
        room = CorpusRoom(folder, before=before)
        room.lock.touch()
        room.check()
        return room

    def next_day() -> None:
        (kept,) = tmp_path.glob(".*.short")
        os.utime(kept, (kept.stat().st_mtime - 86_400,) * 2)

    first = attempt()
    assert first.first_made(full)
    free[:] = [1000]
    second = attempt(first)
    second.look(1, 10)
    second.ended(600)  # of 6000
    second.short("text", full)
    free[:] = [0]
    for _ in range(2):
        next_day()
        later = attempt()
        later.ended(0)
        assert not later.first_made(full), "there are 2000"
        later.short("text", full)
    assert [path.exists() for path in folders] == [False, True, True]
    next_day()
    with monkeypatch.context() as patch:
        patch.setattr("diloco_learner.data.room.free_bytes", lambda cache: None)
        assert attempt().first_made(full), "nobody knows"
    free[:] = [7000]  # three quarters of it, and what the last one holds, may do
    assert attempt().first_made(full)


def test_a_second_attempt_knows_what_was_let_go_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the disk for full, and so left nothing to others."""
    unused_corpora(tmp_path, 2)
    free, folder = is_free(monkeypatch, 0), tmp_path / ("f" * 32)
    first = CorpusRoom(folder)
    assert first.first_made(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    for told in 0, 600, 1000:  # later, in part, at once
        free[:] = [told]
        room = CorpusRoom(folder, before=first)
        assert (room.begins, room.spare, room.free) == (1000, 250, 2000)


def test_what_was_let_go_counts_as_free_before_the_file_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look after look removed the next corpus, until there was none, and the text was refused."""
    now, free = [0.0], is_free(monkeypatch, 1000, 100)
    monkeypatch.setattr("diloco_shared.ambient.monotonic", lambda: now[0])
    monkeypatch.setattr("diloco_learner.data.room.SPARE_BYTES", 250)
    folders = unused_corpora(tmp_path, 5)
    room = CorpusRoom(tmp_path / ("f" * 32))

    def left_after_a_look() -> int:
        room.look(1, 2)
        return sum(folder.exists() for folder in folders)

    assert left_after_a_look() == left_after_a_look() == 4
    free[:] = [1050, 120]  # told, and taken by others
    assert [left_after_a_look(), left_after_a_look()] == [4, 3]
    now[0] += 59
    assert left_after_a_look() == 3
    now[0] += 2  # it never came
    assert left_after_a_look() == 2


def test_a_small_text_on_a_full_disk_removes_nothing_that_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others held was part of what is left to others: it went before the first chunk."""
    old = Old(tmp_path, monkeypatch)
    old.left()
    old.disk.size = old.takes * 5 // 4
    assert len(one(load(data(folder_of(tmp_path / "small", 6)), cache=old.cache)).train)
    assert old.folder.exists()


def test_a_corpus_that_was_used_a_while_ago_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two learners that start again the first one removed what the other one was to open."""
    old = Old(tmp_path, monkeypatch)
    old.left()
    one(load(data(old.text), cache=old.cache))
    old.closed()
    with pytest.raises(ValueError, match="has no room"):
        load(data(old.new), cache=old.cache)
    assert old.folder.exists()
    old.left()
    assert len(one(load(data(old.new), cache=old.cache)).train)


def test_a_corpus_of_a_mixture_does_not_give_way_to_another_one_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed for the other one, and prepared again after that."""
    old = Old(tmp_path, monkeypatch)
    old.left()
    both = [{"source": str(text), "weight": 1} for text in (old.new, old.text)]
    mixture = Data.model_validate({"mixture": both, "validation_fraction": 0.2})
    with pytest.raises(ValueError, match="has no room"):
        load(mixture, cache=old.cache)
    assert old.folder.exists()
    old.disk.size *= 2
    assert isinstance(load(mixture, cache=old.cache), Mixture)


def test_a_check_makes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are under way come before one that is tried; its learner makes room."""
    old = Old(tmp_path, monkeypatch)
    old.left()
    checks = CorpusCache(old.cache.folder, makes_room=False)
    says = f"nobody uses hold {shown(old.takes)} besides, which a learner removes"
    with pytest.raises(ValueError, match=says):
        load(data(old.new), cache=checks)
    with monkeypatch.context() as patch:  # nor where no byte is free
        patch.setattr("diloco_learner.data.cache.prepare_locked", _full)
        with pytest.raises(ValueError, match="has no room"):
            load(data(folder_of(tmp_path / "another", 60)), cache=checks)
    assert old.folder.exists()
    assert len(one(load(data(old.new), cache=old.cache)).train)


def test_a_check_that_finds_no_room_keeps_no_learner_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What did not do for the check was remembered, and the learner's was not an eighth more."""
    monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
    text, cache = folder_of(tmp_path / "text", 200), CorpusCache(tmp_path / "cache")
    little = one(load(data(folder_of(tmp_path / "little", 8)), cache=cache)).folder
    assert little is not None
    unused_for_long(little)
    prepared(text, tmp_path / "elsewhere")
    holds = bytes_of(little)
    tokens = sum(path.stat().st_size for path in (tmp_path / "elsewhere").glob("*.bin"))
    # With a quarter left to others it has room where `little` goes, and a little too few if not.
    Disk(monkeypatch, holds + tokens * 4 // 3 - holds // 2)
    checks = CorpusCache(cache.folder, makes_room=False)
    with pytest.raises(ValueError, match="which a learner removes") as refused:
        load(data(text), cache=checks)
    assert len(one(load(data(text), cache=cache)).train)
    assert not little.exists()
    assert "tried again" not in str(refused.value), "nothing says when"


def test_a_corpus_that_is_in_use_stays_until_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed, it would make no room, and its learner would prepare it anew for hours."""
    old = Old(tmp_path, monkeypatch)
    cut = one(load(data(old.text), cache=old.cache)).train.parts[0].part(3, 9)  # type: ignore[union-attr]
    old.left()
    for _ in range(2):  # at the end of a look, and because it is remembered
        with pytest.raises(ValueError, match="has no room") as refused:
            load(data(old.new), cache=old.cache)
        assert "nobody uses" not in str(refused.value)
    assert len(cut) == 6 and old.folder.exists()
    del cut
    assert len(one(load(data(old.new), cache=old.cache)).train)


@pytest.mark.parametrize("used", ["now", "lately", "no more"])
def test_a_smaller_limit_of_another_learner_removes_no_corpus_that_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str
) -> None:
    """A learner that only opened its own corpus removed one that another learner trained on."""
    old = Old(tmp_path, monkeypatch)
    old.disk.size *= 4
    if used == "now":
        unused_for_long(old.folder)  # its reader has it open all the same
    elif used == "lately":
        old.closed()
    else:
        old.left()
    small = CorpusCache(old.cache.folder, bytes_max=1)
    for _ in range(2):  # when it is prepared, and when it is opened
        one(load(data(old.new), cache=small))
    assert old.folder.exists() == (used != "no more")


def test_a_mixture_above_the_limit_is_prepared_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its corpora was removed for the next one, whenever the mixture was opened."""
    old = Old(tmp_path, monkeypatch)
    old.disk.size *= 4
    small = CorpusCache(old.cache.folder, bytes_max=1)
    both = [{"source": str(text), "weight": 1} for text in (old.text, old.new)]
    mixture = Data.model_validate({"mixture": both, "validation_fraction": 0.2})
    old.left()
    load(mixture, cache=small)
    gc.collect()
    for folder in filter(Path.is_dir, small.folder.iterdir()):
        unused_for_long(folder)
    monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", None)  # not once more
    assert isinstance(load(mixture, cache=small), Mixture)
    assert sum(folder.is_dir() for folder in small.folder.iterdir()) == 2


def test_no_corpus_is_removed_for_a_text_that_would_not_fit_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Old(tmp_path, monkeypatch)
    old.left()
    large = folder_of(tmp_path / "large", 400)
    for _ in range(2):  # and it is not begun once more, whatever the old one holds
        with pytest.raises(ValueError, match=r"nobody uses hold .* of it\). It is tried") as told:
            load(data(large), cache=old.cache)
        monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", None)
    had = f"it could have {shown(old.disk.size)} (corpora that nobody uses hold {shown(old.takes)}"
    assert f"{had} of it)" in str(told.value)
    assert old.folder.exists()


def test_no_more_room_is_wanted_than_there_was_where_a_text_fits(tmp_path: Path) -> None:
    room = CorpusRoom(tmp_path / "folder")
    room.free, room.spare, room.had = 100_000, 8_600, 48_000
    room.done, room.total, room.written = 1, 2, 42_500
    room.short("text", OSError(errno.ENOSPC, "others took it"))
    wanted = json.loads(room.kept.read_text())["free"]
    assert 0.95 * room.free < _wanted(wanted) <= room.free
    room.written = 47_000  # with what is left to others it has never fitted
    room.short("text", OSError(errno.ENOSPC, "others took it"))
    assert _wanted(json.loads(room.kept.read_text())["free"]) > room.free


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_is_to_be_done_is_said_before_long_names_cut_it_off(
    tmp_path: Path, number: int
) -> None:
    """A member's reason keeps 400 characters."""
    folder = tmp_path / ("folder" * 30) / ("0123456789abcdef" * 2)
    folder.parent.mkdir()
    room, full = CorpusRoom(folder), OSError(number, os.strerror(number))
    room.look(123_456, 4_567_890_123)
    room.ended(123_456_789)
    room.unused = 123_456_789_012
    kept = room.short("/corpora/" * 40, full)[:400]
    assert f"is over; remove {room.kept.name} in DILOCO_CORPORA to try at once. Make room" in kept


def test_what_a_killed_attempt_left_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text was refused for what it had itself written, which nobody else ever removed."""
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache")
    disk = Disk(monkeypatch, 100_000)
    with monkeypatch.context() as patch:
        patch.setattr("diloco_shared.corpora.prepare._Writer.closed", _full)
        with pytest.raises(ValueError, match="has no room"):
            load(data(folder), cache=cache)
    disk.size = 120_000
    (kept,) = cache.folder.iterdir()
    left = cache.folder / kept.name.removeprefix(".").removesuffix(".short")
    left.mkdir()
    (left / "unfinished").touch()
    (left / "train-00000.bin").write_bytes(bytes(40_000))
    assert len(one(load(data(folder), cache=cache)).train)


def _full(*of: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_others_gave_back_meanwhile_did_not_do_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, 1000)
    room = CorpusRoom(tmp_path / "a")
    disk.size = 5000
    room.look(1, 10)
    room.ended(900)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "could have 5.9 kB" in room.short("text", full)
    assert remembered(CorpusCache(tmp_path)) == 5900


def test_only_so_many_texts_without_room_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.data.room.SHORT_MAX", 2)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for name in "abc":
        CorpusRoom(tmp_path / name).short("text", full)
        os.utime(tmp_path / f".{name}.short", (ord(name), ord(name)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.short", ".c.short"]
