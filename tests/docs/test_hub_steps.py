"""What pages tell to type at a hub and at a site before anything runs there does what it shall.

Every `diloco hub` and `diloco site` of a block is executed, in the order of the block, with its
absolute paths below a folder of the test. What an earlier block has made is there.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from docs.ours import path_of
from docs.shell import Typed, commands
from docs.shown import PAGES, ROOT, Shown, is_placeholder, shown
from places import compose, pod_of, rendered
from typer.testing import CliRunner

from diloco_cli.commands import whole_app

APP, RUNNER = whole_app(), CliRunner()
HUB, SITE = "/etc/diloco/hub", "frankfurt"
# These need a message server, or its program.
_OF_SERVERS = {("hub", "backup"), ("hub", "restore")}
# What can be told only after something else was.
_OF_A_ROTATION = "--finish"


def steps(text: Shown) -> list[Typed]:
    """The commands of a hub and of a site, as far as they name nothing that the reader fills in."""
    found = [t for t in commands(text.text) if t.program in ("diloco", "operator")]
    return [
        typed
        for typed in found
        if path_of(typed.words)[:1] in (("hub",), ("site",))
        and path_of(typed.words) not in _OF_SERVERS
        and not any(map(is_placeholder, typed.words))
    ]


def at_a_hub() -> Iterator[Shown]:
    """Whole blocks, and commands within lines that say at which hub or in which file."""
    for page in PAGES:
        for text in shown(page):
            typed = steps(text)
            whole = text.whole or any(word in ("--hub", "--to") for t in typed for word in t.words)
            if typed and whole:
                yield text


def named(text: Shown) -> str:
    return f"{text.page.stem}-{'-'.join(path_of(steps(text)[0].words))}"


def below(root: Path, words: Sequence[str]) -> list[str]:
    return [re.sub(r"^(?=/)", str(root), word) for word in words]


def run(words: Sequence[str]) -> str:
    done = RUNNER.invoke(APP, list(words))
    assert done.exit_code == 0, f"{' '.join(words)}: {done.output} {done.exception}"
    return done.output


def option(words: Sequence[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


def make_what_was_there(root: Path, typed: list[Typed]) -> None:
    """The hub and its sites, and what was carried to a site, where the block does not make them."""
    paths = [path_of(each.words) for each in typed]
    for each, path in zip(typed, paths, strict=True):
        words = below(root, each.words)
        default = words[3] if path == ("hub", "renew") else f"{root}{HUB}"
        hub = Path(option(words, "--hub", default))
        if ("hub", "init") not in paths and not hub.exists():
            run(["hub", "init", str(hub), "--host", "hub.example.org"])
        added = ("site", "add") in paths and words[3] in [
            t.words[3] for t in typed if "add" in t.words
        ]
        site = words[3] if path[0] == "site" and len(words) > 3 and words[3][:1].isalpha() else SITE
        known = (hub / "credentials" / site).exists() or added or ("hub", "init") in paths
        if not known and path not in (("site", "add"), ("site", "key")):
            run(["site", "add", site, "--learner", f"{site}-1", "--hub", str(hub)])
        if _OF_A_ROTATION in words:
            run(["site", "rotate", site, "--hub", str(hub)])
        if path == ("site", "leaf"):
            shutil.copy(hub / "credentials" / SITE, option(words, "--credentials", ""))
            shutil.copy(hub / "authority.pem", option(words, "--ca", ""))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("DILOCO_")]:
        monkeypatch.delenv(name)
    (tmp_path / "etc/diloco").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("text", [*at_a_hub()], ids=named)
def test_what_is_typed_at_a_hub_and_at_a_site_does_it(text: Shown, root: Path) -> None:
    typed = steps(text)
    make_what_was_there(root, typed)
    for each in typed:
        run(below(root, each.words[1:]))


# --------------------------------------------------------------------------------------------------
# Places that a later step names are those that an earlier one made.


def text_of(page: str) -> str:
    (path,) = [each for each in PAGES if each.stem == page and each.parent.name == "how-to"]
    return path.read_text("utf-8").replace("\\\n", " ")


@pytest.mark.parametrize("page", ["deploy", "three-nodes"])
def test_who_keeps_a_message_server_is_told_its_files_and_its_store(page: str, root: Path) -> None:
    (found,) = [t for text in shown_of(page) for t in commands(text) if KEEPER in t.words]
    first = next(t for text in shown_of(page) for t in commands(text) if "init" in t.words)
    run(below(root, first.words[1:]))
    *reloaded, store, config = [word for word in found.words[3:] if word.startswith("/")]
    assert all(Path(f"{root}{path}").is_file() for path in reloaded)
    said = Path(f"{root}{config}").read_text("utf-8")
    assert f'store_dir: "{root}{store}"' in said
    assert re.search(r"^http: .?127\.0\.0\.1:8222\b", said, re.MULTILINE), (
        "where keep_hub asks unless it is told another place"
    )


KEEPER = "diloco_shared.process.keep_hub"


def shown_of(page: str) -> list[str]:
    (path,) = [each for each in PAGES if each.stem == page and each.parent.name == "how-to"]
    return [text.text for text in shown(path) if text.whole]


def test_the_file_by_which_a_server_is_told_to_read_again_is_its_own(root: Path) -> None:
    """On a machine, and in the container of a hub's message server, which sees its folder there."""
    config = Path(compose("hub.yaml")["nats"]["entrypoint"][-1])
    pids = re.findall(r"nats-server --signal reload=(\S+)`", text_of("deploy"))
    for folder, pid in zip((HUB, str(config.parent)), pids, strict=True):
        run(["hub", "init", f"{root}{folder}", "--host", "hub.example.org"])
        said = Path(f"{root}{folder}/{config.name}").read_text("utf-8")
        assert f'pid_file: "{root}{pid}"' in said


