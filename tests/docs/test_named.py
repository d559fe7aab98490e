"""What pages name besides commands is there: settings, options, files, metrics and requests."""

import functools
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
import typing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from deploy.test_observability import exported
from docs.others import script_options, scripts
from docs.ours import COMMANDS, diloco, of_commands_and_services, of_compose, path_of
from docs.shell import Typed, commands
from docs.shown import PAGES, ROOT, codes, is_placeholder, paragraphs, shown
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from structure import modules

from diloco_cli.hub_files import ITS_OWN
from diloco_shared.protocol import subjects
from diloco_shared.spec.run import RunSpec

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@every_page
def test_every_variable_is_one_that_somebody_reads(page: Path) -> None:
    named = set(re.findall(r"\bDILOCO_[A-Z_0-9]*[A-Z0-9]\b(?!_)", page.read_text("utf-8")))
    assert named <= of_commands_and_services() | of_compose()


# Of a run, by the part of its file: `keeping.replicas`, with or without a value.
_SETTING = re.compile(r"(\w+)\.([a-z]\w*)(?:\.\w+)*(?: = (.+))?")
# Other words with a dot: files, by their endings. Whether ours are there is asked below.
_FILES = re.compile(
    r"[\w.]+\.(?:bin|conf|env|html|jinja|json|jsonl(?:\.1)?|md|model|out|partial|pem|py|safetensors"
    r"|tar|toml|txt|yaml)"
)
# And what belongs to others, or to another part of the project.
_OTHER_WORDS = {
    *("Outer.nesterov", "status.tokens", "status.tokens_by_fragment", "speed.hosts"),
    *("hub.example.org", "nats.diloco.svc", "jax.lax.scan", "torch.compile"),
    *("net.ipv4.tcp_congestion_control = bbr", "resources.limits.memory"),
}


def not_of_a_run(code: str) -> str:
    """What is wrong with a setting as a page writes it; "" where nothing is, or it is none."""
    named = _SETTING.fullmatch(code)
    if named is None or _FILES.fullmatch(code) or code in _OTHER_WORDS or code in modules():
        return ""
    part = RunSpec.model_fields.get(named[1])
    if part is None:
        return f"{code}: a run has no {named[1]}"
    kinds = typing.get_args(part.annotation) or (part.annotation,)
    fields = [kind.model_fields.get(named[2]) for kind in kinds if hasattr(kind, "model_fields")]
    if not any(fields):
        return f"{code}: {named[1]} has no {named[2]}"
    return not_taken(code, fields) if named[3] and not is_placeholder(named[3]) else ""


def not_taken(code: str, fields: Sequence[FieldInfo | None]) -> str:
    """What is wrong with its value, by itself: one that fits other settings badly is not seen."""
    try:
        ((_, section),) = tomllib.loads(code).items()
        ((_, value),) = section.items()
    except ValueError as error:
        return f"{code}: {error}"
    for field in filter(None, fields):
        with suppress(ValidationError):
            TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
            return ""
    return f"{code}: no such value"


@every_page
def test_every_setting_of_a_run_is_one(page: Path) -> None:
    assert not [wrong for code in codes(page) if (wrong := not_of_a_run(code))]


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("keeping.replicas = 3", ""),
        ('model.weights = "checkpoint:…"', ""),
        ("run.toml", ""),
        ("keepin.replicas", "a run has no keepin"),
        ("keepin.replicas = 3", "a run has no keepin"),
        ("keeping.replica", "keeping has no replica"),
        ('keeping.replicas = "many"', "no such value"),
        ("keeping.replicas = 400", "no such value"),
        ("evaluation.beside_training = no", "Invalid value"),
    ],
)
def test_a_setting_that_is_none_is_found(code: str, wrong: str) -> None:
    assert wrong in not_of_a_run(code) and bool(wrong) == bool(not_of_a_run(code))


def test_no_other_word_is_known_that_no_page_writes() -> None:
    assert {code for page in PAGES for code in codes(page)} >= _OTHER_WORDS


