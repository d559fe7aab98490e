"""`diloco doctor`: what is made of measurements, and what a machine without a hub is told."""

import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.__main__ import main
from diloco_cli.doctor import connecting_io, judging, machine_io
from diloco_cli.doctor.connecting_io import Knocking
from diloco_cli.doctor.judging import CHECKS, NEEDS, Encrypted, Finding, blocked
from diloco_cli.doctor.trying import judged, tries, upload_subject
from diloco_cli.words import FAILED, INVALID
from diloco_learner.preflight.findings import CHECKS as OF_RUN
from diloco_learner.preflight.findings import Finding as OfRun
from diloco_shared.budget import Need, Term, known
from diloco_shared.bus.nats.access import Address
from diloco_shared.bus.nats.link import MAJORITY_LOST
from diloco_shared.bus.nats.probing import ClockSample, Rate
from diloco_shared.bus.nats.rights import Identity, Role, rights_of
from diloco_shared.protocol.subjects import ID_PATTERN
from diloco_shared.spec.run import RunSpec

DAY = 86400.0
SERVER = {"version": "2.15.1", "jetstream": True, "max_payload": 2 << 20}


def verdict(finding: Finding) -> tuple[str, str]:
    return finding.name, finding.verdict


# --------------------------------------------------------------------------------------------------
# Clocks and links.


def samples(offset: float, *ways: tuple[float, float]) -> list[ClockSample]:
    """A hub whose clock is `offset` seconds ahead; each way: seconds there, seconds back."""
    return [
        ClockSample(t, t + there + back, t + there + offset)
        for t, (there, back) in enumerate(ways, start=1000)
    ]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(0.0, "ok"), (1.9, "ok"), (-2.1, "warn"), (2.1, "warn"), (299.0, "warn"), (-301.0, "FAIL")],
)
def test_a_clock_that_is_off_is_told_with_its_side(offset: float, expected: str) -> None:
    finding = judging.clock(samples(offset, (0.01, 0.01)))
    assert verdict(finding) == ("clock", expected)
    assert finding.figures["offset_s"] == pytest.approx(offset)
    assert ("ahead of" if offset < 0 else "behind") in finding.text or offset == 0
    assert bool(finding.remedy) == (expected != "ok")


def test_the_quickest_answer_counts_and_what_a_link_may_have_done_is_no_fault() -> None:
    """A long way there alone looks like a clock behind, and the stated precision covers it."""
    finding = judging.clock(samples(0.0, (8.0, 0.0), (0.1, 0.1)))
    assert finding.figures["offset_s"] == pytest.approx(0.0)
    assert finding.figures["precision_s"] == pytest.approx(0.1)
    finding = judging.clock(samples(0.0, (8.0, 0.0)))
    assert abs(finding.figures["offset_s"]) <= finding.figures["precision_s"] + 1e-9
    assert finding.verdict == "ok"


@pytest.mark.parametrize(
    ("seconds", "connections", "expected"),
    [
        ((0.001, 0.002, 0.01), 1, ""),
        ((0.04, 0.05, 0.06), 1, "DILOCO_CONNECTIONS=4"),
        ((0.04, 0.05, 0.06), 4, ""),
        ((0.001, 0.001, 2.1), 4, "membership.lease_s"),
    ],
)
def test_a_long_or_a_full_link_is_told(
    seconds: Sequence[float], connections: int, expected: str
) -> None:
    finding = judging.round_trip(seconds, connections)
    assert finding.verdict == ("warn" if expected else "ok")
    assert expected in finding.remedy


def test_bandwidth_is_told_beside_what_a_run_sends() -> None:
    spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}})
    found = judging.bandwidth("up", Rate(1_000_000, 0.5, 1_900_000), 10, known(spec))
    assert verdict(found) == ("bandwidth up", "ok")
    assert found.figures["bytes_per_s"] == 2_000_000 and "2 MB/s" in found.text
    assert "a contribution of the run" in found.text
    assert judging.bandwidth("down", Rate(1000, 1.0, 1000), 10, None).verdict == "warn"
    assert judging.bandwidth("down", Rate(0, 0.0, 0), 10, None).verdict == "FAIL"


# --------------------------------------------------------------------------------------------------
# Certificates, and being let in.


@pytest.mark.parametrize(
    ("days", "own_days", "expected"),
    [(100, None, ""), (29, None, "the hub's certificate"), (100, 29, "this site's ends soon")],
)
def test_certificates_that_end_soon_are_warned_of(
    days: float, own_days: float | None, expected: str
) -> None:
    own = None if own_days is None else own_days * DAY
    finding = judging.encrypted(Encrypted("TLSv1.3", "us", days * DAY, own), 0.0)
    assert finding.verdict == ("warn" if expected else "ok")
    assert finding.figures["days_left"] == days
    assert expected in finding.remedy


