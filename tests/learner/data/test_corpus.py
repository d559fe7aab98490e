"""The corpus of a run: prepared once, opened from anywhere, and the one that the run wants."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared.corpora.texts import documents, few_open_files, folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import check_vocabulary, digest, load
from diloco_learner.data.shards import MixedCut, ShardReader, cut_of
from diloco_learner.settings import Settings
from diloco_learner.training import computing_io
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.evaluate import held_out, held_out_each
from diloco_shared.corpora.mix import Mixed, Mixture
from diloco_shared.corpora.prepared import Corpus, hash_tokens, open_corpus
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.spec.run import Data, RunSpec


def data(source: Path | str, **more: Any) -> Data:
    return Data.model_validate({"source": str(source), "validation_fraction": 0.2} | more)


def unused_for_long(folder: Path) -> None:
    """Of a prepared corpus whose readers are gone: none of them has used it for an hour."""
    gc.collect()
    before = folder.stat().st_mtime - 3601
    os.utime(folder, (before, before))


def one(found: Corpus | Mixture) -> Corpus:
    assert isinstance(found, Corpus)
    return found


def test_text_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache")
    first = one(load(data(folder), cache=cache))
    assert sum(map(len, documents(first))) == 60
    monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", None)  # nobody may again
    assert load(data(folder), cache=cache) is first  # of a process
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("change", ["text", "more", "fraction"])
def test_what_changes_is_prepared_again(tmp_path: Path, change: str) -> None:
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache")
    before = one(load(data(folder), cache=cache))
    if change == "text":
        (folder / "0000.txt").write_text("something else")
    if change == "more":
        (folder / "new.txt").write_text("something new")
    fraction = 0.3 if change == "fraction" else 0.2
    after = one(load(data(folder, validation_fraction=fraction), cache=cache))
    assert after.digest != before.digest
    new = {"text": "something else", "more": "something new"}.get(change)
    assert new is None or any(new in texts for texts in documents(after))


def test_a_cache_removes_what_was_not_used_for_longest(tmp_path: Path) -> None:
    told: list[str] = []
    cache = CorpusCache(tmp_path / "cache", bytes_max=600_000, tell=told.append)
    big = [folder_of(tmp_path / name, 40, words=500) for name in "ab"]  # 400 kB each, as uint16
    prepared(big[0], tmp_path / "cache" / "somebodys")  # the cache never touches it
    opened = one(load(data(big[0]), cache=cache))
    digest, first = opened.digest, opened.folder
    assert first is not None
    del opened
    unused_for_long(first)
    second = one(load(data(big[1]), cache=cache)).folder
    assert second is not None and second.exists() and not first.exists()
    assert open_corpus(tmp_path / "cache" / "somebodys").digest == digest
    assert any("removed the prepared corpus" in line for line in told)
    assert any("prepares the corpus of" in line for line in told)


def test_a_cache_is_bounded_also_where_checks_prepared_what_is_opened(tmp_path: Path) -> None:
    """A check does not know the limit: what nobody prepares again would be there for ever."""
    checks = CorpusCache(tmp_path / "cache", bytes_max=sys.maxsize)
    texts = [folder_of(tmp_path / name, 40, words=500) for name in "ab"]
    first, second = (one(load(data(text), cache=checks)).folder for text in texts)
    assert first is not None and second is not None and first.exists()
    unused_for_long(first)
    load(data(texts[1]), cache=CorpusCache(tmp_path / "cache", bytes_max=600_000))
    assert second.exists() and not first.exists()


LOADS = """
import sys
from pathlib import Path
from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import load
from diloco_shared.spec.run import Data
print(load(Data(source=sys.argv[1]), cache=CorpusCache(Path(sys.argv[2]))).digest)
"""


@pytest.mark.whole
def test_learners_that_begin_together_prepare_one_corpus(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 200, words=200)
    command = [sys.executable, "-c", LOADS, str(folder), str(tmp_path / "cache")]
    learners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [learner.communicate(timeout=120)[0] for learner in learners]
    assert [learner.returncode for learner in learners] == [0, 0, 0]
    # The last line: before it the one that prepares says how far it is.
    digests = {answer.splitlines()[-1] for answer in answers}
    assert len(digests) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    assert open_corpus(kept).digest in digests


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match=r"cannot be written to .*DILOCO_CORPORA"):
        load(data(folder_of(tmp_path / "a", 60)), cache=CorpusCache(tmp_path / "file" / "cache"))


def test_a_corpus_that_was_prepared_and_cannot_be_opened_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = folder_of(tmp_path / "a", 200), CorpusCache(tmp_path / "cache")
    monkeypatch.setattr("diloco_shared.corpora.prepare.SHARD_BYTES", 60)
    with monkeypatch.context() as patch:
        patch.setattr("diloco_shared.corpora.prepared.allow_most", lambda: None)
        with few_open_files(50), pytest.raises(ValueError, match="as many files open as it may"):
            load(data(folder), cache=cache)
    monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", None)  # not once more
    assert len(one(load(data(folder), cache=cache)).train)


@pytest.mark.parametrize("gone", ["train-00000.bin", "validation-00000.bin"])
def test_a_corpus_of_the_cache_that_lost_a_file_is_made_anew(tmp_path: Path, gone: str) -> None:
    """As by whoever clears caches: nobody should have to find the folder."""
    told: list[str] = []
    folder, cache = folder_of(tmp_path / "a", 60), CorpusCache(tmp_path / "cache", tell=told.append)
    digest_before = one(load(data(folder), cache=cache)).digest
    (made,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    (made / gone).unlink()
    assert one(load(data(folder), cache=cache)).digest == digest_before
    assert any("is damaged, and is made anew" in line for line in told)


def test_what_is_removed_is_not_held_by_a_corpus_that_nobody_uses(tmp_path: Path) -> None:
    """A file that is open takes its room on the disk until it is not."""

    def is_open() -> bool:
        handles = list(Path("/proc/self/fd").iterdir())
        named = [os.readlink(handle) for handle in handles if handle.is_symlink()]
        return any(name.startswith(str(tmp_path / "c")) for name in named)

    prepared(folder_of(tmp_path / "a", 60), tmp_path / "c")
    corpus = load(data(tmp_path / "c"))
    assert load(data(tmp_path / "c")) is corpus, "one object for all who have it open"
    shutil.rmtree(tmp_path / "c")
    assert is_open()
    del corpus
    gc.collect()
    assert not is_open()


def test_relative_paths_are_under_the_data_root(tmp_path: Path) -> None:
    folder_of(tmp_path / "site" / "text", 60)
    prepared(tmp_path / "site" / "text", tmp_path / "site" / "corpus")
    found = [load(data(name), tmp_path / "site") for name in ("text", "corpus")]
    assert digest(found[0]) == digest(found[1])
    with pytest.raises(ValueError, match=r"'text' is neither a folder nor a file"):
        load(data("text"), tmp_path)


class Nothing:
    """In the place of a model, which would take seconds to compile."""

    model, warning = None, ""

    @classmethod
    def build(cls, spec: RunSpec, weights: None, separator: None, mesh: None) -> "type[Nothing]":
        return cls

    @staticmethod
    def check_loss() -> None:
        pass

    def __init__(self, program: "type[Nothing]") -> None:
        pass


def test_a_learner_reads_under_its_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_of(tmp_path / "site" / "text", 60)
    for name in ("Program", "Trainer"):
        monkeypatch.setattr(computing_io, name, Nothing)
    settings = Settings(data=tmp_path / "kept", data_root=str(tmp_path / "site"))
    assert settings.corpus_cache == tmp_path / "kept" / "corpora"
    learner = OnThisMachine(settings.reach, CorpusCache(settings.corpus_cache))
    shape = {"context_tokens": 8, "overrides": {"vocabulary": 256}}
    body = {"name": "x", "budget": {"steps": 1}, "data": data("text").model_dump(), "model": shape}
    built = learner.build(RunSpec.model_validate(body))
    assert built.held_out.sequences_SxL1.shape[1] == 9
    built.batches.grant(3, 0, 0)
    assert set(bytes(built.batches.take()[0].astype(np.uint8)).decode()) <= set("tex 0123456789\0")
    assert len(list((tmp_path / "kept" / "corpora").iterdir())) == 1
    small = body | {"model": {"overrides": {"vocabulary": 255}}}
    with pytest.raises(ValueError, match=r"vocabulary \(255\) is too small"):
        learner.build(RunSpec.model_validate(small))


def test_a_corpus_that_is_not_the_runs_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 60)
    right = digest(load(data(folder)))
    assert digest(load(data(folder, digest=right))) == right
    (folder / "0000.txt").write_text("another text")
    with pytest.raises(ValueError, match=f"the run wants {right}: copy the run's corpus") as told:
        load(data(folder, digest=right))
    assert digest(load(data(folder))) in str(told.value), "both are named"


def test_the_tokenizer_of_a_prepared_corpus_is_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 60)
    corpus = prepared(folder, tmp_path / "corpus")
    train_tokenizer(find(str(folder)), 300, tmp_path / "bpe")
    with pytest.raises(
        ValueError, match=r"was made with the tokenizer .* prepare the corpus again"
    ):
        load(data(tmp_path / "corpus", tokenizer=str(tmp_path / "bpe")))
    # A path of where it was made says nothing here.
    found = load(data(tmp_path / "corpus", tokenizer="/elsewhere/bpe"))
    assert digest(found) == corpus.digest
    with pytest.raises(ValueError, match="neither 'bytes' nor a file or folder"):
        load(data(folder, tokenizer="no/such/tokenizer"))


def test_a_model_too_small_for_the_tokens_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(1000, dtype=np.uint16))
    (tmp_path / "t.json").write_text(json.dumps({"vocabulary": 1000}))
    corpus = load(data(tmp_path / "t.npy"))
    body = {"name": "x", "budget": {"steps": 1}}
    with pytest.raises(ValueError, match=r"vocabulary \(256\) is too small .* 1000 different"):
        check_vocabulary(RunSpec.model_validate(body), corpus)
    large = {"model": {"overrides": {"vocabulary": 1000}}}
    check_vocabulary(RunSpec.model_validate(body | large), corpus)
    check_vocabulary(RunSpec.model_validate(body | {"model": {"factory": "mine:own"}}), corpus)
    # Of weights the shape is as it is.
    begun = {"model": {"weights": "w", "overrides": {"vocabulary": 999}}}
    with pytest.raises(
        ValueError, match=r"have rows for 999 tokens, .* needs 1000: prepare it"
    ) as e:
        check_vocabulary(RunSpec.model_validate(body | begun), corpus)
    assert "overrides" not in str(e.value)


def mixture(tmp_path: Path) -> Data:
    parts = []
    for name, files, weight in (("small", 40, 0.75), ("large", 400, 0.25)):
        prepared(folder_of(tmp_path / f"{name} text", files), tmp_path / name)
        parts.append({"source": name, "weight": weight})
    return Data.model_validate({"mixture": parts})


def test_a_mixture_is_read_in_exact_shares(tmp_path: Path) -> None:
    """Over shards and passes: they follow each other in one row of draws."""
    found = load(mixture(tmp_path), tmp_path)
    assert isinstance(found, Mixture) and found.weights == (3, 1)
    cut = cut_of(found.train, 4, 8, seed=1)
    assert isinstance(cut, MixedCut)
    small, large = cut.sizes
    assert cut.sequences == small + large > 10 * small
    row: list[int] = []
    for passes in range(3):
        for shard in range(4):
            places = cut.places(shard, passes, 0, cut.size(shard))
            np.testing.assert_array_equal(
                places[5:9], cut.places(shard, passes, 5, 9), "random access"
            )
            row += places.tolist()
    assert len(row) == 3 * cut.sequences
    of_large = np.array(row) >= small
    assert all(of_large[n : n + 4].sum() == 1 for n in range(0, len(row) - 4, 4)), "one of four"
    # Nothing of a corpus is read again before all of it was read.
    for its, size in ((0, small), (1, large)):
        mine = [p for p in row if (p >= small) == bool(its)]
        assert its or len(mine) > 10 * size
        for start in range(0, len(mine), size):
            turn = mine[start : start + size]
            assert len(set(turn)) == len(turn)
        assert its or mine[:size] != mine[size : 2 * size] != sorted(mine[size : 2 * size])


def mixed(weights: tuple[int, ...], sequences: tuple[int, ...], context: int = 8) -> Mixed:
    """Corpora of so many sequences, whose tokens are their numbers."""
    parts = tuple(
        Tokens([np.full(many * context + 1, n, np.uint16)], 9) for n, many in enumerate(sequences)
    )
    return Mixed(parts, weights, tuple(f"c{n}" for n in range(len(parts))))


@pytest.mark.parametrize(
    ("weights", "sequences", "shards"),
    [
        ((1, 99), (488, 4394), 64),
        ((99, 1), (4394, 488), 64),
        ((3, 3, 244), (60, 60, 480), 32),
        ((5, 2), (9, 9), 16),
    ],
)
def test_a_small_share_is_read_however_small_a_shard_is(
    weights: tuple[int, ...], sequences: tuple[int, ...], shards: int
) -> None:
    """With a share of a hundredth and 76 sequences in a shard, some shards have none of it."""
    cut = cut_of(mixed(weights, sequences), shards, 8, seed=0)
    readers = [ShardReader(cut, s, passes=p) for p in range(2) for s in range(shards)]
    rows = np.concatenate([reader.take(reader.left)[:, 0] for reader in readers])
    assert len(rows) == 2 * sum(sequences)
    for corpus, weight in enumerate(weights):
        wanted = len(rows) * weight / sum(weights)
        assert abs(np.count_nonzero(rows == corpus) - wanted) < len(weights)


def test_a_mixture_goes_on_behind_any_number_of_passes() -> None:
    """A count of passes comes from elsewhere: it must not overflow what computes shares."""
    cut = cut_of(mixed((3, 1), (5, 40)), 4, 8, seed=0)
    for passes in (2**40, 2**53):
        whole = ShardReader(cut, 1, passes=passes).take(100)
        assert len(whole) == cut.size(1) and 2 <= np.count_nonzero(whole == 1) / 9 <= 3


def test_a_corpus_of_which_nothing_would_be_read_is_refused() -> None:
    cut_of(mixed((1, 99), (9, 91)), 4, 8, seed=0)
    with pytest.raises(ValueError, match=r"of corpus 1 .*c0\), nothing .* one of 100 .* have 99 t"):
        cut_of(mixed((1, 99), (8, 91)), 4, 8, seed=0)


def test_a_reader_of_a_mixture_goes_on_at_a_cursor(tmp_path: Path) -> None:
    found = load(mixture(tmp_path), tmp_path)
    cut = cut_of(found.train, 4, 8, seed=1)
    whole = ShardReader(cut, 3, passes=1).take(cut.size(3))
    reader = ShardReader(cut, 3, passes=1)
    parts = [reader.take(7), reader.take(400)]
    again = ShardReader(cut, reader.cursor.shard, reader.cursor.sequences, passes=1)
    parts.append(again.take(10**6))
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert whole.shape == (cut.size(3), 9) and whole.dtype == np.int32
    texts = [bytes(row.astype(np.uint8)).decode() for row in whole[:50]]
    assert all(set(text) <= set("text 0123456789\0") for text in texts)


def test_shards_of_a_mixture_share_nothing_of_a_corpus_that_is_not_read_twice(
    tmp_path: Path,
) -> None:
    cut = cut_of(load(mixture(tmp_path), tmp_path).train, 4, 8, seed=1)
    assert isinstance(cut, MixedCut)
    seen = [set(cut.places(s, 0, 0, cut.size(s))) for s in range(4)]
    of_large = [{place for place in places if place >= cut.sizes[0]} for places in seen]
    assert all(of_large) and sum(map(len, of_large)) == len(set().union(*of_large))


def test_what_is_held_out_of_a_mixture_has_its_shares(tmp_path: Path) -> None:
    found = load(mixture(tmp_path), tmp_path)
    each = held_out_each(found.validation, 8, 16, seed=0)
    assert [len(windows) for windows in each] == [12, 4]
    np.testing.assert_array_equal(held_out(found.validation, 8, 16, seed=0), np.concatenate(each))
    np.testing.assert_array_equal(each[1], held_out(found.corpora[1].validation, 8, 4, seed=0))


@pytest.mark.parametrize(
    ("weights", "sequences", "wanted"),
    [
        ((3, 997), 256, [1, 255]),
        ((997, 3), 256, [255, 1]),
        ((1, 1, 10**6), 4, [1, 1, 2]),
        ((1, 10, 10**6), 2, [1, 1, 1]),  # fewer than corpora
        ((1, 1), 1, [1, 1]),
        ((3, 1), 16, [12, 4]),
    ],
)
def test_of_each_corpus_of_a_mixture_something_is_held_out(
    weights: tuple[int, ...], sequences: int, wanted: list[int]
) -> None:
    each = held_out_each(mixed(weights, (500,) * len(weights)), 8, sequences, seed=0)
    assert [len(windows) for windows in each] == wanted
    assert all((windows == n).all() for n, windows in enumerate(each))


def test_corpora_that_are_too_small_are_named() -> None:
    with pytest.raises(ValueError, match=r"of corpus 2 .*c1\), 1 training tokens are too few for"):
        cut_of(mixed((1, 1), (40, 0)), 4, 8, seed=1)
    with pytest.raises(ValueError, match=r"have 44 sequences of 8 tokens, too few for 45 shards"):
        cut_of(mixed((1, 1), (40, 4)), 45, 8, seed=1)
    # None of them need be large enough for all shards.
    assert cut_of(mixed((1, 1), (40, 4)), 44, 8, seed=1).sequences_per_shard == 1


def test_corpora_of_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 60)
    prepared(folder, tmp_path / "one")
    bpe = train_tokenizer(find(str(folder)), 300, tmp_path / "bpe")
    prepared(folder, tmp_path / "two", with_=bpe)
    parts = [{"source": name, "weight": 1} for name in ("one", "two")]
    with pytest.raises(ValueError, match=r"have different tokenizers: .*one and .*two"):
        load(Data.model_validate({"mixture": parts}), tmp_path)


def test_each_corpus_of_a_mixture_is_the_one_that_is_wanted(tmp_path: Path) -> None:
    body = mixture(tmp_path).model_dump()
    body["mixture"][1]["digest"] = "0" * 32
    with pytest.raises(ValueError, match=f"large has digest .* the run wants {'0' * 32}"):
        load(Data.model_validate(body), tmp_path)


def test_a_fault_of_the_text_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot json\n')
    with pytest.raises(ValueError, match=r"data\.source: .*bad\.jsonl:2: expected an object"):
        load(data(tmp_path / "bad.jsonl"))


@pytest.mark.whole
def test_the_standard_library_is_read_without_its_tests_and_packages() -> None:
    corpus = one(load(Data()))
    assert len(corpus.train) > 5_000_000
    assert min(len(corpus.validation), len(corpus.test)) > 100_000
    assert corpus is load(Data())


# --- files of tokens, which bring no digest -------------------------------------------------------


def tokens_of(path: Path, seed: int = 0) -> Path:
    np.random.default_rng(seed).integers(0, 200, 5000).astype(np.uint16).tofile(path)
    path.with_suffix(".json").write_text('{"vocabulary": 200}')
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are read for digests, split by split."""
    found: list[int] = []

    def counted(tokens: Tokens, *more: Any) -> str:
        found.append(sum(part.nbytes for part in tokens.parts))
        return hash_tokens(tokens, *more)

    monkeypatch.setattr("diloco_shared.corpora.prepared.hash_tokens", counted)
    return found


