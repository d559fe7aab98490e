"""`diloco data`: from text and conversations to what learners train on. Needs no cluster."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from diloco_cli.commands.options import Json, show
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.words import FAILED, CliError, why
from diloco_shared.budget.terms import shown
from diloco_shared.corpora.chat import MESSAGES, Chat, marked
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus, digest_of, is_prepared, open_corpus, verify
from diloco_shared.corpora.pretokenised import is_tokens, open_tokens
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.splits import SPLITS
from diloco_shared.corpora.templates import template_of
from diloco_shared.corpora.token_files import Unreadable
from diloco_shared.corpora.tokenizers import BYTES, load
from diloco_shared.corpora.training import train_tokenizer
from diloco_shared.spec.run import Data

app = typer.Typer()
data = typer.Typer(
    no_args_is_help=True, help="Corpora: train a tokenizer, prepare text, show what is there."
)
app.add_typer(data, name="data")

SOURCE = "'stdlib', or a folder or file: text, .jsonl, .parquet, a saved data set."
Source = Annotated[str, typer.Argument(help=SOURCE)]
To = Annotated[Path, typer.Option(help="Folder to write; it must not hold anything else.")]
Field = Annotated[str, typer.Option(help="Field or column that holds the text of a record.")]
FRACTION = Data.model_fields["validation_fraction"].default
# Lines of progress where no terminal shows a bar.
LINES = 10
# Tokens of a split that are shown as text.
SAMPLE_TOKENS = 200

Told = Callable[[int, int], None]


@data.command("train-tokenizer")
def train(
    source: Source,
    to: To,
    vocabulary: Annotated[int, typer.Option(help="How many tokens it may have.")] = 32_768,
    field: Field = "text",
) -> None:
    """Train a byte-level BPE tokenizer on text."""
    with _faults(), _progress("reads") as told:
        found = train_tokenizer(find(source, field=field), vocabulary, to, told)
    say(f"{to}: {found.vocabulary} tokens, digest {found.digest}")
    if found.vocabulary < vocabulary:
        say(f"the text has no more pairs to join: {vocabulary} were allowed")


@data.command("prepare")
def prepare_corpus(
    source: Source,
    to: To,
    tokenizer: Annotated[
        str, typer.Option(help="'bytes', a tokenizer.json, a SentencePiece .model, or a folder.")
    ] = "bytes",
    validation_fraction: Annotated[
        float, typer.Option(help="Share of documents held out for validation; as much for test.")
    ] = FRACTION,
    workers: Annotated[int, typer.Option(min=0, help="Threads; 0: one a core.")] = 0,
    field: Annotated[
        str, typer.Option(help="Field or column that is read; 'text', or 'messages' with --chat.")
    ] = "",
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Records are conversations: learn what the assistant says."),
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file that writes conversations; else the tokenizer's own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn text, or conversations, into tokens that learners train on."""
    with _faults(), _progress("prepares") as told:
        if chat_template is not None and not chat:
            raise ValueError("--chat-template is for conversations: give --chat as well")
        encoder = load(tokenizer)
        how = None
        if chat:
            how = Chat(template_of(encoder, tokenizer, chat_template), field or MESSAGES)
        found = find(source, field=field or "text", chat=how)
        corpus = prepare(found, encoder, to, validation_fraction, workers, told)
    described = _described(corpus)
    show(described, as_json, lambda: _table(corpus, described))


