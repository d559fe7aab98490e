"""Text to tokens: how fast, in how much memory, against the tokenizer alone; and how soon opened.

    python bench/prepare.py [--mb 1000] [--vocabulary 32768] [--tokenizer PATH] [--workers N]
                            [--repeats 3] [--json FILE]

The corpus is made of the standard library's source code, again and again, with every name of three
letters or more changed in each copy, so that no copy repeats another; it is written as JSON lines.
`alone` is the package `tokenizers` by itself: encode_batch over the same documents, already in
memory, on the same cores, and nothing is done with the result. `fast` is its encode_batch_fast,
which does not note where in the text a token stood. `prepare` is all of it: read, parse, deal to
splits, encode, write, sync; it is compared with the quicker of the two. All take turns, each in a
process of its own. Memory is that of the process and its children, looked at every few hundredths
of a second. Processor seconds are compared beside the clock's, since they hardly depend on what
else the machine does. `load` is what a learner does with the corpus when it begins.
"""

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from runs import keep, surroundings

from diloco_shared.corpora.documents import Tally
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.sources import Source, find
from diloco_shared.corpora.tokenizers import HuggingFace, load
from diloco_shared.corpora.training import train_tokenizer

FRACTION = 0.05
# Of one file of JSON lines.
FILE_BYTES = 64_000_000
# Given to encode_batch at once, alone: enough for all cores, and a small part of memory.
BATCH_BYTES = 16 << 20
# Between two looks at a process' memory.
LOOK_S = 0.03
# Sequences that a learner takes first, and their length.
SEQUENCES, CONTEXT = 8, 1024
SEED = 0
PARTS = ("alone", "fast", "prepare", "load")


def main() -> None:
    """Print a table; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mb", type=float, default=1000, help="of text, in millions of bytes")
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--tokenizer", help="a tokenizer.json; trained on the text if left out")
    parser.add_argument("--workers", type=int, default=0, help="threads; 0: one a core")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the text is written and kept")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(part(args)))
        return
    with tempfile.TemporaryDirectory(prefix="diloco-prepare-", dir=args.folder) as there:
        result = measured(Path(there), args) | surroundings(__file__)
    table(result)
    keep(args.json, result, indent=1)


def measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Every part `repeats` times, in turn; medians, and the most memory."""
    text, tokenizer = folder / "text", args.tokenizer or str(folder / "tokenizer")
    size = make(text, int(args.mb * 1e6))
    trained_s = 0.0
    if not args.tokenizer:
        began = time.perf_counter()
        train_tokenizer(find("stdlib"), args.vocabulary, Path(tokenizer))
        trained_s = time.perf_counter() - began
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in PARTS}
    for _ in range(args.repeats):
        shutil.rmtree(folder / "corpus", ignore_errors=True)
        for name in PARTS:
            seen[name].append(in_process(name, folder, tokenizer, args.workers))
            print(f"{name:>8} {seen[name][-1]}", flush=True)
    rows = {name: summed(found) for name, found in seen.items()}
    whole = rows["prepare"]
    alone = min((rows["alone"], rows["fast"]), key=lambda row: float(row["seconds"]))
    alone_cpu_s = min(rows["alone"]["cpu_s"], rows["fast"]["cpu_s"])
    figures = {
        "rate_over_alone": alone["seconds"] / whole["seconds"],
        "cpu_over_alone": whole["cpu_s"] / alone_cpu_s,
        "mb_per_s": whole["text_bytes"] / 1e6 / whole["seconds"],
        "alone_mb_per_s": alone["text_bytes"] / 1e6 / alone["seconds"],
        "peak_mb": whole["peak_bytes"] / 1e6,
        "load_s": rows["load"]["seconds"],
        "tokens_per_byte": whole["tokens"] / whole["text_bytes"],
    }
    return {
        "figures": figures,
        "rows": rows,
        "file_bytes": size,
        "tokenizer_trained_s": trained_s,
        "vocabulary": load(tokenizer).vocabulary,
        "workers": args.workers or os.cpu_count(),
        "repeats": args.repeats,
    }