def test_what_is_wrong_with_a_certificate_leads_to_what_helps() -> None:
    for code, text in ((10, "diloco hub renew"), (9, "clock"), (62, "name"), (64, "name")):
        assert text in judging.unbelieved("h", code, "x").remedy
    assert "DILOCO_NATS_CA" in judging.unbelieved("h", 19, "self-signed").remedy
    for words, demanded in (("tlsv13 alert certificate required", False), ("eof", True)):
        finding = judging.handshake_failed("h", words, demanded, own_certificate=False)
        assert "demands a certificate" in finding.text
        finding = judging.handshake_failed("h", words, demanded, own_certificate=True)
        assert "does not take" in finding.text
    assert "the handshake with h failed" in judging.handshake_failed("h", "eof", False, True).text


def test_who_is_let_in_how() -> None:
    assert judging.let_in("oslo", "", "").verdict == "ok"
    assert judging.let_in("", "", "a token").verdict == "warn"
    revoked = judging.let_in("oslo", "Authorization Violation", "")
    assert revoked.verdict == "FAIL" and "site list" in revoked.remedy
    assert "log of the message server" in judging.let_in("oslo", "maximum connections", "").remedy


@pytest.mark.parametrize(
    ("server", "others", "expected"),
    [
        ({}, {}, "ok"),
        ({}, {"1.0": ["a"], "": ["b"]}, "ok"),
        ({}, {"0.9": ["a"]}, "warn"),
        ({"version": "2.11.3"}, {}, "warn"),
        ({"version": "2.10.29"}, {}, "FAIL"),
        ({"version": "?"}, {}, "FAIL"),
        ({"jetstream": False}, {}, "FAIL"),
        ({"max_payload": 1 << 20}, {}, "warn"),
        ({"max_payload": 1 << 19}, {}, "FAIL"),
    ],
)
def test_versions(server: dict[str, Any], others: dict[str, list[str]], expected: str) -> None:
    finding = judging.versions("1.0", SERVER | server, others)
    assert verdict(finding) == ("versions", expected)
    assert bool(finding.remedy) == (expected != "ok")


# --------------------------------------------------------------------------------------------------
# Rights.


def outcomes(identity: Identity, me: str) -> list[bool]:
    """What a hub that keeps the table answers."""
    return [each.allowed_by(rights_of(identity)) for each in tries(me)]


@pytest.mark.parametrize("role", ["learner", "syncer", "coordinator", "supervisor", "reader"])
def test_the_role_is_seen_by_what_is_allowed(role: Role) -> None:
    identity = Identity("oslo", role, (), ("oslo-1", "oslo-2") if role == "learner" else ())
    me = "oslo-2" if role == "learner" else "oslo"
    outcome = judged("oslo", me, outcomes(identity, me))
    assert (outcome.role, outcome.finding.verdict) == (role, "ok")
    subject = upload_subject(role, me)
    assert not subject or rights_of(identity).may_publish(subject)


@pytest.mark.parametrize("role", ["learner", "syncer", "coordinator", "supervisor"])
def test_credentials_of_another_process_are_named(role: Role) -> None:
    identity = Identity("oslo", role, (), ("oslo-1",) if role == "learner" else ())
    outcome = judged("oslo", "rome", outcomes(identity, "rome"))
    assert (outcome.role, outcome.finding.verdict) == (None, "FAIL")
    assert "DILOCO_ID" in outcome.finding.remedy and "rome" in outcome.finding.text
    if role == "learner":
        assert "'diloco site learners oslo --add rome --hub FOLDER'" in outcome.finding.remedy


def test_every_single_right_too_many_or_too_few_is_found() -> None:
    identity = Identity("oslo", "learner", (), ("oslo",))
    right = outcomes(identity, "oslo")
    for wrong, each in enumerate(tries("oslo")):
        given = [not is_so if n == wrong else is_so for n, is_so in enumerate(right)]
        finding = judged("oslo", "oslo", given).finding
        assert finding.verdict == "FAIL", each
        assert each.subject in finding.text


def test_tries_have_no_effect() -> None:
    """No run can be called so: nothing that is published there is kept, or heard."""
    for each in tries("oslo"):
        if each.kind == "publish":
            assert not re.match(ID_PATTERN, each.subject.split(".")[1]) or "_doctor" in each.subject
            assert not each.subject.startswith(("$", "ev."))


# --------------------------------------------------------------------------------------------------
# The machine.