@every_page
def test_every_metric_is_one_that_is_exported(page: Path) -> None:
    packages = tuple(p.name for p in ROOT.glob("*/diloco_*")) + tuple(
        p.name for p in ROOT.glob("services/*/diloco_*")
    )
    named = {m[1] for code in codes(page) if (m := re.match(r"(diloco_\w+)(?:\{|$)", code))}
    assert {name for name in named if name not in packages} <= exported().keys()


# --------------------------------------------------------------------------------------------------
# Files of the repository.

_FOLDERS = ("compose", "deploy", "bench", "services", "shared", "tests", "docs", "simulator", "cli")
_IN_A_COMMAND = re.compile(rf"(?<![\w/.~-])((?:{'|'.join(_FOLDERS)})/[\w./*@-]*[\w/*])")


@every_page
def test_every_file_of_the_repository_is_there(page: Path) -> None:
    """What a command names, and code that is a path; a star stands for any."""
    found = [path for text in shown(page) for path in _IN_A_COMMAND.findall(text.text)]
    found += [c for c in codes(page) if re.fullmatch(rf"(?:{'|'.join(_FOLDERS)})/[\w./*@-]+", c)]
    assert not [path for path in found if not any(ROOT.glob(path.rstrip("/")))]


@functools.cache
def names_of_modules() -> frozenset[str]:
    return frozenset(path.name for folder in _FOLDERS for path in (ROOT / folder).rglob("*.py"))


@every_page
def test_every_module_that_is_named_without_its_folder_is_there(page: Path) -> None:
    """`_io.py` is how names end; the reader writes `mymodel.py` (models.md)."""
    named = {code for code in codes(page) if re.fullmatch(r"\w+\.py", code)}
    assert named <= names_of_modules() | {"_io.py", "mymodel.py"}


# --------------------------------------------------------------------------------------------------
# Options that stand alone in a line: "`--finish` drops the old one".

# Of programs of others: Compose, Docker, the command of NATS, Slurm and kubectl.
_OF_OTHERS = {"--scale", "--env-file", "--build-arg", "--no-deps", "--no-recreate"}
_OF_OTHERS |= {"--tlscert", "--tlskey", "--mem", "--namespace"}


def verbs_named(page: Path) -> set[tuple[str, ...]]:
    typed = (t for text in shown(page) for t in text.typed())
    return {path_of(t.words) for t in typed if t.program in ("diloco", "operator")}


@every_page
def test_every_option_is_one_of_a_verb_or_script_that_the_page_names(page: Path) -> None:
    """Of a verb with the value that is shown; in bench/ and of what Compose starts, by name."""
    verbs, faults = verbs_named(page), []
    of_scripts = set().union(*map(script_options, scripts()))
    for code in codes(page):
        if not re.match(r"--[a-z]", code) or "/*" in code:
            continue
        words = shlex.split(code)
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        if options <= of_scripts | _OF_OTHERS:
            continue
        if all(diloco(Typed(("diloco", *verb, *words)), whole=False) for verb in verbs):
            faults.append(code)
    assert not faults


@every_page
def test_a_verb_with_an_option_is_taken_without_its_program_too(page: Path) -> None:
    """As in "`watch --json` prints one document per line"."""
    for code in codes(page):
        words = code.split()
        if words[0] in COMMANDS.commands and any(w.startswith("--") for w in words[1:]):
            typed = Typed(("diloco", *words))
            of_compose_up = {*words[1:]} <= {"-d", "--build"}
            assert of_compose_up or not diloco(typed, whole=False), code


# --------------------------------------------------------------------------------------------------
# Requests to the coordinator.

_REQUEST = re.compile(r"(GET|POST|PUT|PATCH|DELETE)(?: (/[^\s?]*)(?:\?(\S+))?)?")


@functools.cache
def described() -> dict[str, Any]:
    found = importlib.util.spec_from_file_location("reference", ROOT / "site" / "reference.py")
    assert found is not None and found.loader is not None
    reference = importlib.util.module_from_spec(found)
    found.loader.exec_module(reference)
    answer: dict[str, Any] = reference.openapi()
    return answer


