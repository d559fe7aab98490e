"""The process that samples, as its coordinator hears it: well, ill, dead, mute and too slow."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from waiting import until

from diloco_coordinator.exports.sampling_io import LINES_MAX, ChildSampler, Samples
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.hf.tokenizer import files_of
from diloco_shared.protocol.samples import (
    LINE_BYTES_MAX,
    PROMPT_CHARS_MAX,
    SampleAsked,
    SampleBegun,
    SampleDone,
    SampleFailed,
    SampleLine,
    SampleText,
)

PATHS = ":".join(os.path.abspath(path) for path in sys.path if path)
SAY = """
import json, os, signal, sys, time
def say(**line): print(json.dumps(line), flush=True)
def text(words): say(kind="text", text=words)
"""
ASKED = SampleAsked(prompt="é\n" * (PROMPT_CHARS_MAX // 2), tokens=3, temperature=0.5)


async def heard(program: str, seconds_max: float = 60.0) -> list[SampleLine]:
    """Every line of a process that carries out `program`."""
    found: list[SampleLine] = []
    command = (sys.executable, "-c", SAY + program)
    sampler = ChildSampler(dict(os.environ), command, seconds_max)
    await sampler.sample(Path("/nowhere"), ASKED, found.append)
    return found


async def test_it_is_told_what_to_write_and_heard_to_the_end() -> None:
    program = f"""
asked = json.loads(sys.stdin.read())
assert asked["prompt"] == {ASKED.prompt!r} and asked["tokens"] == 3
assert sys.argv[1:] == ["/nowhere", "--owner", "{os.getpid()}"], sys.argv
say(kind="begun"); text("a"); print("strange"); text("b"); say(kind="done", pieces=2); text("c")
"""
    assert await heard(program) == [
        SampleBegun(),
        SampleText(text="a"),
        SampleText(text="b"),
        SampleDone(pieces=2),
    ]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ('say(kind="failed", reason="no tokenizer"); sys.exit(1)', "no tokenizer"),
        ("sys.exit(3)", "ended (status 3)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended (SIGKILL)"),
        ("raise MemoryError('no more')", "status 1), and said last: MemoryError: no more"),
    ],
)
async def test_one_that_does_not_write_says_why(program: str, says: str) -> None:
    (line,) = await heard(program)
    assert isinstance(line, SampleFailed) and says in line.reason


async def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (line,) = await heard(program, seconds_max=3.0)
    assert isinstance(line, SampleFailed) and "longer than 3 s" in line.reason
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_no_process_at_all_is_said() -> None:
    found: list[SampleLine] = []
    await ChildSampler({}, ("/nowhere/python",)).sample(Path("/x"), ASKED, found.append)
    (line,) = found
    assert isinstance(line, SampleFailed) and "no process can be started" in line.reason


async def test_of_more_than_was_asked_for_no_more_is_kept_than_fits() -> None:
    """A process that has gone mad takes no memory of ours; its end is heard."""
    many = f"[text('x') for _ in range({2 * LINES_MAX})]; say(kind='done', pieces=1)"
    samples = Samples(ChildSampler(dict(os.environ), (sys.executable, "-c", SAY + many)))
    sample = samples.begin(Path("/nowhere"), ASKED)
    await until(lambda: sample._task.done())
    lines = [line async for line in sample.lines()]
    assert len(lines) == LINES_MAX + 1 and lines[-1] == SampleDone(pieces=1)


async def test_who_stops_listening_ends_the_process(tmp_path: Path) -> None:
    program = f"""
open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
say(kind="begun"); time.sleep(600)
"""
    samples = Samples(ChildSampler(dict(os.environ), (sys.executable, "-c", SAY + program)))
    lines = samples.begin(Path("/nowhere"), ASKED).lines()
    assert await anext(lines) == SampleBegun()
    await lines.aclose()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_the_longest_line_fits() -> None:
    asked = ASKED.model_copy(update={"prompt": "\x01" * PROMPT_CHARS_MAX})
    assert len(asked.model_dump_json().encode()) < LINE_BYTES_MAX


@pytest.mark.whole
async def test_the_program_itself_lets_an_export_write(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parents[2] / "interop" / "golden" / "llama", folder)
    for name, content in files_of(ByteTokenizer()).items():
        (folder / name).write_bytes(content)
    environment = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = PATHS

    async def written(prompt: str) -> list[SampleLine]:
        found: list[SampleLine] = []
        asked = SampleAsked(prompt=prompt, tokens=5, temperature=0.0)
        sampler = ChildSampler(environment)
        assert sampler.hindrance() == ""
        await asyncio.wait_for(sampler.sample(folder, asked, found.append), 120)
        return found

    (failed,) = await written("!")
    assert isinstance(failed, SampleFailed) and "they do not belong together" in failed.reason
    raw = json.loads((folder / "tokenizer.json").read_text())
    letters = sorted(raw["model"]["vocab"].items(), key=lambda item: item[1])[:47]
    raw["model"]["vocab"] = dict(letters)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    first, *texts, last = await written("!")
    assert first == SampleBegun() and last == SampleDone(pieces=len(texts))
    assert all(isinstance(line, SampleText) for line in texts) and 0 < len(texts) <= 5