def test_the_secret_of_the_coordinator_is_where_the_page_takes_it_from(root: Path) -> None:
    run(["hub", "init", f"{root}{HUB}", "--host", "hub.example.org"])
    (path, key) = re.findall(r'open\("(\S+)"\)\)\["(\w+)"\]', text_of("deploy"))[0]
    assert json.loads(Path(f"{root}{path}").read_text("utf-8"))[key].startswith("SU")


def test_what_compose_demands_was_exported_before_it_is_started() -> None:
    given, started = set[str](), set[str]()
    for text in shown_of("deploy"):
        for typed in commands(text):
            given |= typed.environment.keys()
            files = [
                word for word in typed.words if word in ("compose/hub.yaml", "compose/site.yaml")
            ]
            for file in files if typed.program == "docker" else ():
                demanded = re.findall(r"\$\{(\w+):\?", (ROOT / file).read_text("utf-8"))
                assert {*demanded} <= given, f"{' '.join(typed.words)}"
                started.add(file)
    assert len(started) == 2


def keys_demanded(folder: str) -> dict[str, set[str]]:
    """By secret, the keys without which a pod of a folder of deploy/kubernetes does not start."""
    found: dict[str, set[str]] = {}
    for document in rendered(folder):
        for volume in (pod_of(document) or {}).get("volumes", ()):
            for source in (volume, *volume.get("projected", {}).get("sources", ())):
                secret = source.get("secret", {})
                if secret and not secret.get("optional"):
                    name = secret.get("name") or secret["secretName"]
                    keys = {item["key"] for item in secret.get("items", ())}
                    found.setdefault(name, set()).update(keys)
    return found


def secrets_made() -> list[tuple[str, frozenset[str], bool]]:
    """Name, keys, and whether it takes the place of one that is there."""
    made = list[tuple[str, frozenset[str], bool]]()
    for text in shown_of("kubernetes"):
        for typed in commands(text):
            if "secret" in typed.words and "create" in typed.words:
                files = [w.partition("=")[2] for w in typed.words if w.startswith("--from-file=")]
                keys = frozenset(Path(file.partition("=")[0]).name for file in files)
                name = typed.words[typed.words.index("generic") + 1]
                made.append((name, keys, "--dry-run=client" in typed.words))
    return made


@pytest.mark.parametrize("folder", ["hub", "site"])
def test_secrets_are_made_with_the_keys_that_pods_read(folder: str) -> None:
    demanded = keys_demanded(folder)
    assert demanded
    for name, keys in demanded.items():
        assert any(secret == name and keys <= given for secret, given, _ in secrets_made()), name


def test_every_secret_can_be_made_anew_with_all_of_its_keys() -> None:
    """After a rotation: the old secret would lock its processes out, and a part of it, too."""
    first, later = (
        {(name, keys) for name, keys, anew in secrets_made() if anew == wanted}
        for wanted in (False, True)
    )
    assert first == later and len(first) == 3


def test_no_secret_is_made_of_a_file_with_keys_for_other_things() -> None:
    """As that of a person, which has all of his profiles: every process gets the whole file."""
    for text in shown_of("kubernetes"):
        for typed in commands(text):
            given = [w for w in typed.words if w.startswith("--from-file=")]
            assert not [word for word in given if "$HOME" in word or "~" in word], given
