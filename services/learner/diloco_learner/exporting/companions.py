"""What belongs beside the weights: the tokenizer, where this machine has it."""

from pathlib import Path

import structlog

from diloco_learner.exporting.making_io import Companions
from diloco_shared.corpora.prepared import is_prepared, open_corpus
from diloco_shared.corpora.tokenizers import Tokenizer, load
from diloco_shared.hf.tokenizer import files_of, special_tokens
from diloco_shared.spec.run import Data, RunSpec

log = structlog.get_logger()


def of_tokenizer(spec: RunSpec, root: Path) -> Companions:
    """The files of the run's tokenizer; relative paths are under `root`.

    Nothing, and a line in the log, where its files are not on this machine: the weights are worth
    having without them.
    """
    try:
        tokenizer = tokenizer_of(spec.data, root)
    except ValueError as error:
        log.warning("without tokenizer", reason=str(error))
        return Companions()
    return Companions(contents=files_of(tokenizer), tokens=special_tokens(tokenizer))


def tokenizer_of(data: Data, root: Path) -> Tokenizer:
    """That of the corpus, which has a copy of it; or the one that the run names.

    Raises ValueError.
    """
    folder = root / Path(data.sources[0].source).expanduser()
    if is_prepared(folder):
        found = open_corpus(folder).tokenizer
        if found is not None:
            return found
    return load(data.tokenizer, root)
