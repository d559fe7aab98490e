"""What checks say of the corpora of a run."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from diloco_learner.data.cache import CorpusCache
from diloco_learner.preflight.checks import check
from diloco_learner.preflight.findings import Finding
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