def route_of(method: str, path: str) -> dict[str, Any] | None:
    """What OpenAPI says of a request to a path in which RUN stands for {run}."""
    for known, verbs in described()["paths"].items():
        parts, theirs = path.split("/"), known.split("/")
        if len(parts) == len(theirs) and all(
            a == b or (b.startswith("{") and is_placeholder(a))
            for a, b in zip(parts, theirs, strict=True)
        ):
            route: dict[str, Any] | None = verbs.get(method.lower())
            return route
    return None


def fields_of(route: dict[str, Any]) -> set[str]:
    """Of the body that a request may have."""
    found = set[str]()
    for content in route.get("requestBody", {}).get("content", {}).values():
        for option in content["schema"].get("anyOf", [content["schema"]]):
            name = option.get("$ref", "").rpartition("/")[2]
            schema = described()["components"]["schemas"][name] if name else option
            found |= schema.get("properties", {}).keys()
    return found


def requests(paragraph: str) -> Iterator[tuple[str, str, str]]:
    """Method, path and query. A method alone is of the next path, or else of the last one."""
    waiting, last = list[str](), ""
    for code in re.findall(r"`([^`]+)`", paragraph):
        named = _REQUEST.fullmatch(code)
        if named is None:
            continue
        if named[2]:
            last = named[2]
            yield from ((method, last, "") for method in (*waiting, named[1]))
            waiting = []
            if named[3]:
                yield named[1], last, named[3]
        elif last:
            yield named[1], last, ""
        else:
            waiting.append(named[1])


@every_page
def test_every_request_is_one_that_the_coordinator_answers(page: Path) -> None:
    for paragraph in paragraphs(page):
        bodies = set[str]()
        for method, path, query in requests(paragraph):
            route = route_of(method, path)
            assert route is not None, f"{method} {path}"
            asked = {p["name"] for p in route.get("parameters", ()) if p["in"] == "query"}
            assert {pair.partition("=")[0] for pair in query.split("&") if pair} <= asked
            bodies |= fields_of(route)
        if bodies:
            for code in re.findall(r"`(\{\"[^`]*\})`", paragraph):
                assert json.loads(code).keys() <= bodies, code


def asked_by_curl(typed: Typed) -> tuple[str, str, set[str]]:
    """Method, path and keys of the body of a request that a page has the reader type."""
    words = [*typed.words, ""]
    url = next(word for word in words if "://" in word)
    given = [words[i + 1] for i, word in enumerate(words) if word in ("-d", "--data", "--json")]
    method = [words[i + 1] for i, word in enumerate(words) if word in ("-X", "--request")]
    path = "/" + url.partition("://")[2].partition("?")[0].partition("/")[2]
    keys = json.loads(given[0]).keys() if given and given[0].startswith("{") else ()
    return (method or ["POST" if given else "GET"])[0], path, {*keys}


def wrongly_asked(typed: Typed) -> bool:
    method, path, keys = asked_by_curl(typed)
    route = route_of(method, path)
    return path.startswith("/v1") and (route is None or not keys <= fields_of(route))


@every_page
def test_every_request_that_is_typed_is_one(page: Path) -> None:
    typed = (t for text in shown(page) for t in text.typed() if t.program == "curl")
    assert not [" ".join(t.words) for t in typed if wrongly_asked(t)]


def test_a_request_that_nobody_answers_is_found() -> None:
    assert route_of("GET", "/v1/runs/RUN") and route_of("DELETE", "/v1/checkpoints/FOLDER/N")
    assert route_of("PUT", "/v1/runs/RUN") is None and route_of("GET", "/v1/run") is None
    restore = route_of("POST", "/v1/runs/RUN/checkpoints/N/restore")
    assert restore is not None and fields_of(restore) == {"as"}
    said = "`POST` and `GET /v1/runs`, `POST /v1/members/NAME/drain`, and `DELETE` undoes it"
    assert [*requests(said)] == [
        ("POST", "/v1/runs", ""),
        ("GET", "/v1/runs", ""),
        ("POST", "/v1/members/NAME/drain", ""),
        ("DELETE", "/v1/members/NAME/drain", ""),
    ]


