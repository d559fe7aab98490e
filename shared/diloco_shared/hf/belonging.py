"""Whether a corpus's tokens are those that a checkpoint was trained on.

Beside the weights of others lies their tokenizer. Of another one's tokens each number would mean
another piece of text to them. Nothing fails then: a run would unlearn what the weights know.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from diloco_shared.corpora.prepared import TOKENIZER, Corpus
from diloco_shared.corpora.tokenizers import (
    BYTES,
    JSON,
    ByteTokenizer,
    Tokenizer,
    content_of,
    digest_of_content,
)
from diloco_shared.hf.tokenizer import files_of
from diloco_shared.reach.local import OutOfReach, Root, located
from diloco_shared.spec.run import OF_CHECKPOINT, OF_RUN, Model


@dataclass(frozen=True, slots=True)
class Made:
    """What made tokens, as the index of a corpus has it. `json`: its tokenizer.json, if it has one
    and it is here. `source`: what became tokens, for messages."""

    digest: str
    end_of_document: int
    vocabulary: int
    json: bytes | None
    source: str

    @classmethod
    def of_corpus(cls, corpus: Corpus, source: str) -> "Made | None":
        """None: tokens that do not say what made them."""
        if (index := corpus.index) is None or corpus.folder is None:
            return None
        if index.tokenizer.kind == BYTES:
            return cls.by(ByteTokenizer(), source)
        copy = corpus.folder / TOKENIZER / JSON
        raw = content_of(copy) if copy.is_file() else None
        numbers = (index.end_of_document, index.vocabulary)
        return cls(index.tokenizer.digest, *numbers, raw, source)

    @classmethod
    def by(cls, tokenizer: Tokenizer, source: str) -> "Made":
        """Text that is yet to become tokens."""
        of_bytes = isinstance(tokenizer, ByteTokenizer)
        raw = (files_of(tokenizer) if of_bytes else tokenizer.files).get(JSON)
        numbers = (tokenizer.end_of_document, tokenizer.vocabulary)
        return cls(tokenizer.digest, *numbers, raw, source)

    @property
    def name(self) -> str:
        """For messages."""
        return "'bytes'" if self.digest == ByteTokenizer().digest else f"of digest {self.digest}"


def weights_folder(model: Model, root: Root) -> Path | None:
    """The folder of a Hugging Face checkpoint that a run begins from, where it is here."""
    if not model.weights or model.weights.startswith((OF_CHECKPOINT, OF_RUN)):
        return None
    try:
        folder = located(model.weights, root)
        return folder if folder.is_dir() else None
    except (OutOfReach, OSError):  # whoever opens the weights says so
        return None


def check_belongs(folder: Path, made: Made) -> None:
    """ValueError if the weights in `folder` have another tokenizer beside them than `made` tokens.
    Nothing is said of weights that have none."""
    theirs = [path for path in (folder / JSON, *sorted(folder.glob("*.model"))) if path.is_file()]
    if not theirs or any(_same(content_of(path), path.name == JSON, made) for path in theirs):
        return
    raise ValueError(
        f"the tokens of {made.source} are made by the tokenizer {made.name}, and the weights in "
        f"{folder} come with another one ({theirs[0].name}): to them each of these tokens would be "
        "another piece of text, and training would destroy what they have learned. For text, set "
        "data.tokenizer to the folder of the weights; prepare a corpus with 'diloco data prepare "
        f"--tokenizer {folder}'. If you mean to change the tokenizer, put the files of the new one "
        "in the place of those beside the weights: model.weights_digest is not of them"
    )


def _same(raw: bytes, of_hugging_face: bool, made: Made) -> bool:
    """Whether a file beside the weights is what made the tokens. Which token ends a document is the
    corpus's own affair: models that were taught to answer end their texts with another one."""
    if digest_of_content(raw, made.end_of_document, made.vocabulary) == made.digest:
        return True
    if not of_hugging_face or made.json is None:
        return False
    theirs = _encoding(raw)
    return theirs is not None and theirs == _encoding(made.json)


def _encoding(raw: bytes) -> str | None:
    """Of a tokenizer.json all that decides which numbers a text becomes here, where no token is put
    in front of it; the same however somebody wrote it down. None for a file that cannot be read."""
    try:
        whole = json.loads(_rewritten(raw))
    except ValueError:
        return None
    if not isinstance(whole, dict):
        return None
    for name in ("post_processor", "decoder", "truncation", "padding"):
        whole.pop(name, None)
    return json.dumps(whole, sort_keys=True)


def _rewritten(raw: bytes) -> bytes | str:
    """As today's package writes it: earlier ones left out fields, and wrote others in other ways.
    As it is where the package is missing. Raises ValueError."""
    try:
        import tokenizers
    except ImportError:
        return raw
    try:
        text: str = tokenizers.Tokenizer.from_str(raw.decode()).to_str()
    except Exception as error:  # whatever the package's own code raises: it has no class for it
        raise ValueError(str(error)) from None
    return text
