"""A tokenizer of one's own: byte-level BPE, trained on a corpus.

Every text can be written in its tokens, since single bytes are among them, and a text decodes to
itself. One more token stands for the end of a document.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.folders import locked
from diloco_shared.corpora.prepare import Progress
from diloco_shared.corpora.sources import Source
from diloco_shared.corpora.tokenizers import CONFIG, JSON, HuggingFace, Tokenizer, load
from diloco_shared.durable import replace, settle

END = "<|endoftext|>"
# Single bytes, the end of a document, and at least one pair.
VOCABULARY_MIN = 258
# Above this the table of pairs of the trainer takes many GB, and no model has as many tokens.
VOCABULARY_MAX = 1 << 20
# Text that the trainer sees, in bytes. It holds every different word with its count: some GB for
# this much. Of a larger corpus a sample is taken, document by document; more text hardly changes
# which pairs are frequent.
TEXT_MAX = 512 << 20
# Documents handed over at once.
BATCH = 256


def train_tokenizer(
    source: Source, vocabulary: int, to: Path, progress: Progress | None = None
) -> Tokenizer:
    """Train on the text of `source` and write the tokenizer to the folder `to`.

    A source with little text may give fewer tokens than `vocabulary`. Raises ValueError.
    """
    if not VOCABULARY_MIN <= vocabulary <= VOCABULARY_MAX:
        raise ValueError(
            f"a vocabulary of {vocabulary} is not from {VOCABULARY_MIN} (all bytes, the end of a "
            f"document and a pair) to {VOCABULARY_MAX}"
        )
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "tokenizers are trained by the package tokenizers, which is not installed: pip install "
            "tokenizers"
        ) from None
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ValueError(f"{to} is there and is not empty: name another folder for the tokenizer")
    with locked(to, wait=False):
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tally = _Seen()
        inner.train_from_iterator(_batches(source, tally, progress), trainer)
        if not tally.documents:
            raise ValueError(f"source {source.name!r} has no text to train a tokenizer on")
        _written(to, inner.to_str())
    found = load(str(to))
    assert isinstance(found, HuggingFace)
    return found


class _Seen:
    """How many documents the trainer got."""

    def __init__(self) -> None:
        self.documents = 0


def _written(to: Path, text: str) -> None:
    aside = to.with_name(f".{to.name}.part")
    if aside.exists():  # of a process that died: nobody else has the lock
        shutil.rmtree(aside)
    aside.mkdir(parents=True)
    replace(aside / JSON, text)
    config = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    replace(aside / CONFIG, json.dumps(config, indent=1))
    os.rename(aside, to)
    settle(to.parent)


def _batches(source: Source, seen: _Seen, progress: Progress | None) -> Iterator[list[str]]:
    total, done, batch = source.bytes, 0, list[str]()
    share = min(TEXT_MAX / max(total, 1), 1.0)
    given = 0
    for document in source.documents(Tally()):
        done += document.read
        content = document.text.encode()
        if share < 1 and not _drawn(content, share):
            continue
        given += len(content)
        if given > TEXT_MAX:  # of compressed files there is more text than bytes
            break
        batch.append(document.text)
        seen.documents += 1
        if len(batch) >= BATCH:
            yield batch
            batch = []
            if progress is not None:
                progress(min(done, total), total)
    if batch:
        yield batch
    if progress is not None:
        progress(total, total)


def _drawn(content: bytes, share: float) -> bool:
    """Whether a document is in the sample; its content decides, as for the splits."""
    digest = hashlib.blake2b(content, digest_size=8, person=b"tokenizer").digest()
    return int.from_bytes(digest) < share * 2**64
