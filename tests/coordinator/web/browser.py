"""A browser as small as can be (dom.js), for tests of the page's own script."""

import json
import re
from copy import deepcopy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import diloco_coordinator

# Elsewhere it has no wheels.
quickjs = pytest.importorskip("quickjs")

WEB = Path(diloco_coordinator.__file__).parent / "web"
RECORDED = Path(__file__).parents[2] / "cli" / "screens" / "answers.json"
# Each after those that it imports.
MODULES = ("api", "dom", "chart", "plan", "sample", "views", "main")
VIEWER = {"scopes": ["read"], "runs": [], "sites": [], "chaos": True, "name": "v"}
VOID = {"meta", "link", "input"}


class Tree(HTMLParser):
    """A page as [tag, attributes, children]."""

    def __init__(self) -> None:
        super().__init__()
        self.root: list[Any] = ["page", {}, []]
        self.path = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node: list[Any] = [tag, {name: value or "" for name, value in attrs}, []]
        self.path[-1][2].append(node)
        if tag not in VOID:
            self.path.append(node)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.path.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.path[-1][2].append(data)


def script(name: str) -> str:
    """A module as an object of its exports: the engine is given one text."""
    text = (WEB / f"{name}.js").read_text("utf-8")
    exported = re.findall(r"^export (?:async )?(?:function|const|class) ([\w$]+)", text, re.M)
    text = re.sub(
        r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', r"const \1 = modules.\2;", text, flags=re.M
    )
    text = re.sub(r"^export ", "", text, flags=re.M)
    return f"(() => {{\n{text}\nmodules.{name} = {{ {', '.join(exported)} }};\n}})();"


class Page:
    """One tab. `answers`: what the coordinator says, by "METHOD path"; with (status, body) it may
    refuse."""

    def __init__(self, answers: dict[str, Any], address: str = "#token=t") -> None:
        tree = Tree()
        tree.feed((WEB / "index.html").read_text("utf-8"))
        self.engine = quickjs.Context()
        self.engine.set_memory_limit(256 << 20)
        self.engine.set_time_limit(60)
        self.answers = answers
        shims = (Path(__file__).parent / "dom.js").read_text("utf-8")
        self.engine.eval(
            f"const PAGE = {json.dumps(tree.root)}, HASH = {json.dumps(address)}, modules = {{}};"
            f"{shims}\n{self._server()}" + "\n".join(script(name) for name in MODULES)
        )
        self._settle()

    def _server(self) -> str:
        told = {
            place: body if isinstance(body, tuple) else (200, body)
            for place, body in self.answers.items()
        }
        return f"server.answers = {json.dumps(told)};"

    def _settle(self) -> None:
        while self.engine.execute_pending_job():
            pass

    def do(self, code: str) -> None:
        """As a person does it."""
        self.engine.eval(f"{{ {code} }}")
        self._settle()

    def ask(self, code: str) -> Any:
        return json.loads(self.engine.eval(f"JSON.stringify({code})"))

    def second(self) -> None:
        """The next look; one that died would never look again."""
        assert self.ask("due !== null"), "the page has stopped looking"
        self.do(f"{self._server()} const act = due; due = null; act()")

    def texts(self) -> list[str]:
        return list(self.ask("texts()"))

    def asked(self, method: str) -> list[dict[str, Any]]:
        return [a for a in self.ask("server.asked") if a["method"] == method]


def losses(page: Page) -> list[list[str]]:
    """Of the table below the chart: steps and loss, newest first."""
    table = 'lines(id("values").querySelector("tbody"))'
    return [row[:2] for row in page.ask(table)]


def evaluation(seq: int, **data: Any) -> dict[str, Any]:
    told = {"at": 1.7e9, "source": "learner-9", "text": f"told as {seq}", "kind": "evaluation"}
    return told | {"seq": seq, "run": "break", "data": data}


def again(answers: dict[str, Any], run: str) -> dict[str, Any]:
    """The same cluster after the run was deleted and submitted again under its name."""
    told = deepcopy(answers)
    for view in (told["GET /v1/runs"]["runs"][0], told[f"GET /v1/runs/{run}"]):
        view["created_at"] += 1000
    status = told[f"GET /v1/runs/{run}"]["status"]
    status["stamp"]["round"] = 1
    status |= {"rounds_committed": 2, "rounds_skipped": 0}
    rounds = told[f"GET /v1/runs/{run}/rounds"]["rounds"][:2]
    for n, record in enumerate(rounds):
        record |= {"round": n, "seq": n + 1}
    told[f"GET /v1/runs/{run}/rounds"]["rounds"] = rounds
    newest = told["GET /v1/events"]["events"][-1]["seq"]
    told["GET /v1/events"]["events"] = [evaluation(newest + 1, steps=12, val_loss=5.0)]
    return told