def test_room_is_compared_with_what_the_run_keeps() -> None:
    need = Need("learner", (Term("checkpoints", 100, "x"),), "keeping.checkpoints")
    assert judging.disk("d", 100, "", need).verdict == "ok"
    short = judging.disk("d", 99, "", need)
    assert short.verdict == "FAIL" and "keeping.checkpoints" in short.remedy
    assert judging.disk("d", 1 << 30, "", None).verdict == "warn"
    assert judging.disk("d", None, "", None).verdict == "FAIL"


def test_a_full_or_forbidden_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    assert machine_io.disk(tmp_path / "not" / "there", None).verdict in ("ok", "warn")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(machine_io.tempfile, "TemporaryFile", full)
    finding = machine_io.disk(tmp_path, None)
    assert finding.verdict == "FAIL" and "no space left on device" in finding.text


def test_devices_are_counted_and_a_hanging_driver_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert judging.devices(["a", "b", "a"], "").text == "2 x a, 1 x b"
    assert judging.devices([], "no driver").verdict == "FAIL"
    monkeypatch.setattr(machine_io, "_DEVICES", "import sys; sys.exit('it broke')")
    assert "it broke" in machine_io.devices().text
    monkeypatch.setattr(machine_io, "_DEVICES", "import time; time.sleep(60)")
    monkeypatch.setattr(machine_io, "DEVICES_S", 0.5)
    assert verdict(machine_io.devices()) == ("devices", "FAIL")
    monkeypatch.setattr(machine_io.importlib.util, "find_spec", lambda _: None)
    assert verdict(machine_io.devices()) == ("devices", "ok")


