"""The corpus of a run, from whatever its settings name.

A folder that `diloco data prepare` wrote is opened as it is, and so is a file of tokens. Text is
prepared once into a cache and opened from there. Nothing is read into memory.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from diloco_learner.data.cache import CorpusCache, opened, users_cache
from diloco_learner.models import ModelDef
from diloco_shared.corpora.mix import Mixture, whole_weights
from diloco_shared.corpora.prepared import Corpus, digest_of, is_prepared
from diloco_shared.corpora.pretokenised import is_tokens, open_tokens
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.corpora.sources import STDLIB, find, stdlib
from diloco_shared.corpora.tokenizers import BYTES
from diloco_shared.corpora.tokenizers import load as load_tokenizer
from diloco_shared.hf.belonging import Made, check_belongs, weights_folder
from diloco_shared.reach.local import OutOfReach, Root, located
from diloco_shared.spec.run import Data, Part, RunSpec
from diloco_shared.spec.shapes import shape_of

HERE = Path()
BESIDE = "that lies beside them"  # of weights in a folder


def load(
    data: Data,
    root: Root = HERE,
    cache: CorpusCache | None = None,
    check: Callable[[], object] = lambda: None,
) -> Corpus | Mixture:
    """Open the corpus, or the mixture, that `data` names; paths are looked for in `root`.

    `check` is called again and again where that takes long, and ends it by raising something.
    Raises ValueError that says what is missing, or which corpus is not the one that it should be.
    """
    cache = cache or CorpusCache(users_cache())
    if not data.mixture:
        return _part(data.sources[0], data, root, cache, check)
    # Whatever is there is open meanwhile: it does not give way to another one of the mixture.
    there = [_there(part, data, root, cache) for part in data.sources]
    corpora = tuple(_part(part, data, root, cache, check) for part in data.sources)
    del there
    _check_one_tokenizer(corpora)
    return Mixture(corpora, whole_weights([part.weight for part in data.mixture]))


def digest(corpus: Corpus | Mixture) -> str:
    """Of what is read: equal where the tokens are. 32 hex digits for each corpus."""
    if isinstance(corpus, Mixture):
        return " ".join(map(digest_of, corpus.corpora))
    return digest_of(corpus)


def place_of(source: str, root: Root) -> Path:
    """Where a source lies."""
    return stdlib() if source == STDLIB else located(source, root)


def check_vocabulary(spec: RunSpec, corpus: Corpus | Mixture) -> None:
    """ValueError if the run's model has no row for some token. Of a model of one's own nobody here
    knows how many it has."""
    if spec.model.factory is not None:
        return
    has = shape_of(spec.model).vocabulary
    corpora = corpus.corpora if isinstance(corpus, Mixture) else (corpus,)
    if has >= (wanted := max(one.rows for one in corpora)):
        return
    if spec.model.weights:  # their shape is as it is
        theirs = "of the run that the checkpoint is of" if spec.model.checkpoint else BESIDE
        raise ValueError(
            f"the weights that the run begins from have rows for {has} tokens, and this corpus "
            f"needs {wanted}: prepare it with the tokenizer {theirs}. If it was, then "
            "by an earlier build, which counted tokens that never occur, or its text spells one of "
            "those: prepare it anew, without that text"
        )
    raise ValueError(
        f"model.overrides.vocabulary ({has}) is too small for this corpus, which has "
        f"{wanted} different tokens: set it to {wanted} or more"
    )


def check_tokenizer(spec: RunSpec, corpus: Corpus | Mixture, root: Root) -> None:
    """ValueError if the run begins from weights that have another tokenizer beside them than the
    one that made its tokens. Nothing of it is known of weights that have none, or are not here."""
    if (folder := weights_folder(spec.model, root)) is None:
        return
    corpora = corpus.corpora if isinstance(corpus, Mixture) else (corpus,)
    for part, one in zip(spec.data.sources, corpora, strict=True):
        if (made := Made.of_corpus(one, part.source)) is not None:
            check_belongs(folder, made)
        elif spec.data.tokenizer != BYTES:  # which `bytes` a run has that says nothing
            check_belongs(folder, Made.by(load_tokenizer(spec.data.tokenizer, root), part.source))


def check_signs(spec: RunSpec, model: ModelDef, corpus: Corpus | Mixture) -> None:
    """ValueError if the corpus says which tokens are to be predicted, and the model cannot read
    that: it would take a token below 0 for another one."""
    corpora = corpus.corpora if isinstance(corpus, Mixture) else (corpus,)
    masked = next((one for one in corpora if one.masked), None)
    if masked is None or model.masked_tokens:
        return
    raise ValueError(
        f"the corpus {masked.name} says which tokens are to be predicted, and the model of "
        f"model.factory ({spec.model.factory}) does not say that it reads that: let its loss take "
        "a token below 0 for ~token and leave it out of the mean, and set masked_tokens = True on "
        "the object that the factory makes"
    )


def separator_of(data: Data, corpus: Corpus | Mixture) -> int | None:
    """The token between documents, where the run keeps them apart; None where it does not.

    Raises ValueError if this token does not tell where a document ends.
    """
    if data.documents == "packed":
        return None
    first, *others = corpus.corpora if isinstance(corpus, Mixture) else (corpus,)
    for one in (first, *others):
        _check_separator(one)
        if one.end_of_document != first.end_of_document:
            raise ValueError(
                "data.documents = 'apart' needs one token between documents: it is "
                f"{first.end_of_document} in {first.name}, and {one.end_of_document} in "
                f"{one.name}. Prepare them with the same tokenizer"
            )
    return first.end_of_document


def _check_separator(corpus: Corpus) -> None:
    end = corpus.end_of_document
    if end is None:
        beside = Path(corpus.name).with_suffix(".json")
        raise ValueError(
            f"data.documents = 'apart' needs the token between documents, and {corpus.name} does "
            f'not say which it is: write {{"end_of_document": N}} to {beside}, where N is the '
            "number of that token (if the file is there, add it), or leave data.documents out"
        )
    if end >= corpus.vocabulary:
        raise ValueError(
            f"data.documents = 'apart': by what {corpus.name} says, token {end} ends a document, "
            f"and there are {corpus.vocabulary} tokens, counted from 0. Mend end_of_document there"
        )
    if not corpus.masked:
        return
    assert corpus.index is not None
    # Whole shards say how many documents they have; what is held out is a fair sample of all.
    shard, tokens = corpus.index.splits["validation"].shards[0], corpus.validation.parts[0]
    blocks = Tokens([tokens], corpus.vocabulary).blocks()
    many = sum(int(np.count_nonzero((block == end) | (block == ~end))) for block in blocks)
    if many > shard.documents:
        raise ValueError(
            f"data.documents = 'apart' would cut conversations of {corpus.name} into pieces: token "
            f"{end} ends a document, and stands within them too ({many} times in the "
            f"{shard.documents} conversations of {shard.file}), since the chat template ends each "
            "answer or each message with it. Leave data.documents out, or prepare the corpus with "
            "a template that ends messages with another token (diloco data prepare "
            "--chat-template)"
        )


def _there(part: Part, data: Data, root: Root, cache: CorpusCache) -> Corpus | None:
    """Of a text that is prepared already. What is wrong with it `_part` says."""
    with suppress(ValueError, OSError):
        path = place_of(part.source, root)
        if part.source == STDLIB or not (is_prepared(path) or is_tokens(path)):
            text, tokenizer = find(part.source, root), load_tokenizer(data.tokenizer, root)
            return cache.there(text, tokenizer, data.validation_fraction)
    return None


def _part(
    part: Part, data: Data, root: Root, cache: CorpusCache, check: Callable[[], object]
) -> Corpus:
    path = place_of(part.source, root)
    if part.source != STDLIB and is_prepared(path):
        corpus = opened(path)
        _check_tokenizer(corpus, data, root)
    elif part.source != STDLIB and is_tokens(path):
        given = None if data.tokenizer == BYTES else load_tokenizer(data.tokenizer, root)
        corpus = open_tokens(path, data.validation_fraction, given.vocabulary if given else None)
    else:
        tokenizer = load_tokenizer(data.tokenizer, root)
        try:
            text = find(part.source, root)
            corpus = cache.corpus(text, tokenizer, data.validation_fraction, check)
        except ValueError as error:
            raise ValueError(f"data.source: {error}") from None
    if part.digest and (found := cache.digest(corpus, path, check)) != part.digest:
        tells = "diloco data show"
        if corpus.index is None:  # then it depends on where the part that is held out begins
            tells += f" --validation-fraction {data.validation_fraction:g}"
        raise ValueError(
            f"the corpus at {path if part.source != STDLIB else STDLIB} has digest {found}, and "
            f"the run wants {part.digest}: copy the run's corpus to this machine, or give the run "
            f"this digest if this corpus is the right one ('{tells}' tells it)"
        )
    return corpus


def _check_tokenizer(corpus: Corpus, data: Data, root: Root) -> None:
    """The corpus has a tokenizer of its own: another one in the settings is a mistake.

    `bytes` is what settings have that say nothing; a path may be of where the corpus was made.
    """
    if data.tokenizer == BYTES or not _is_here(data.tokenizer, root):
        return
    given = load_tokenizer(data.tokenizer, root).digest
    assert corpus.index is not None
    if given != corpus.index.tokenizer.digest:
        raise ValueError(
            f"{corpus.name} was made with the tokenizer {corpus.index.tokenizer.digest}, and "
            f"data.tokenizer ({data.tokenizer}) is {given}: prepare the corpus again, or leave "
            "data.tokenizer out"
        )


def _is_here(name: str, root: Root) -> bool:
    try:
        return located(name, root).exists()
    except OutOfReach:
        return False


def _check_one_tokenizer(corpora: tuple[Corpus, ...]) -> None:
    """A number must mean the same token in every corpus of a mixture."""
    known = {c.index.tokenizer.digest: c for c in corpora if c.index is not None}
    if len(known) > 1:
        first, second, *_ = known.values()
        raise ValueError(
            f"the corpora of data.mixture have different tokenizers: {first.name} and "
            f"{second.name} do not agree. Prepare them with the same one"
        )
