"""What checks say of the corpora of a run."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_learner.data.cache import CorpusCache
from diloco_learner.preflight.__main__ import IslandSettings, _checked
from diloco_learner.preflight.checks import check
from diloco_learner.preflight.findings import Finding
from diloco_shared.reach.local import Reach
from diloco_shared.spec.run import RunSpec


def tokens_of(path: Path, many: int) -> Path:
    np.resize(np.arange(40, dtype=np.uint16), many).tofile(path)
    path.with_suffix(".json").write_text(json.dumps({"vocabulary": 40}))
    return path


def found(name: str, spec: RunSpec, cache: CorpusCache, **tables: Any) -> Finding:
    """Of one check, after those before it; those behind it are not made."""
    changed = RunSpec.model_validate(spec.model_dump(mode="json") | tables)
    made = check(changed, Path("/"), cache, now=time.monotonic)
    return next(finding for finding in made if finding.name == name)


def test_a_file_of_tokens_is_read_for_its_digest_once(spec: RunSpec, tmp_path: Path) -> None:
    """It may have terabytes."""
    files = [str(tokens_of(tmp_path / f"{name}.bin", 900)) for name in "ab"]
    mixture = [{"source": file, "weight": 1} for file in files]
    cache, told = CorpusCache(tmp_path / "cache"), list[str]()
    read = [found("corpus", spec, cache, data={"source": file}).text for file in files]
    again = CorpusCache(tmp_path / "cache", tell=told.append)
    digests = [text.rpartition("digest ")[2] for text in read]
    text = found("corpus", spec, again, data={"mixture": mixture}).text
    assert text.endswith(f": 1,800 tokens, digest {digests[0]} {digests[1]}")
    assert told == [], "nobody reads"


def test_who_waits_for_a_check_hears_that_a_corpus_gets_on(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that gives no sign of life is ended after an hour."""

    def checking(spec: RunSpec, root: object, cache: CorpusCache, **more: object) -> list[Finding]:
        assert cache.tell is not None
        cache.tell("reads tokens.bin for its digest: 10 % of 9 bytes")
        return []

    monkeypatch.setattr("diloco_learner.preflight.checks.check", checking)
    monkeypatch.setattr("diloco_learner.training.platforms.settle", lambda: None)
    monkeypatch.setattr("diloco_learner.training.compilation_cache.keep_for_user", lambda place: "")
    said, island = list[dict[str, Any]](), IslandSettings(None, "", lambda: 1)
    _checked(Reach(tmp_path), tmp_path, island, spec.model_dump_json(), said.append)
    assert said == [{"begins": "corpus"}]


def test_a_text_that_spells_the_end_of_a_document_is_told(spec: RunSpec, tmp_path: Path) -> None:
    """By a check, and by the learner that prepares it."""
    lines = [json.dumps({"text": f"text {n} \0 of it"}) for n in range(60)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    told = list[str]()
    cache = CorpusCache(tmp_path / "cache", tell=told.append)
    text = found("corpus", spec, cache, data={"source": str(tmp_path / "t.jsonl")}).text
    says = f"the text of {tmp_path / 't.jsonl'} spells the end of a document 60 times"
    assert text.endswith(f"; {says}") and told[-1] == says


def test_a_mixture_says_how_much_of_each_corpus_is_evaluated(spec: RunSpec, tmp_path: Path) -> None:
    sizes = (("a", 0.7, 700), ("b", 0.3, 90_000))
    parts = [
        {"source": str(tokens_of(tmp_path / f"{name}.bin", many)), "weight": weight}
        for name, weight, many in sizes
    ]
    text = found(
        "sequences",
        spec,
        CorpusCache(tmp_path / "cache"),
        data={"mixture": parts, "virtual_shards": 2},
        evaluation={"sequences": 100},
    ).text
    assert text.count(": 4 of a.bin (which count as 70), 30 of b.bin") == 2, text
    assert "; validation: 4 of a.bin" in text and "; test: 4 of a.bin" in text