def test_the_release_is_the_one_that_members_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each member of this very release would be taken for one of another."""
    monkeypatch.setattr("diloco_shared.VERSION", "7.1")
    assert machine_io.release() == "7.1"
    assert judging.versions(machine_io.release(), SERVER, {"7.1": ["a"]}).verdict == "ok"


def test_a_run_is_checked_up_to_where_compiling_begins() -> None:
    made = (OfRun(name, ok=name != "corpus", text="t", remedy="r") for name in OF_RUN)
    found = list(machine_io.of_run(made))
    assert [f.name for f in found][-1] == "run: host memory"
    assert [f.name for f in found if f.verdict == "FAIL"] == ["run: corpus"]


NODES = ("a:4222", "b:4222", "c:4222")


@pytest.mark.parametrize(
    ("named", "closed", "several", "ails", "expected", "text"),
    [
        (NODES, {}, True, "", "ok", "3 of 3 let this machine in"),
        (NODES[:1], {}, False, "", "ok", "one message server"),
        (NODES, {"b:4222": "port: refused"}, True, "", "warn", "not b:4222 (port: refused)"),
        (NODES[:1], {}, True, "", "warn", "of several nodes one is named"),
        (NODES, {}, False, "", "FAIL", "a:4222 is a hub of its own"),
        (NODES, {}, True, MAJORITY_LOST, "FAIL", "lost its majority"),
    ],
)
def test_nodes_of_a_hub(
    named: Sequence[str],
    closed: dict[str, str],
    several: bool,
    ails: str,
    expected: str,
    text: str,
) -> None:
    finding = judging.nodes(named, closed, several, ails)
    assert verdict(finding) == ("nodes", expected) and text in finding.text
    assert bool(finding.remedy) == (expected != "ok")


def test_one_failure_is_told_once() -> None:
    assert set(CHECKS) >= {need for needs in NEEDS.values() for need in needs}
    finding = blocked("clock", {"credentials": "TLS"})
    assert finding is not None and finding.text.endswith("TLS")
    assert blocked("clock", {"disk": "disk"}) is None
    assert blocked("run: corpus", {"name": "name"}) is None


# --------------------------------------------------------------------------------------------------
# The command, without a hub.

Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Doctor:
    """Exit status and findings by name, as the environment given says."""
    monkeypatch.setattr(machine_io, "devices", lambda: judging.devices(None, ""))
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **environment: str) -> tuple[int, dict[str, Any]]:
        for name in [name for name in os.environ if name.startswith("DILOCO_")]:
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(f"DILOCO_{name}", value)
        monkeypatch.setattr("sys.argv", ["diloco", "doctor", "--json", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        found = json.loads(capsys.readouterr().out)
        assert found["ok"] == (ended.value.code == 0)
        return int(ended.value.code or 0), {each["name"]: each for each in found["checks"]}

    return run


def test_a_closed_port_is_told_and_what_rests_on_it_left_out(doctor: Doctor) -> None:
    status, found = doctor(NATS_URL="nats://127.0.0.1:9")
    assert status == FAILED
    assert found["port"]["verdict"] == "FAIL" and "refused" in found["port"]["text"]
    left_out = [name for name, each in found.items() if each["verdict"] == "skipped"]
    assert left_out == list(CHECKS[CHECKS.index("TLS") : CHECKS.index("disk")])
    assert found["disk"]["verdict"] in ("ok", "warn")


def test_a_name_that_nobody_knows(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = doctor(NATS_URL="tls://hub.invalid:4222")
    assert (status, found["name"]["verdict"], found["port"]["verdict"]) == (1, "FAIL", "skipped")
    waiting = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: waiting.wait(30) and [])
    monkeypatch.setattr(connecting_io, "RESOLVE_S", 0.2)
    _, found = doctor(NATS_URL="tls://hub.invalid:4222")
    waiting.set()
    assert "no answer within 0.2 s" in found["name"]["text"]


KEPT = "hosts' checkpoints"


def test_where_hosts_keep_their_checkpoints_is_tried(doctor: Doctor, tmp_path: Path) -> None:
    _, found = doctor(NATS_URL="nats://127.0.0.1:9")
    assert KEPT not in found, "of most learners there is no such place"
    (tmp_path / "shared").mkdir()
    (tmp_path / "file").touch()
    for place, expected, text in (
        (f"{tmp_path}/shared", "ok", f"free in {tmp_path}/shared"),
        (f"{tmp_path}/shared/not/yet", "warn", "is not there yet"),
        ("shared", "warn", "write its whole path"),
        (f"{tmp_path}/file", "FAIL", "cannot be written (not a directory)"),
        ("/proc/none", "FAIL", "cannot be written"),
        ("gs://bucket/folder", "warn", "nothing was tried there"),
        ("file:///shared", "FAIL", "write the path of a folder"),
        ("/s3/bucket", "FAIL", "takes for a bucket"),
    ):
        _, found = doctor(NATS_URL="nats://127.0.0.1:9", HOSTS_CHECKPOINTS=place)
        assert found[KEPT]["verdict"] == expected, found[KEPT]
        assert text in found[KEPT]["text"] + found[KEPT]["remedy"]
        assert bool(found[KEPT]["remedy"]) == (expected != "ok")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "shared"]
    assert not list((tmp_path / "shared").iterdir()), "nothing is left behind"


def test_room_for_what_hosts_keep_is_compared_with_the_run() -> None:
    need = Need("learner", (Term("checkpoints", 100, "x"),), "keeping.checkpoints")
    assert judging.hosts_place("/s", True, 100, "", need).verdict == "ok"
    short = judging.hosts_place("/s", True, 99, "", need)
    assert short.verdict == "FAIL" and "keeping.checkpoints" in short.remedy
    unknown = judging.hosts_place("/s", True, None, "", need)
    assert unknown.verdict == "ok" and "does not tell" in unknown.text


def test_a_file_system_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands = threading.Event()
    monkeypatch.setattr(machine_io, "PLACE_S", 0.1)
    monkeypatch.setattr(machine_io, "_tried", lambda folder: stands.wait(30) and (None, "late"))
    finding = machine_io.hosts_place(str(tmp_path), None)
    stands.set()
    assert verdict(finding) == (KEPT, "FAIL") and "not done within 0.1 s" in finding.text


@pytest.mark.whole
def test_a_run_is_looked_at_by_the_checks_of_diloco_check(doctor: Doctor, tmp_path: Path) -> None:
    """Another corpus than the run names is found before anything is trained."""
    (tmp_path / "text").mkdir()
    for n in range(40):
        (tmp_path / "text" / f"{n}.txt").write_text(f"file {n} is the {n}th of forty.\n" * 40)
    (tmp_path / "run.toml").write_text(
        'name = "r"\n[model]\npreset = "nano"\n[budget]\nsteps = 9\n[data]\nsource = "text"\n'
        f'digest = "{"0" * 32}"\n'
    )
    status, found = doctor("run.toml", CORPORA=str(tmp_path / "corpora"))
    failed = [name for name, each in found.items() if each["verdict"] == "FAIL"]
    assert (status, failed) == (FAILED, ["port", "run: corpus"])
    assert "has digest" in found["run: corpus"]["text"]
    assert found["disk"]["figures"]["needed_bytes"] > 0
    assert found["devices"]["verdict"] == found["run: host memory"]["verdict"] == "ok"
    assert "run: compile" not in found


def test_a_broken_file_of_a_run_is_refused_like_everywhere(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text('name = "r"\n')
    monkeypatch.setattr("sys.argv", ["diloco", "doctor", str(tmp_path / "run.toml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INVALID


def test_settings_that_no_service_would_take_are_told_without_what_they_hold(
    doctor: Doctor, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("geheim\ngeheim")
    for wrong in (
        {"NATS_TOKEN_FILE": str(tmp_path / "secret")},
        {"NATS_TOKEN_FILE": str(tmp_path / "none")},
        {"CONNECTIONS": "geheim"},
    ):
        status, found = doctor(**wrong)
        assert (status, found["settings"]["verdict"]) == (1, "FAIL")
        assert "geheim" not in json.dumps(found)
        assert found["disk"]["verdict"] == found["clock"]["verdict"] == "skipped"


def test_files_of_tls_and_credentials_that_cannot_be_used(doctor: Doctor, tmp_path: Path) -> None:
    with said(b'INFO {"server_id":"x","tls_required":true}\r\n') as port:
        url = f"nats://127.0.0.1:{port}"
        _, found = doctor(NATS_URL=url, NATS_CA=str(tmp_path / "none.pem"))
        assert "DILOCO_NATS_CA" in found["TLS"]["text"]
        assert found["credentials"]["verdict"] == "skipped"
    with said(b'INFO {"server_id":"x"}\r\n') as port:
        url = f"nats://127.0.0.1:{port}"
        _, found = doctor(NATS_URL=url, NATS_CREDENTIALS=str(tmp_path / "none"))
        assert "cannot be read" in found["credentials"]["text"]
        # Both: what rests on either is left out, and nothing is looked for in vain.
        files = {"NATS_CREDENTIALS": str(tmp_path / "none"), "NATS_CA": str(tmp_path / "none.pem")}
        _, found = doctor(NATS_URL=url.replace("nats:", "tls:"), **files)
        assert found["TLS"]["verdict"] == "FAIL" and found["nodes"]["verdict"] == "skipped"
    # However far one comes: nobody listens there any more.
    _, found = doctor(NATS_URL=url, NATS_CREDENTIALS=str(tmp_path / "none"))
    assert found["port"]["verdict"] == found["credentials"]["verdict"] == "FAIL"
    assert "cannot be read" in found["credentials"]["text"]
    assert found["rights"]["verdict"] == "skipped"


@contextmanager
def said(first: bytes) -> Iterator[int]:
    """A port where every connection hears `first`, and then nothing."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                kept.append(connection)
                with suppress(OSError):  # whoever has heard enough hangs up
                    connection.sendall(first)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
    for connection in kept:
        connection.close()


