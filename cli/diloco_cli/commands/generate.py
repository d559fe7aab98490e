"""`diloco generate`: text from a model, of a folder or of a run that may still be training."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Annotated

import typer

from diloco_cli.api import connect
from diloco_cli.cluster import Where
from diloco_cli.commands.export import fetched
from diloco_cli.commands.options import Json, anywhere, show
from diloco_cli.downloading import Target
from diloco_cli.meanwhile import meanwhile
from diloco_cli.words import INVALID, CliError, plain, why
from diloco_shared.corpora.templates import template_of

app = typer.Typer()

# More does not fit a screen; whoever wants more asks again with what came.
TOKENS_MAX = 100_000


@app.command()
@anywhere
def generate(
    where: Where,
    source: Annotated[str, typer.Argument(help="Folder of a model, or name of a run.")],
    prompt: Annotated[
        str, typer.Option(help="What the text begins with; empty: a new document.")
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=1, max=TOKENS_MAX, help="How many tokens to write at most.")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(help="How freely tokens are drawn; 0: always the likeliest.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(help="Draw from so many of the likeliest tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(
            help="Draw from the likeliest tokens that have this share of the chance together."
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Another seed gives another text.")
    ] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message, and answered.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="With --chat: a template to use instead of the model's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Let a model write: one in a folder, or that of a run as it is published now."""
    if chat and not prompt:
        raise CliError("--chat answers a message: give one with --prompt", INVALID)
    if chat_template is not None and not chat:
        raise CliError("--chat-template is for --chat: give both, or neither", INVALID)
    try:
        from diloco_learner.models.decoding import Sampling, writer
        from diloco_learner.training.compilation_cache import keep_for_user

        if why := keep_for_user(os.environ.get("DILOCO_CACHE", "")):
            print(why, file=sys.stderr)
    except ImportError as error:
        text = f"generating needs what learners need ({error}): pip install '.[learner]'"
        raise CliError(text, INVALID) from None
    with _folder(where, source, quiet=as_json) as folder:
        with meanwhile("reads and compiles the model", quiet=as_json):
            try:
                model = writer(folder, Sampling(temperature, top_k, top_p))
                if chat:
                    template = template_of(model.tokenizer, "beside the weights", chat_template)
                    pieces = iter(model.answer(prompt, tokens, seed, template))
                else:
                    pieces = iter(model.text(prompt, tokens, seed))
            except ValueError as error:
                raise CliError(str(error), INVALID) from None
            first = list(islice(pieces, 1))
        found = ""
        if not as_json and not chat:
            print(prompt, end="", flush=True)
        for piece in chain(first, pieces):
            found += piece
            if not as_json:
                print(plain(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    if not as_json:
        print()
        return
    show({"prompt": prompt, "text": found, "seed": seed}, as_json, lambda: [])


@contextmanager
def _folder(where: Where, source: str, *, quiet: bool) -> Iterator[Path]:
    """The folder itself, or one with what the run has published, for as long as it is needed."""
    path = Path(source)
    named = path.name == source and source != ".."
    try:
        # A run may have the name of a folder with its data.
        here = (path / "config.json").is_file() or (path.is_dir() and not named)
    except OSError as error:
        raise CliError(f"{source} cannot be read: {why(error)}", INVALID) from None
    if here:
        yield path
        return
    if not named:
        raise CliError(f"there is no folder {source}", INVALID)
    with tempfile.TemporaryDirectory(prefix="diloco-generate-") as made:
        target = Target(Path(made) / source)
        wish = {"version": None, "checkpoint": None, "dtype": "fp32"}
        with connect(where) as client:
            fetched(client, source, wish, target, quiet=quiet, goes_on=False)
        if not (target.folder / "config.json").exists():
            raise CliError(
                f"run {source!r} trains a model of its own kind: 'diloco export' writes its "
                "weights, and its own code must sample from them",
                INVALID,
            )
        yield target.folder
