"""A checkout: what an operator makes in it with keys stays there, and what runs left is kept."""

import fcntl
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from pages import DOCS
from places import ROOT

# By the commands of the pages. What begins with / or $ lies elsewhere, and FOLDER is the reader's.
_MADE = (
    r"diloco hub init ([a-z]\w*)",
    r"diloco hub backup ([a-z]\w*)/",
    r"--store (restored)\b",
    r"-m 700 (backups)\b",
    r"> ([\w$-]+\.tar|seed)\b",
    r"tar cf ([\w$-]+\.tar)",
    r"DILOCO_DATA=([a-z]\w*)",
    r"--from-file=(bucket)\b",
    r"DILOCO_NATS_CREDENTIALS=([a-z]\w*)/",
    r"DILOCO_NATS_CLIENT_CERT=([a-z]\w*)/",
)
# What compose/site.yaml takes unless it is told another folder.
_BY_ITSELF = {"compose/site"}


def made() -> set[str]:
    """Names in the folder in which the commands of the pages are typed."""
    text = "".join(page.read_text("utf-8") for page in (DOCS / "how-to").glob("*.md"))
    found = [found.replace("$", "") for way in _MADE for found in re.findall(way, text)]
    assert {"hub", "site.tar", "coordinator.tar", "backups", "restored", "bucket"} <= {*found}
    return {*found} | _BY_ITSELF


def test_what_the_pages_have_one_make_with_keys_gets_into_no_commit() -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for name in made():
        asked = ["git", "check-ignore", "--quiet", "--no-index", f"{name}/in-it"]
        assert subprocess.run(asked, cwd=ROOT, check=False).returncode == 0, name
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout


def test_what_the_pages_have_one_make_with_keys_goes_to_no_builder_of_images() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert not [name for name in made() if not any(fnmatch(name, rule) for rule in ignored)]


def make(goal: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "--silent", f"--file={ROOT / 'Makefile'}", goal]
    return subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_data_of_a_cluster_outlives_a_cleaning_and_goes_only_when_it_is_named(
    tmp_path: Path,
) -> None:
    left, cache = tmp_path / "diloco-data" / "learner-1" / "lock", tmp_path / ".mypy_cache"
    left.parent.mkdir(parents=True)
    cache.mkdir()
    left.touch()
    assert make("clean", tmp_path).returncode == 0 and left.exists() and not cache.exists()
    with left.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = make("clean-data", tmp_path)
        assert refused.returncode and "a process works in" in refused.stdout and left.exists()
    assert make("clean-data", tmp_path).returncode == 0
    assert not (tmp_path / "diloco-data").exists()