@pytest.mark.parametrize(
    ("first", "url", "name", "text"),
    [
        (b"", "nats", "port", "no message server"),
        (b"HTTP/1.1 400 Bad Request\r\n", "nats", "port", "HTTP/1.1"),
        (b"x" * 70_000, "nats", "port", "no message server"),
        (b"INFO {\r\n", "nats", "port", "no message server"),
        (b'INFO {"server_id":"x"}\r\n', "tls", "TLS", "offers none"),
        (b'INFO {"server_id":"x","tls_required":true}\r\n', "nats", "TLS", "handshake"),
        (b'INFO {"server_id":"x"}\r\n', "nats", "credentials", "no answer"),
        (b"INFO {\"server_id\":\"x\"}\r\n-ERR 'Authorization Violation'\r\n", "nats",
         "credentials", "does not let in"),
    ],
)  # fmt: skip
def test_whoever_else_answers_is_told_from_a_hub_and_waited_for_only_so_long(
    first: bytes, url: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting_io, "STEP_S", 0.5)
    with said(first) as port:
        knocking = Knocking(Address(f"{url}://127.0.0.1:{port}", token="geheim"))
        assert not knocking.steps()
    last = knocking.findings[-1]
    assert verdict(last) == (name, "FAIL")
    assert text in last.text
    assert "geheim" not in repr(knocking)


def test_a_reason_is_taken_from_tls_in_plain_words() -> None:
    error = ssl.SSLError(1, "[SSL] x")
    error.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert connecting_io._said(error) == "tlsv13 alert certificate required"


def test_a_gpu_that_jax_does_not_use_is_a_warning_with_what_to_do() -> None:
    found = judging.devices(["cpu"], "", ["0", "1"])
    assert (found.verdict, found.text) == (
        "warn",
        "1 x cpu; this machine has 2 GPUs, and JAX uses none",
    )
    assert found.remedy.startswith("install it with '.[gpu]'")
    assert judging.devices(["NVIDIA H100"], "", ["0"]).verdict == "ok"
    assert judging.devices(["cpu"], "").verdict == "ok"