def test_a_file_of_tokens_is_read_for_its_digest_once(tmp_path: Path, read: list[int]) -> None:
    """It may have terabytes: no life, and no other learner of this machine, reads them again."""
    file, told = tokens_of(tmp_path / "t.bin"), list[str]()
    cache = CorpusCache(tmp_path / "cache", tell=told.append)
    right = digest(load(data(file)))
    read.clear()
    load(data(file, digest=right), cache=cache)
    assert sum(read) == 10_000 and told[0] == f"reads {file} for its digest: 0 % of 10000 bytes"
    assert told[-1].endswith("100 % of 10000 bytes")
    read.clear()
    load(data(file, digest=right), cache=CorpusCache(tmp_path / "cache"))
    with pytest.raises(ValueError, match=f"has digest {right}, and the run wants {'0' * 32}"):
        load(data(file, digest="0" * 32), cache=cache)
    assert read == []


@pytest.mark.parametrize("change", ["content", "place", "fraction", "vocabulary"])
def test_what_decides_a_digest_is_part_of_what_is_kept(
    tmp_path: Path, read: list[int], change: str
) -> None:
    file, cache = tokens_of(tmp_path / "t.bin"), CorpusCache(tmp_path / "cache")
    right = digest(load(data(file)))
    load(data(file, digest=right), cache=cache)
    before, more = file.stat(), dict[str, Any]()
    if change == "content":  # of the same size and, as by whoever copies, of the same time
        file.write_bytes(bytes([*file.read_bytes()[:-2], 1, 0]))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "place":
        other = tokens_of(tmp_path / "aside.bin", seed=1)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(file)
    elif change == "fraction":
        more = {"validation_fraction": 0.1}
    else:
        file.with_suffix(".json").write_text('{"vocabulary": 70000, "dtype": "uint16"}')
    changed = digest(load(data(file, **more)))
    assert changed != right
    read.clear()
    with pytest.raises(ValueError, match=f"has digest {changed}, and the run wants {right}"):
        load(data(file, digest=right, **more), cache=cache)
    assert sum(read) == 10_000


