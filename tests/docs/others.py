"""What programs of others say of a command that a page shows: "" if it fits what is here.

Nothing is executed. Of make, Compose, Kubernetes and systemd the files of this repository say what
there is; of its scripts the source says which options they have.
"""

import ast
import itertools
import re
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from docs.ours import diloco, export, operator, service
from docs.shell import Typed
from docs.shown import ROOT, is_placeholder
from places import pod_of, rendered

# --------------------------------------------------------------------------------------------------
# make, python, pip and pytest: what this repository has of them.


@cache
def _makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Its goals, and the variables that it reads."""
    text = (ROOT / "Makefile").read_text("utf-8")
    goals = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert goals is not None
    rules = re.findall(r"^([a-z-]+):", text, re.MULTILINE)
    return frozenset(goals[1].split()) & frozenset(rules), frozenset(
        re.findall(r"\$\((\w+)\)", text)
    )


def _make(typed: Typed, whole: bool) -> str:
    goals, variables = _makefile()
    for word in typed.words[1:]:
        name, given, _ = word.partition("=")
        if given and name not in variables:
            return f"the Makefile does not read {name}"
        if not given and name not in goals:
            return f"the Makefile has no {name}"
    return "" if any("=" not in word for word in typed.words[1:]) else "it names no goal"


def _python(typed: Typed, whole: bool) -> str:
    words = typed.words[1:]
    if words[:1] == ("-c",):
        try:
            compile(words[1], "shown", "exec")
        except SyntaxError as error:
            return str(error)
        return ""
    if words[:1] == ("-m",):
        name, words = words[1], words[2:]
        if name == "venv":
            return ""
        module = find_spec(name)
        if module is None or module.origin is None:
            return f"there is no module {name}"
        return _script(Path(module.origin), words)
    if not words or not words[0].startswith(("bench/", "tests/", "site/")):
        return ""  # a file that the page has the reader write: test_docs.py looks at those
    path = ROOT / words[0]
    return _script(path, words[1:]) if path.is_file() else f"there is no {words[0]}"


def _script(path: Path, words: tuple[str, ...]) -> str:
    """Against the options that its parser is told of, and those of what it imports beside it."""
    options = script_options(path)
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options:
            return f"{path.name} has no {name}"
    return ""


def scripts() -> list[Path]:
    """What pages tell to start with python."""
    modules = ("shared/diloco_shared/process/keep_hub", "simulator/diloco_simulator/check")
    return [*(ROOT / "bench").rglob("*.py"), *(ROOT / f"{name}.py" for name in modules)]


@cache
def script_options(path: Path) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            found.update(a.value for a in node.args if isinstance(a, ast.Constant))
        elif isinstance(node, ast.ImportFrom) and node.module:
            beside = path.with_name(f"{node.module}.py")
            found |= script_options(beside) if beside.is_file() else set()
    return frozenset(found)


def _pip(typed: Typed, whole: bool) -> str:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for word in typed.words[1:]:
        wanted = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if wanted and (wrong := {*wanted[1].split(",")} - extras.keys()):
            return f"there is no extra {', '.join(wrong)}"
        if word.endswith(".txt") and not (ROOT / word).is_file():
            return f"there is no {word}"
    return ""


def _pytest(typed: Typed, whole: bool) -> str:
    missing = [word for word in typed.words[1:] if "/" in word and not (ROOT / word).exists()]
    return f"there is no {missing[0]}" if missing else ""


# --------------------------------------------------------------------------------------------------
# docker, kubectl, systemctl: the files, services, images and units of this repository.

# Pods that pages have the reader make: to fill volumes (backup.md, kubernetes.md), and to ask in
# (doctor.md).
_MADE = ("store", "corpora", "doctor")
_COMPOSE_VALUES = {"-f", "--scale", "-e", "-v", "--entrypoint", "--profile", "-p"}


def _docker(typed: Typed, whole: bool) -> str:
    words = list(typed.words[1:])
    if words[:1] == ["compose"]:
        return _compose(words[1:], whole)
    if words[:2] == ["buildx", "build"] and "-f" in words:
        return _dockerfile(words)
    return ""


def _compose(words: list[str], whole: bool) -> str:
    files, services, at = list[str](), dict[str, Any](), 0
    while words[at : at + 1] in (["-f"], ["--env-file"], ["-p"]):
        files += words[at + 1 : at + 2] if words[at] == "-f" else []
        at += 2
    for file in files or [".env"]:
        if not (ROOT / file).is_file():
            return f"there is no {file}"
    for file in files or re.findall(r"compose/\w+\.yaml", (ROOT / ".env").read_text("utf-8")):
        services |= yaml.safe_load((ROOT / file).read_text("utf-8"))["services"]
    named, entry = list[str](), ""
    verb, words = words[at] if words[at:] else "", words[at + 1 :]
    while words:
        word = words.pop(0)
        if word in _COMPOSE_VALUES and words:
            value = words.pop(0)
            entry = value if word == "--entrypoint" else entry
            if word == "--scale" and value.partition("=")[0] not in services:
                return f"there is no service {value.partition('=')[0]}"
        elif not word.startswith("-"):
            named.append(word)
            if verb in ("run", "exec"):
                break
    wrong = [name for name in named if name not in services]
    if wrong:
        return f"there is no service {wrong[0]}"
    if verb == "run" and (entry == "diloco" or (not entry and named == ["operator"])) and words:
        return diloco(Typed(("diloco", *words)), whole)
    return ""


def _dockerfile(words: list[str]) -> str:
    path = ROOT / words[words.index("-f") + 1]
    if not path.is_file():
        return f"there is no {path.relative_to(ROOT)}"
    known = set(re.findall(r"^ARG (\w+)", path.read_text("utf-8"), re.MULTILINE))
    given = {words[i + 1].partition("=")[0] for i, w in enumerate(words) if w == "--build-arg"}
    return f"{path.name} has no argument {', '.join(given - known)}" if given - known else ""


# The site's names get this beginning, as docs/how-to/kubernetes.md says.
_SITE = "frankfurt-"


@cache
def _in_kubernetes() -> dict[str, set[str]]:
    """Names by kind, of what `deploy/kubernetes` makes, and of what that makes in its turn."""
    found: dict[str, set[str]] = {kind: set() for kind in ("pod", "pvc", "namespace")}
    for document in (*rendered("hub"), *rendered("site")):
        kind, name = document["kind"].lower(), document["metadata"]["name"]
        if kind == "job":
            name = f"{_SITE}{name}"
        found.setdefault(kind, set()).add(name)
        found["namespace"].add(document["metadata"].get("namespace", name))
        for number in range(document["spec"].get("replicas", 0) if kind == "statefulset" else 0):
            found["pod"].add(f"{name}-{number}")
            claims = document["spec"].get("volumeClaimTemplates", ())
            found["pvc"].update(f"{c['metadata']['name']}-{name}-{number}" for c in claims)
        # Secrets are made by the reader, under the names that pods read.
        for volume in (pod_of(document) or {}).get("volumes", ()):
            sources = [volume, *volume.get("projected", {}).get("sources", ())]
            secrets = (s["secret"] for s in sources if "secret" in s)
            found.setdefault("secret", set()).update(
                s.get("name") or s["secretName"] for s in secrets
            )
    return found


def _kubectl(typed: Typed, whole: bool) -> str:
    """Files that it applies, and the names of what it is told to look at or to change."""
    words = [word for word in typed.words if not word.startswith("--from-file")]
    for i, word in enumerate(words[:-1]):
        if word == "-k" and not (ROOT / words[i + 1] / "kustomization.yaml").is_file():
            return f"there is no {words[i + 1]}"
    known = _in_kubernetes()
    pairs = [(kind, name) for word in words for kind, _, name in [word.partition("/")] if name]
    pairs += [(a.lstrip("-"), b) for a, b in itertools.pairwise(words)]
    pairs += [("pod", b) for a, b in itertools.pairwise(words) if a in ("exec", "logs")]
    pairs += [("secret", words[i + 2]) for i, w in enumerate(words[:-2]) if w == "secret"]
    for kind, name in pairs:
        options = name.startswith("-") or name == "generic" or "/" in name or name in _MADE
        if kind in known and not options and not is_placeholder(name) and name not in known[kind]:
            return f"deploy/kubernetes has no {kind} {name}"
    return ""


def _systemctl(typed: Typed, whole: bool) -> str:
    units = [word for word in typed.words[1:] if word.startswith("diloco")]
    for unit in units:
        name = re.sub(r"@.*", "@", unit)
        if not (ROOT / "deploy" / "systemd" / f"{name}.service").is_file():
            return f"there is no unit {name}"
    return ""


_JUDGES: dict[str, Callable[[Typed, bool], str]] = {
    "diloco": diloco,
    "diloco-learner": service,
    "diloco-syncer": service,
    "diloco-coordinator": service,
    "operator": operator,
    "export": export,
    "make": _make,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "pytest": _pytest,
    "docker": _docker,
    "kubectl": _kubectl,
    "systemctl": _systemctl,
}


def fault_of(typed: Typed, *, whole: bool) -> str:
    """Why it would not be taken, or "". `whole`: nothing may be missing either."""
    judge = _JUDGES.get(typed.program)
    if judge is None and typed.program.startswith("diloco"):
        return f"there is no program {typed.program}"
    return judge(typed, whole) if judge else ""