@data.command("show")
def show_corpus(
    folder: Annotated[Path, typer.Argument(help="What 'data prepare' wrote, or a file of tokens.")],
    check: Annotated[
        bool, typer.Option("--verify", help="Read all of it, and compare every digest.")
    ] = False,
    validation_fraction: Annotated[
        float | None,
        typer.Option(
            help=f"Of a file of tokens: what the run holds out, {FRACTION} unless it says."
        ),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Of a file of tokens: data.tokenizer of the run, if it has one.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Splits, documents, tokens, digest, and a sample as text."""
    with _faults():
        held_out = None
        if is_tokens(folder) and not is_prepared(folder):
            held_out = FRACTION if validation_fraction is None else validation_fraction
            corpus = open_tokens(folder, held_out, _vocabulary(tokenizer))
        elif validation_fraction is not None or tokenizer:
            raise ValueError(
                "--validation-fraction and --tokenizer are for a file of tokens: a prepared corpus "
                "has its own"
            )
        else:
            corpus = open_corpus(folder)
        with meanwhile("compares every digest", quiet=as_json or not check):
            faults = verify(corpus) if check else []
        described = _described(corpus, quiet=as_json)
        lines = _table(corpus, described)
        if held_out is not None:  # whose digest depends on it
            described["validation_fraction"] = held_out
            lines.append(f"held out    {held_out:g} for validation, and as much for test")
        described["sample"] = sample = _sample(corpus)
    heading = "The first validation tokens, as text"
    if corpus.masked:
        heading += "; what stands between « and » is not to be predicted"
    lines += ["", f"{heading}:", sample] if sample else []
    lines += [f"not sound: {fault}" for fault in faults]
    if check and not faults:
        lines += [
            "every token is as it was written"
            if corpus.index
            else "not verified: a file of tokens does not say what was written. Compare its digest"
        ]
    show(described | {"faults": faults}, as_json, lambda: lines)
    if faults:
        raise typer.Exit(FAILED)


def _vocabulary(tokenizer: str) -> int | None:
    """As a run reads its settings: `bytes` is what those have that name no tokenizer."""
    return load(tokenizer).vocabulary if tokenizer not in ("", BYTES) else None


def _digest(corpus: Corpus, quiet: bool) -> str:
    """Tokens that came without one are read for it, all of them."""
    total, done = sum(part.nbytes for name in SPLITS for part in corpus.split(name).parts), 0

    def moved(more: int) -> None:
        nonlocal done
        done += more

    def reads() -> str:
        return f"reads {corpus.name} for its digest: {100 * done // max(total, 1)} %"

    with meanwhile(reads, quiet=quiet or bool(corpus.digest)):
        return digest_of(corpus, moved)


def _described(corpus: Corpus, *, quiet: bool = False) -> dict[str, Any]:
    index = corpus.index
    found: dict[str, Any] = {
        "name": corpus.name,
        "digest": _digest(corpus, quiet),
        "vocabulary": corpus.vocabulary,
        "tokenizer": index.tokenizer.digest if index else None,
        "source": index.source if index else None,
        "skipped_files": index.skipped_files if index else 0,
        "splits": {
            name: {
                "tokens": len(corpus.split(name)),
                "documents": index.splits[name].documents if index else None,
                "files": len(corpus.split(name).parts),
            }
            for name in SPLITS
        },
    }
    if corpus.ends_within:
        found["ends_within"] = corpus.ends_within
    if index is not None and index.masked:
        found["masked"] = True
        for name, split in found["splits"].items():
            split["predicted"] = index.splits[name].predicted
    return found


def _table(corpus: Corpus, found: dict[str, Any]) -> list[str]:
    """For people; `found`: what `_described` says of it."""
    index = corpus.index
    lines = [f"{'split':<12}{'documents':>12}{'tokens':>18}{'files':>8}"]
    lines[0] += f"{'to predict':>18}" if corpus.masked else ""
    for name, split in found["splits"].items():
        documents = "-" if split["documents"] is None else f"{split['documents']:,}"
        line = f"{name:<12}{documents:>12}{split['tokens']:>18,}{split['files']:>8}"
        lines.append(line + (f"{split['predicted']:>18,}" if corpus.masked else ""))
    lines += ["", f"digest      {found['digest']}"]
    lines.append(f"vocabulary  {found['vocabulary']:,} tokens")
    if index is not None:
        lines.append(f"tokenizer   {index.tokenizer.kind}, digest {index.tokenizer.digest}")
        lines.append(f"source      {index.source}")
    if ends := corpus.ends_within:
        lines.append(f"ends        {ends:,} within documents: their text spells the token")
    if found["skipped_files"]:
        lines.append(f"left out    {found['skipped_files']} files that {_not_read(corpus)}")
    return lines


def _not_read(corpus: Corpus) -> str:
    return "hold no conversations" if corpus.masked else "are not text"


def _sample(corpus: Corpus) -> str:
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        return ""
    try:
        tokens = corpus.validation[:SAMPLE_TOKENS].tolist()
    except Unreadable:  # `--verify` says so
        return ""
    return marked(tokens, tokenizer) if corpus.masked else tokenizer.decode(tokens)


@contextmanager
def _faults() -> Iterator[None]:
    """One line for what is wrong with the input or the disk."""
    try:
        yield
    except ValueError as error:
        raise CliError(str(error)) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CliError(f"{where}{why(error)}") from None


@contextmanager
def _progress(verb: str) -> Iterator[Told]:
    """A bar on a terminal; elsewhere a line for each tenth, so that a log stays short."""
    if not sys.stderr.isatty():
        yield _lines(verb, time.monotonic())
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(verb: str, began: float) -> Told:
    told = 0

    def progress(done: int, total: int) -> None:
        nonlocal told
        if (now := LINES * done // max(total, 1)) > told:
            told = now
            rate = done / max(time.monotonic() - began, 1e-9)
            print(
                f"{verb}: {shown(done)} of {shown(total)}, {shown(round(rate))}/s",
                file=sys.stderr,
            )

    return progress
