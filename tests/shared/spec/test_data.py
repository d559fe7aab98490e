"""`[data]`: what members agree on is the content of a corpus, wherever it lies."""

from typing import Any

import pytest

from diloco_shared.checking import Invalid, check
from diloco_shared.spec.run import Data, RunSpec, config_hash, shared_keys

ONE, TWO = "1" * 32, "2" * 32


def spec(**data: Any) -> RunSpec:
    return check({"name": "r", "budget": {"steps": 96}, "data": data})


def keys(**data: Any) -> dict[str, str]:
    return {k: v for k, v in shared_keys(spec(**data)).items() if k.startswith("data.")}


def test_a_run_without_what_is_new_keeps_its_hash() -> None:
    """Of a release that had neither digest nor mixture."""
    assert keys() == {
        "data.source": '"stdlib"',
        "data.tokenizer": '"bytes"',
        "data.virtual_shards": "64",
        "data.validation_fraction": "0.05",
    }


def test_members_agree_on_what_a_token_attends_to() -> None:
    assert config_hash(spec(documents="packed")) == config_hash(spec())
    assert config_hash(spec(documents="apart")) != config_hash(spec())
    assert keys(documents="apart") == keys() | {"data.documents": '"apart"'}
    with_digest = keys(documents="apart", digest=ONE)
    assert with_digest["data.documents"] == '"apart"', "a digest says nothing of it"


def test_with_a_digest_paths_do_not_matter() -> None:
    here = {"source": "/here/corpus", "tokenizer": "/here/bpe"}
    there = {"source": "there", "tokenizer": "./t.json"}
    assert config_hash(spec(**here, digest=ONE)) == config_hash(spec(**there, digest=ONE))
    assert config_hash(spec(**here, digest=ONE)) != config_hash(spec(**here, digest=TWO))
    assert config_hash(spec(**here)) != config_hash(spec(**there))
    assert not keys(**here, digest=ONE).keys() & {"data.source", "data.tokenizer"}


def test_of_a_mixture_each_digest_stands_for_its_path() -> None:
    def mixed(source: str, digest: str, weight: float = 1.0) -> str:
        other = {"source": "/b", "weight": 2.0, "digest": TWO}
        part = {"source": source, "weight": weight, "digest": digest}
        return config_hash(spec(mixture=[part, other]))

    assert mixed("/a", ONE) == mixed("/elsewhere", ONE) != mixed("/a", TWO)
    assert mixed("/a", "") != mixed("/elsewhere", "")
    assert mixed("/a", ONE, 1.0) != mixed("/a", ONE, 3.0)
    part = {"source": "/a", "weight": 1.0}
    assert "data.source" not in keys(mixture=[part]), "a mixture replaces it"
    assert "data.tokenizer" in keys(mixture=[part])


def test_what_is_read_is_the_source_or_the_mixture() -> None:
    assert [p.source for p in Data().sources] == ["stdlib"]
    given = ({"source": "/a", "weight": 1.0}, {"source": "/b", "weight": 2.0})
    assert [p.source for p in Data.model_validate({"mixture": given}).sources] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("data", "path", "says"),
    [
        ({"tokenizer": "byte"}, "data.tokenizer", "did you mean 'bytes'"),
        ({"tokenizer": "gpt2"}, "data.tokenizer", "neither 'bytes' nor a path: write ./gpt2"),
        ({"tokenizer": "https://x/t.json"}, "data.tokenizer", "is an address (https://)"),
        ({"digest": "abc"}, "data.digest", "pattern"),
        ({"documents": "separate"}, "data.documents", "'packed' or 'apart'"),
        ({"mixture": [{"source": "/a", "weight": 0}]}, "data.mixture.0.weight", "greater than 0"),
        ({"mixture": [{"source": " ", "weight": 1}]}, "data.mixture.0.source", "is empty"),
        ({"mixture": [{"source": "s3://a", "weight": 1}]}, "data.mixture.0.source", "an address"),
        (
            {"digest": ONE, "mixture": [{"source": "/a", "weight": 1}]},
            "data.digest",
            "in a mixture each corpus has its own",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_submission(
    data: dict[str, Any], path: str, says: str
) -> None:
    with pytest.raises(Invalid) as told:
        spec(**data)
    found = {fault.path: fault.message for fault in told.value.faults}
    assert says in found[path], found


def test_a_path_is_taken_for_a_tokenizer() -> None:
    for name in ("bytes", "./gpt2", "tokenizers/mine", "my.model", "/a/tokenizer.json"):
        assert spec(tokenizer=name).data.tokenizer == name
