"""Tokens that somebody else made are mapped as they are, and their end is held out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_shared.corpora.prepared import digest_of
from diloco_shared.corpora.pretokenised import is_tokens, open_tokens
from diloco_shared.corpora.token_files import TokenFile

TOKENS = np.arange(1000) % 500


def raw(folder: Path, said: Any = None, dtype: str = "<u2", tokens: Any = TOKENS) -> Path:
    path = folder / "t.bin"
    path.write_bytes(tokens.astype(dtype).tobytes())
    if said is not None:
        path.with_suffix(".json").write_text(said if isinstance(said, str) else json.dumps(said))
    return path


def array(folder: Path, tokens: Any, said: Any = None) -> Path:
    np.save(folder / "t.npy", tokens)
    if said is not None:
        (folder / "t.json").write_text(json.dumps(said))
    return folder / "t.npy"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_raw_numbers_are_what_the_file_beside_them_says(tmp_path: Path, dtype: str) -> None:
    said = {"dtype": dtype, "vocabulary": 500, "end_of_document": 499}
    path = raw(tmp_path, said, dtype)
    assert is_tokens(path)
    corpus = open_tokens(path, 0.1)
    assert (corpus.vocabulary, corpus.end_of_document, corpus.digest) == (500, 499, "")
    parts = [corpus.train[:], corpus.validation[:], corpus.test[:]]
    np.testing.assert_array_equal(np.concatenate(parts), TOKENS)
    assert [len(part) for part in parts] == [800, 100, 100]
    assert all(isinstance(tokens.parts[0], TokenFile) for tokens in (corpus.train, corpus.test))


def test_the_runs_tokenizer_says_it_where_no_file_does(tmp_path: Path) -> None:
    assert open_tokens(raw(tmp_path), 0.1, 500).train[799] == TOKENS[799]
    assert open_tokens(raw(tmp_path, dtype="<u4"), 0.1, 70_000).train[799] == TOKENS[799]
    assert open_tokens(array(tmp_path, TOKENS.astype(np.int64)), 0.1, 500).vocabulary == 500
    assert open_tokens(array(tmp_path, TOKENS.astype(np.uint8)), 0.1).vocabulary == 256


def test_one_content_has_one_digest_whatever_holds_it(tmp_path: Path) -> None:
    one = digest_of(open_tokens(raw(tmp_path), 0.1, 500))
    assert one == digest_of(open_tokens(array(tmp_path, TOKENS), 0.1, 500))
    assert one != digest_of(open_tokens(array(tmp_path, TOKENS[::-1]), 0.1, 500))
    assert one != digest_of(open_tokens(array(tmp_path, TOKENS), 0.2, 500))


def cut(folder: Path) -> Path:
    path = raw(folder, {"dtype": "uint16", "vocabulary": 500})
    path.write_bytes(path.read_bytes()[:-1])
    return path


def no_array(folder: Path) -> Path:
    (folder / "t.npy").write_bytes(b"no array")
    return folder / "t.npy"


def several(folder: Path) -> Path:
    np.savez(folder / "t.npz", TOKENS, TOKENS)
    return (folder / "t.npz").rename(folder / "t.npy")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (raw, r"t\.bin does not say what its numbers are: write .*t\.json"),
        (cut, r"has 1999 bytes, which are no whole number of uint16: it is cut"),
        (lambda f: raw(f, {"dtype": "int7"}), "dtype 'int7' is not one of uint16, uint32"),
        (lambda f: raw(f, {"vocabulary": 1}), "vocabulary 1 is no whole number from 2"),
        (lambda f: raw(f, {"vocabulray": 9}), "'vocabulray' is not one of dtype, vocabulary"),
        (lambda f: raw(f, "{"), r"t\.json does not describe t\.bin"),
        (lambda f: raw(f, []), r"t\.json does not describe t\.bin: expected an object"),
        (lambda f: raw(f, {"dtype": "uint16"}), r"how many tokens .*t\.bin knows is not known"),
        (no_array, r"t\.npy is no array of numpy"),
        (several, r"t\.npy is no array of numpy: it holds several"),
        (lambda f: array(f, np.zeros((3, 3), np.uint16)), r"uint16 of shape \(3, 3\)"),
        (lambda f: array(f, np.zeros(3)), r"float64 of shape \(3,\): tokens are whole numbers"),
        (lambda f: array(f, TOKENS), r"how many tokens .*t\.npy knows is not known"),
        (
            lambda f: array(f, TOKENS, {"dtype": "uint16", "vocabulary": 500}),
            r"holds int64, and t\.json says uint16",
        ),
        (
            lambda f: raw(f, {"dtype": "uint16", "vocabulary": 500}, tokens=TOKENS[:5]),
            "has 5 tokens: too few to hold 10% of them out",
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_tokens(make(tmp_path), 0.1)