def summed(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure; of memory the most."""
    row = {key: statistics.median(each[key] for each in found) for key in found[0]}
    return row | {"peak_bytes": max(each["peak_bytes"] for each in found)}


# --- the text ------------------------------------------------------------------------------------


def make(folder: Path, size: int) -> int:
    """Files of JSON lines with so many bytes of text together; the bytes of the files."""
    folder.mkdir()
    library = [document.text for document in find("stdlib").documents(Tally())]
    written, number, file = 0, 0, None
    for text in copies(library, size):
        if file is None or file.tell() > FILE_BYTES:
            if file is not None:
                file.close()
            file = (folder / f"{number:04d}.jsonl").open("w", encoding="utf-8")
            number += 1
        file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        written += len(text)
    if file is not None:
        file.close()
    return sum(path.stat().st_size for path in folder.iterdir())


def copies(library: list[str], size: int) -> Iterator[str]:
    """Documents until there are so many characters; of every copy but the first, others names."""
    given, copy = 0, 0
    names = re.compile(r"\b[a-z_]{3,}\b")
    while given < size:
        rng, renamed = random.Random(SEED + copy), dict[str, str]()

        def other(
            match: re.Match[str], rng: random.Random = rng, renamed: dict[str, str] = renamed
        ) -> str:
            word = match[0]
            if word not in renamed:
                cut = rng.randrange(1, len(word))
                renamed[word] = word[cut:] + word[:cut]
            return renamed[word]

        for text in library:
            changed = names.sub(other, text) if copy else text
            yield changed
            given += len(changed)
            if given >= size:
                return
        copy += 1


# --- the parts, each in a process of its own ------------------------------------------------------


def in_process(name: str, folder: Path, tokenizer: str, workers: int) -> dict[str, Any]:
    """What a part tells, and the most memory that it and its children held."""
    told = ["--part", name, "--folder", str(folder), "--tokenizer", tokenizer]
    command = [sys.executable, __file__, *told, "--workers", str(workers)]
    environment = os.environ | ({"RAYON_NUM_THREADS": str(workers)} if workers else {})
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        there = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, held(there))
            time.sleep(LOOK_S)
        assert process.stdout is not None
        told_last = process.stdout.read().strip().splitlines()[-1:]
    if process.returncode:
        raise SystemExit(f"{name} ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(told_last[0])
    return found | {"peak_bytes": peak}


def held(process: psutil.Process) -> int:
    """Bytes of a process and its children that are in memory now."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.NoSuchProcess:
        pass
    return total


def part(args: argparse.Namespace) -> dict[str, Any]:
    """One part, timed; processor seconds are those of all its threads."""
    folder = Path(args.folder)
    match args.part:
        case "alone" | "fast":
            return alone(find(str(folder / "text")), args.tokenizer, fast=args.part == "fast")
        case "prepare":
            return whole(find(str(folder / "text")), folder / "corpus", args)
        case _:
            return opened(folder / "corpus")


def alone(source: Source, name: str, *, fast: bool) -> dict[str, Any]:
    """encode_batch or encode_batch_fast, and nothing but its time."""
    tokenizer = load(name)
    assert isinstance(tokenizer, HuggingFace)
    encode = tokenizer.inner.encode_batch_fast if fast else tokenizer.inner.encode_batch
    seconds = cpu = 0.0
    size = 0
    for batch in batches(source):
        size += sum(len(text.encode()) for text in batch)
        began, cpu_began = time.perf_counter(), time.process_time()
        encode(batch, add_special_tokens=False)
        seconds += time.perf_counter() - began
        cpu += time.process_time() - cpu_began
    return {"seconds": seconds, "cpu_s": cpu, "text_bytes": size}


def batches(source: Source) -> Iterator[list[str]]:
    """The documents, some at a time."""
    batch, size = list[str](), 0
    for document in source.documents(Tally()):
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def whole(source: Source, to: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`prepare`, as the command does it."""
    tokenizer = load(args.tokenizer)
    began, cpu_began = time.perf_counter(), time.process_time()
    corpus = prepare(source, tokenizer, to, FRACTION, args.workers)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    tokens = len(corpus.train) + len(corpus.validation) + len(corpus.test)
    size = sum(len(document.text.encode()) for document in source.documents(Tally()))
    return {"seconds": seconds, "cpu_s": cpu, "text_bytes": size, "tokens": tokens}


def opened(folder: Path) -> dict[str, Any]:
    """What a learner does: open, cut into shards, take the first sequences."""
    from diloco_learner.data.corpus import load as load_corpus
    from diloco_learner.data.shards import ShardReader, cut_of
    from diloco_shared.spec.run import Data

    began, cpu_began = time.perf_counter(), time.process_time()
    corpus = load_corpus(Data(source=str(folder)))
    seconds = time.perf_counter() - began
    cut = cut_of(corpus.train, 64, CONTEXT, SEED)
    taken = ShardReader(cut, 0).take(SEQUENCES)
    assert taken.shape == (min(SEQUENCES, cut.size(0)), CONTEXT + 1)
    return {
        "seconds": seconds,
        "first_batch_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
    }


def table(result: dict[str, Any]) -> None:
    """For people."""
    figures = result["figures"]
    print(
        f"\n{result['file_bytes'] / 1e6:.0f} MB of JSON lines, {result['vocabulary']} tokens, "
        f"{result['workers']} threads, {result['machine']}"
    )
    print(f"\n{'':<10}{'seconds':>10}{'MB/s':>8}{'CPU s':>9}{'peak MB':>9}")
    for name, row in result["rows"].items():
        rate = f"{row['text_bytes'] / 1e6 / row['seconds']:.2f}" if "text_bytes" in row else ""
        peak = row["peak_bytes"] / 1e6
        print(f"{name:<10}{row['seconds']:>10.3f}{rate:>8}{row['cpu_s']:>9.2f}{peak:>9.0f}")
    print(
        f"\nprepare has {figures['rate_over_alone']:.2f} of the rate of the tokenizer alone, and "
        f"takes {figures['cpu_over_alone']:.2f} of its processor time"
    )


if __name__ == "__main__":
    main()