def test_the_fields_of_a_sample_are_those_that_the_page_about_exports_names() -> None:
    text = (ROOT / "docs" / "how-to" / "export.md").read_text("utf-8")
    table = text.partition("| in the request |")[2].partition("\n\n")[0]
    named = {code for row in table.split("\n")[2:] for code in re.findall(r"^\|[^|]*\|", row)}
    fields = {field for cell in named for field in re.findall(r"`(\w+)`", cell)}
    route = route_of("POST", "/v1/runs/RUN/samples")
    assert route is not None and fields and fields <= fields_of(route)


def test_a_typed_request_that_nobody_answers_is_found() -> None:
    asked = 'curl -H "Authorization: Bearer $T" https://hub.example.org:8400/v1/'
    restored = "runs/RUN/checkpoints/N/restore -d"
    for rest in ("runs", f"""{restored} '{{"as": "NEW"}}'""", "members/NAME/drain -X DELETE"):
        assert not wrongly_asked(commands(asked + rest)[0])
    for rest in ("run", f"""{restored} '{{"name": "NEW"}}'""", "members/NAME/drain -X PUT"):
        assert wrongly_asked(commands(asked + rest)[0])


# --------------------------------------------------------------------------------------------------
# Ports of this machine.


@every_page
def test_every_port_of_this_machine_is_one_that_something_here_listens_to(page: Path) -> None:
    """4333 and 8333 stand for ports that the reader chose (three-nodes.md)."""
    named = re.findall(r"(?:127\.0\.0\.1|localhost):(\d+)", page.read_text("utf-8"))
    assert {*named} <= listened_to() | {"4333", "8333"}


@functools.cache
def listened_to() -> set[str]:
    """What containers give to this machine, and where a hub listens that `hub init` made."""
    found = {place.rpartition(":")[2] for place in ITS_OWN.values()}
    for path in sorted((ROOT / "compose").glob("*.yaml")):
        for service in yaml.safe_load(path.read_text("utf-8")).get("services", {}).values():
            for given in service.get("ports", ()):
                # "127.0.0.1:${PORT:-8400}:8400": what is left of the container's own.
                (port,) = re.findall(r"(\d+)\}?$", given.rpartition(":")[0])
                found.add(port)
    return found


def test_a_number_that_is_no_port_is_none() -> None:
    """Files for Compose name users, modes and limits of processes as well."""
    assert {"8400", "4222", "8222", "3000", "9090"} <= listened_to()
    assert not listened_to() & {"10001", "1024", "1777", "4096", "8401"}


# --------------------------------------------------------------------------------------------------
# What goes over the wire.

# What stands in a subject, by the parameter of the function that makes it.
_SAID = "run learner epoch term incarnation version donor newcomer nonce target shard syncer kind"
_PARTS = {"fragment": "<p>", "round_": "<n>"} | {name: f"<{name}>" for name in _SAID.split()}
_ON_THE_WIRE = ("ctl.", "up.", "dn.", "state.", "tape.", "ev.")


def subjects_of_messages() -> set[str]:
    """As a table writes them. A filter, which has a star, is no message's."""
    made = (
        function(*(_PARTS[name] for name in named))
        for function in vars(subjects).values()
        if inspect.isfunction(function)
        and _PARTS.keys() >= (named := inspect.signature(function).parameters).keys()
    )
    return {s for s in made if str(s).startswith(_ON_THE_WIRE) and "*" not in s}


def test_the_table_of_messages_has_every_subject_and_bucket() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    table = text.partition("| message | subject |")[2].partition("\n\n")[0]
    wanted = subjects_of_messages() | {*subjects.BUCKETS, *subjects.PRIVATE_BUCKETS}
    assert len(wanted) > 30
    assert wanted <= {*re.findall(r"`([^`]+)`", table)}