def test_a_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, read: list[int]
) -> None:
    file = tokens_of(tmp_path / "t.bin")

    def touched(text: str) -> None:
        if " 0 % of" in text:
            os.utime(file)

    right = digest(load(data(file)))
    load(data(file, digest=right), cache=CorpusCache(tmp_path / "cache", tell=touched))
    read.clear()
    load(data(file, digest=right), cache=CorpusCache(tmp_path / "cache"))
    assert sum(read) == 10_000


def test_a_digest_is_kept_of_the_file_that_was_read(tmp_path: Path, read: list[int]) -> None:
    """Another one may have got its name since it was opened."""
    file, cache = tokens_of(tmp_path / "t.bin"), CorpusCache(tmp_path / "cache")
    corpus = one(load(data(file)))
    tokens_of(tmp_path / "new.bin", seed=1).replace(file)
    old = cache.digest(corpus, file)
    read.clear()
    with pytest.raises(ValueError, match=f"and the run wants {old}"):
        load(data(file, digest=old), cache=cache)
    assert sum(read) == 10_000


@pytest.mark.parametrize(
    "there", ["{", "[]", '{"format": 1, "digests": {"x": "y"}}', '{"format": 2}', " " * (1 << 17)]
)
def test_kept_digests_that_are_damaged_are_none(
    tmp_path: Path, read: list[int], there: str
) -> None:
    file, cache = tokens_of(tmp_path / "t.bin"), CorpusCache(tmp_path / "cache")
    cache.folder.mkdir()
    (cache.folder / "digests.json").write_text(there)
    right = digest(load(data(file)))
    for _ in range(2):
        load(data(file, digest=right), cache=cache)
    assert sum(read) == 2 * 10_000, "once for the test itself, and once for the cache"


def test_no_more_digests_are_kept_than_some(
    tmp_path: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.data.digests.KEPT_MAX", 2)
    cache, files = CorpusCache(tmp_path / "cache"), []
    for n in range(3):
        files.append(tokens_of(tmp_path / f"{n}.bin", seed=n))
        load(data(files[-1], digest=digest(load(data(files[-1])))), cache=cache)
    kept = json.loads((cache.folder / "digests.json").read_text())["digests"]
    assert [len(key) for key in kept] == [32, 32]
    rights = [digest(load(data(file))) for file in files]
    read.clear()
    for file, right in reversed(list(zip(files, rights, strict=True))):
        load(data(file, digest=right), cache=cache)
    assert sum(read) == 10_000, "the oldest one is gone"


def test_where_nothing_can_be_kept_it_is_read_each_time(tmp_path: Path, read: list[int]) -> None:
    file = tokens_of(tmp_path / "t.bin")
    right = digest(load(data(file)))
    (tmp_path / "taken").write_text("a file, and no folder")
    read.clear()
    for n in (1, 2):
        load(data(file, digest=right), cache=CorpusCache(tmp_path / "taken"))
        assert sum(read) == n * 10_000
