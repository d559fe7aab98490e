"""Whether a corpus's tokens are those that a checkpoint was trained on.

Beside the weights of others lies their tokenizer. Of another one's tokens each number would mean
another piece of text to them. Nothing fails then: a run would unlearn what the weights know.

One tokenizer may be two files, a tokenizer.json and a model of SentencePiece. Whoever wrote the one
after the other had rules of his own for spaces and rare signs, so that no two such files say the
same. What destroys weights is another meaning of the numbers. So of these two kinds of file the
pieces are compared, number by number. Where nothing can be compared, nothing is refused: a run that
is right would never begin.
"""

import json
from collections.abc import Iterator, Mapping
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
from diloco_shared.hf.sentence_piece import pieces_of
from diloco_shared.hf.tokenizer import files_of
from diloco_shared.reach.local import OutOfReach, Root, located
from diloco_shared.spec.run import OF_CHECKPOINT, OF_RUN, Model

# Of the pieces of a model of SentencePiece so large a part has the same numbers in a tokenizer.json
# that was written after it, which may rename some. Of other tokenizers hardly any piece has.
ALIKE = 0.9


@dataclass(frozen=True, slots=True)
class Made:
    """What made tokens, as the index of a corpus has it. `json`: its tokenizer.json, if it has one
    and it is here; `model`: its model of SentencePiece. `source`: what became tokens, for
    messages."""

    digest: str
    end_of_document: int
    vocabulary: int
    json: bytes | None
    model: bytes | None
    source: str

    @classmethod
    def of_corpus(cls, corpus: Corpus, source: str) -> "Made | None":
        """None: tokens that do not say what made them."""
        if (index := corpus.index) is None or corpus.folder is None:
            return None
        if index.tokenizer.kind == BYTES:
            return cls.by(ByteTokenizer(), source)
        copies = {path.name: raw for path, raw in _beside(corpus.folder / TOKENIZER)}
        numbers = (index.end_of_document, index.vocabulary)
        return cls(index.tokenizer.digest, *numbers, copies.get(JSON), _model(copies), source)

    @classmethod
    def by(cls, tokenizer: Tokenizer, source: str) -> "Made":
        """Text that is yet to become tokens."""
        of_bytes = isinstance(tokenizer, ByteTokenizer)
        files = files_of(tokenizer) if of_bytes else tokenizer.files
        numbers = (tokenizer.end_of_document, tokenizer.vocabulary)
        return cls(tokenizer.digest, *numbers, files.get(JSON), _model(files), source)

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
    Nothing is said of weights that have none, or one that cannot be compared with it."""
    other = ""
    for path, raw in _beside(folder):
        if _same(raw, path.name == JSON, made) is not False:
            return
        other = other or path.name
    if not other:
        return
    raise ValueError(
        f"the tokens of {made.source} are made by the tokenizer {made.name}, and the weights in "
        f"{folder} come with another one ({other}): to them each of these tokens would be "
        "another piece of text, and training would destroy what they have learned. For text, set "
        "data.tokenizer to the folder of the weights; prepare a corpus with 'diloco data prepare "
        f"--tokenizer {folder}'. If you mean to change the tokenizer, put the files of the new one "
        "in the place of those beside the weights: model.weights_digest is not of them"
    )


def _beside(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """The files of a folder that may be its tokenizer, and their content; the one that most others
    read comes first. Programs of many kinds call their files *.model."""
    for path in (folder / JSON, *sorted(folder.glob("*.model"))):
        try:
            raw = content_of(path) if path.is_file() else b""
        except (ValueError, OSError):  # too long for one, or not for this process
            continue
        if raw and (path.name == JSON or pieces_of(raw)):
            yield path, raw


def _model(files: Mapping[str, bytes]) -> bytes | None:
    return next((raw for name, raw in files.items() if name.endswith(".model")), None)


def _same(raw: bytes, of_hugging_face: bool, made: Made) -> bool | None:
    """Whether a file beside the weights is what made the tokens; None where nobody can tell. Which
    token ends a document is the corpus's own affair: models that were taught to answer end their
    texts with another one."""
    if digest_of_content(raw, made.end_of_document, made.vocabulary) == made.digest:
        return True
    if of_hugging_face and made.json is not None:
        theirs = _encoding(raw)
        return theirs is not None and theirs == _encoding(made.json)
    if made.model is not None:
        theirs_by_number = _tokens(raw) if of_hugging_face else pieces_of(raw)
        return _alike(pieces_of(made.model), theirs_by_number)
    return None if made.json is None else _alike(pieces_of(raw), _tokens(made.json))


def _alike(pieces: Mapping[int, str], others: Mapping[int, str]) -> bool | None:
    """Whether the numbers of these pieces mean the same elsewhere. None: one side is not known."""
    if not pieces or not others:
        return None
    same = sum(others.get(number) == text for number, text in pieces.items())
    return same >= ALIKE * len(pieces)


def _tokens(raw: bytes) -> dict[int, str]:
    """The tokens of a tokenizer.json by their numbers. Nothing for one that cannot be read."""
    try:
        whole = json.loads(raw)
        vocabulary = whole["model"]["vocab"]
        if isinstance(vocabulary, list):  # each with its score
            found = {number: token for number, (token, _) in enumerate(vocabulary)}
        else:
            found = {number: token for token, number in vocabulary.items()}
        return found | {token["id"]: token["content"] for token in whole["added_tokens"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


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
