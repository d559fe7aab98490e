"""What checks say of the corpora of a run."""

import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared.corpora.texts import folder_of

from diloco_learner.data.cache import BYTES_MAX, CorpusCache
from diloco_learner.preflight.__main__ import SIGN_S, IslandSettings, _checked, _Signs
from diloco_learner.preflight.checks import InitialWeightsOf, check
from diloco_learner.preflight.findings import Finding
from diloco_shared.hf.resolving import resolved
from diloco_shared.reach.local import Reach
from diloco_shared.spec.run import Model, RunSpec

GOLDEN = Path(__file__).parents[1] / "interop" / "golden"


def tokens_of(path: Path, many: int) -> Path:
    np.resize(np.arange(40, dtype=np.uint16), many).tofile(path)
    path.with_suffix(".json").write_text(json.dumps({"vocabulary": 40}))
    return path


def found(
    name: str,
    spec: RunSpec,
    cache: CorpusCache,
    goes_on: Callable[[], None] = lambda: None,
    **tables: Any,
) -> Finding:
    """Of one check, after those before it; those behind it are not made."""
    changed = RunSpec.model_validate(spec.model_dump(mode="json") | tables)
    made = check(changed, Path("/"), cache, now=time.monotonic, goes_on=goes_on)
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


def test_who_waits_for_a_check_hears_that_it_gets_on(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check that gives no sign of life is ended after an hour."""

    clock = [0.0]

    def checking(
        *of: object, begins: Callable[[str], None], goes_on: Callable[[], None], **more: object
    ) -> list[Finding]:
        for name in ("weights", "corpus"):
            begins(name)
            for _ in range(150):
                clock[0] += 1
                goes_on()
        return []

    monkeypatch.setattr("diloco_shared.ambient.monotonic", lambda: clock[0])
    monkeypatch.setattr("diloco_learner.preflight.checks.check", checking)
    monkeypatch.setattr("diloco_learner.training.platforms.settle", lambda: None)
    monkeypatch.setattr("diloco_learner.training.compilation_cache.keep_for_user", lambda place: "")
    said, island = list[dict[str, Any]](), IslandSettings(None, "", lambda: 1)
    _checked(Reach(tmp_path), tmp_path, island, spec.model_dump_json(), said.append)
    begun = [line["begins"] for line in said]
    assert begun == ["weights"] * 3 + ["corpus"] * 3, "and a sign of each, every minute"


def test_a_check_gives_signs_while_a_corpus_is_prepared_or_read(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of many terabytes takes more than an hour."""
    monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
    for source in (tokens_of(tmp_path / "t.bin", 900), folder_of(tmp_path / "text", 60)):
        signs, cache = itertools.count(), CorpusCache(tmp_path / "cache")
        made = found("corpus", spec, cache, partial(next, signs), data={"source": str(source)})
        assert made.ok and next(signs) > 1


def test_a_check_gives_signs_while_weights_are_read(spec: RunSpec, tmp_path: Path) -> None:
    """All of them are read for their digest: 400 GB may take more than an hour."""
    model = resolved({"weights": "llama", "context_tokens": 8}, GOLDEN)
    signs, clock = list[dict[str, Any]](), itertools.count(0, SIGN_S)
    said = _Signs(signs.append, partial(next, clock))
    said.begins("weights")
    tables = {"model": model | {"weights": str(GOLDEN / "llama")}}
    made = found("weights", spec, CorpusCache(tmp_path / "cache"), said.goes_on, **tables)
    assert made.ok, made
    assert len(signs) > 1 and signs == [{"begins": "weights"}] * len(signs)


def test_the_process_that_checks_hears_of_weights_as_they_are_read(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens what else a run may begin from, too."""
    signs = list[str]()

    def checking(*of: object, beginning: InitialWeightsOf, **more: object) -> list[Finding]:
        model = Model.model_validate(resolved({"weights": "llama", "context_tokens": 8}, GOLDEN))
        beginning(model, GOLDEN, moved=lambda: signs.append("read"))
        return []

    monkeypatch.setattr("diloco_learner.preflight.checks.check", checking)
    monkeypatch.setattr("diloco_learner.training.platforms.settle", lambda: None)
    monkeypatch.setattr("diloco_learner.training.compilation_cache.keep_for_user", lambda place: "")
    island = IslandSettings(None, "", lambda: 1)
    _checked(Reach(tmp_path), tmp_path, island, spec.model_dump_json(), lambda line: None)
    assert signs


@pytest.mark.parametrize("named", [True, False])
def test_a_check_removes_nothing_from_the_cache_of_learners(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Their limit may be another one. What is the user's own has a limit of its own."""
    caches = list[CorpusCache]()

    def checking(spec: RunSpec, root: object, cache: CorpusCache, **more: object) -> list[Finding]:
        caches.append(cache)
        return []

    monkeypatch.setattr("diloco_learner.preflight.checks.check", checking)
    monkeypatch.setattr("diloco_learner.training.platforms.settle", lambda: None)
    monkeypatch.setattr("diloco_learner.training.compilation_cache.keep_for_user", lambda place: "")
    island, run = IslandSettings(None, "", lambda: 1), spec.model_dump_json()
    _checked(Reach(tmp_path), tmp_path if named else None, island, run, lambda line: None)
    (cache,) = caches
    assert not cache.makes_room
    assert cache.bytes_max == (sys.maxsize if named else BYTES_MAX)


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
