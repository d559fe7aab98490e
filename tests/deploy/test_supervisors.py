"""Slurm, systemd and SkyPilot: learners that come back under their ids, told what they know."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import (
    COMPOSE,
    DEPLOY,
    FOREIGN,
    OF_BUCKETS,
    ROOT,
    SETTINGS,
    env_file,
    names_of,
    understood,
    unit,
    unit_environment,
)
from waiting import wait_until

from diloco_learner.settings import STOP_S
from diloco_shared.hub.watch import LOOK_S
from diloco_shared.process.keep_hub import ENDS_S
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.stopping import CLOSES_S

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
# After which Slurm kills what it has told to stop, in seconds, unless a site says otherwise.
KILL_WAIT_S = 30
SBATCH = DEPLOY / "slurm" / "learner.sbatch"
PAGES = ("deploy", "kubernetes", "slurm", "systemd", "troubleshooting")
PROGRAM = re.compile(r"diloco-(\w+)@?\.service")


@pytest.mark.parametrize("service", SETTINGS)
def test_a_wrong_set_up_ends_a_process_with_the_status_that_says_so(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A supervisor may tell it from a fault that a new start may mend."""
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", "/nowhere/token")
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else a learner begins by starting itself over
    main = importlib.import_module(f"diloco_{service}.__main__").main
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert f"diloco-{service}: " in error and "/nowhere/token cannot be read" in error


@pytest.mark.parametrize("service", SETTINGS)
def test_a_data_folder_that_is_not_to_be_written_is_a_wrong_set_up(
    service: str, tmp_path: Path
) -> None:
    """As after root has put a backup back: Slurm's script would start it again for ever."""
    (tmp_path / "file").touch()  # below it nobody makes a folder, not even root
    data = tmp_path / "file" / "data"
    ended = started(service, DILOCO_DATA=str(data))
    assert ended.returncode == 2, ended.stderr
    assert f"DILOCO_DATA={data}: {tmp_path / 'file'}" in ended.stderr
    assert "cannot be written (not a directory): give the folder to the user" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("service", SETTINGS)
def test_a_data_folder_that_another_one_has_may_be_free_at_the_next_start(
    service: str, tmp_path: Path
) -> None:
    """As that of a learner whose node was cut off: its job was queued elsewhere, and failed."""
    held = DataFolder(tmp_path, "frankfurt-1")
    try:
        ended = started(service, DILOCO_DATA=str(tmp_path), DILOCO_ID="frankfurt-1")
    finally:
        held.release()
    assert ended.returncode == 1, ended.stderr
    assert f"frankfurt-1 is in use by process {os.getpid()}: stop it" in ended.stderr
    assert "Traceback" not in ended.stderr


def started(service: str, **given: str) -> "subprocess.CompletedProcess[str]":
    """A process that ends by itself, before it connects to anything."""
    given |= {"DILOCO_PORT": "0", "DILOCO_CACHE": "off"}
    command = [sys.executable, "-m", f"diloco_{service}"]
    return subprocess.run(
        command, env=os.environ | given, capture_output=True, text=True, timeout=300, check=False
    )


def test_no_file_or_page_names_a_setting_that_no_process_has() -> None:
    """Compose's own variables have no prefix; the command reads three."""
    known = {"DILOCO_BUILD_NETWORK", "DILOCO_URL", "DILOCO_TOKEN", "DILOCO_TOKEN_FILE"}
    known = known.union(*(names_of(program) for program in SETTINGS))
    pages = [ROOT / "docs/how-to" / f"{name}.md" for name in PAGES]
    files = [path for path in (*DEPLOY.rglob("*"), *COMPOSE.rglob("*.yaml")) if path.is_file()]
    assert len(files) > 25
    for path in (*files, *pages):
        named = set(re.findall(r"\bDILOCO_[A-Z_0-9]+\b", path.read_text("utf-8")))
        assert named <= known, f"{path.name}: {named - known}"


# --------------------------------------------------------------------------------------------------
# systemd.


def test_there_is_a_unit_for_every_process() -> None:
    found = {match[1] for u in UNITS if (match := PROGRAM.fullmatch(u.name))}
    assert found == {"nats", "coordinator", "syncer", "learner"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_its_process_with_settings_that_it_takes(path: Path, tmp_path: Path) -> None:
    program = PROGRAM.fullmatch(path.name)[1]  # type: ignore[index]
    environment, said = unit_environment(path), dict(unit(path))
    if program == "nats":
        assert environment.keys() <= FOREIGN
        # The store itself, which may be a disk of its own: the free room is looked at there.
        made = re.search(r"--store (\S+)", (ROOT / "docs/how-to/systemd.md").read_text("utf-8"))
        assert made and f"process.keep_hub {made[1]} /opt/diloco/bin/" in said["ExecStart"]
        assert said["StateDirectory"] == "diloco-nats"
        return
    first, *pairs, last = said["ExecStart"].split()
    assert (first, last) == ("/usr/bin/env", f"/opt/diloco/bin/diloco-{program}")
    assert all("=" in pair for pair in pairs)
    assert environment.keys() <= names_of(program) | FOREIGN
    settings: Any = understood(program, environment, tmp_path)
    assert settings.nats_token == "" and str(settings.data) == "/var/lib/diloco"
    assert settings.nats_url.startswith("tls://")
    assert settings.nats_ca and settings.id == (program if program == "coordinator" else "a-name")
    # The secret comes as a file that systemd hands over.
    handed = {v.partition(":")[0] for k, v in unit(path) if k == "LoadCredential"}
    secret = {k: v for k, v in environment.items() if k.endswith("_CREDENTIALS")}
    assert "DILOCO_NATS_CREDENTIALS" in secret
    assert {*secret.values()} == {f"${{CREDENTIALS_DIRECTORY}}/{name}" for name in handed}
    assert environment["NUMBA_CACHE_DIR"].startswith("/var/lib/diloco/"), "or it compiles each time"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_restarts_for_ever_and_may_do_little(path: Path) -> None:
    said = dict(unit(path))
    assert said["Restart"] == "always" and said["StartLimitIntervalSec"] == "0"
    stop_s = float(unit_environment(path).get("DILOCO_STOP_S", STOP_S))
    assert float(said["TimeoutStopSec"]) >= max(stop_s + 2 * CLOSES_S, ENDS_S + LOOK_S)
    assert said["User"] == said["Group"] == "diloco"
    assert said["NoNewPrivileges"] == "yes" and said["CapabilityBoundingSet"] == ""
    assert said["ProtectSystem"] == "strict"
    # gloo and NCCL, between hosts of a learner, look for their own addresses by it (getifaddrs).
    families = {"AF_INET", "AF_INET6", "AF_UNIX"}
    more = {"AF_NETLINK"} if "learner" in path.name else set()
    assert {*said["RestrictAddressFamilies"].split()} == families | more


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_says_nothing_that_an_older_systemd_drops(path: Path) -> None:
    """%d is of systemd 250, and Ubuntu 22.04 has 249: processes would be without credentials."""
    lines = [value for key, value in unit(path) if key not in ("Description", "Documentation")]
    assert not [line for line in lines if "%d" in line]


def test_a_learner_has_the_devices_of_its_machine() -> None:
    """Before systemd 253, ProtectClock= allows the clock alone, and GPUs are shut out."""
    (said,) = [dict(unit(path)) for path in UNITS if "learner" in path.name]
    assert said["PrivateDevices"] == "no" and said["CapabilityBoundingSet"] == ""
    assert not said.keys() & {"ProtectClock", "DevicePolicy", "DeviceAllow"}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_a_unit(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    units, programs = tmp_path / "etc/systemd/system", tmp_path / "opt/diloco/bin"
    units.mkdir(parents=True)
    programs.mkdir(parents=True)
    for name in ("sysinit", "basic", "shutdown", "network-online", "multi-user"):
        (units / f"{name}.target").write_text("[Unit]\nDescription=stands in\n")
    for name in ("python", "nats-server", "diloco-coordinator", "diloco-syncer", "diloco-learner"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    (tmp_path / "usr/bin").mkdir(parents=True)
    shutil.copy(programs / "python", tmp_path / "usr/bin/env")
    shutil.copy(path, units)
    instance = path.name.replace("@.", "@one.")
    done = subprocess.run(
        ["systemd-analyze", "verify", f"--root={tmp_path}", "--man=no", instance],
        capture_output=True,
        text=True,
        check=False,
    )
    if "--root" in done.stderr and done.returncode:
        pytest.skip("this systemd-analyze verifies no other root")
    # It only warns of what it does not know.
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------
# Slurm: the script with stand-ins for everything that it starts.

# Says under which id it runs, and ends as `status` says once it is told to stop, or at once.
LEARNER = """#!/bin/bash
credentials=$(cat "$DILOCO_NATS_CREDENTIALS")
trap 'echo stopped >> "$SAID"; exit 0' TERM
echo $$ > "$TASK"
echo "start $DILOCO_ID of $DILOCO_HOSTS $DILOCO_NATS_URL $credentials" >> "$SAID"
read -r status < "$STATUS" || true
if [ -n "$status" ]; then : > "$STATUS"; exit "$status"; fi
while true; do sleep 0.05; done
"""
# Who tells srun to stop has its step killed. A step is told to stop with scancel.
SRUN = """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
"$@" &
trap 'kill -KILL $! 2>/dev/null; echo killed >> "$SAID"; exit 137' TERM
wait $!
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> "$SAID"
[ ! -e "$STATE.away" ] || { rm "$STATE.away"; exit 1; }
kill -TERM "$(cat "$TASK")"
"""
# Its controller is away, or too busy to answer, as often as a line of the file says so.
AWAY = """#!/bin/bash
read -r away < "$CONTROLLER" || true
sed -i 1d "$CONTROLLER"
[ "$away" != busy ] || exec sleep 1000
[ "$away" != away ] || { echo "Unable to contact slurm controller" >&2; exit 1; }
"""
# Of an array's number it says how all of its tasks are.
SQUEUE = (
    AWAY
    + """
cat "$STATE"
[[ " $* " != *" ${SLURM_ARRAY_JOB_ID:-none} "* ]] || echo RUNNING
"""
)
SCONTROL = AWAY + 'echo "scontrol $*" >> "$SAID"\n'


class Job:
    """One life of the script, as number 2 of an array: the task that has the array's own number."""

    def __init__(self, folder: Path, asks_s: int = 60) -> None:
        programs = folder / "bin"
        programs.mkdir()
        stand_ins = {
            "diloco-learner": LEARNER,
            "srun": SRUN,
            "squeue": SQUEUE,
            "scancel": SCANCEL,
            "scontrol": SCONTROL,
        }
        for name, text in stand_ins.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.said, self.status, self.state = (folder / n for n in ("said", "status", "state"))
        self.state.write_text("RUNNING\n")
        self.controller = folder / "controller"
        self.controller.write_text("")
        for file, text in (
            (self.said, ""),
            (self.status, ""),
            (folder / "credentials", "secret\n"),
        ):
            file.write_text(text)
        script = SBATCH.read_text("utf-8")
        soon = {"AGAIN_S=10": 0, "ASKED_S=5": 0, "ANSWERS_S=10": 1, "ASKS_S=75": asks_s}
        for line, seconds in soon.items():
            assert f"\n{line}\n" in script
            script = script.replace(line, f"{line.partition('=')[0]}={seconds}")
        (folder / "script").write_text(script)
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SAID": str(self.said),
            "STATUS": str(self.status),
            "STATE": str(self.state),
            "CONTROLLER": str(self.controller),
            "TASK": str(folder / "task"),
            "SITE_ENVIRONMENT": str(DEPLOY / "site.env"),
            "DILOCO_NATS_CREDENTIALS": str(folder / "credentials"),
            "SITE": "frankfurt",
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "2",
            "SLURM_CPUS_PER_TASK": "8",
        }
        self.folder = folder
        self.process: subprocess.Popen[str] | None = None

    def start(self, **environment: str) -> "subprocess.Popen[str]":
        self.process = subprocess.Popen(
            ["bash", str(self.folder / "script")],
            env=self.environment | environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def cancel(self) -> None:
        """As Slurm does: it tells the script, and every task, once."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        os.kill(int((self.folder / "task").read_text()), signal.SIGTERM)

    def lines(self) -> list[str]:
        return self.said.read_text().splitlines()


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made = Job(tmp_path, *([request.param] if hasattr(request, "param") else []))
    yield made
    if made.process is not None and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
    if made.process is not None:
        made.process.communicate()


STARTED = "start frankfurt-2 of slurm tls://hub.example.org:4222 secret"


def test_at_its_time_limit_a_learner_saves_its_state_and_the_job_comes_back(job: Job) -> None:
    process = job.start()
    wait_until(lambda: job.lines() == [STARTED])
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    told = "scancel --signal=TERM 7_2"
    assert job.lines() == [STARTED, told, "stopped", "scontrol requeue 7_2"]
    job.said.write_text("")
    process.communicate()
    again = job.start()  # the same id, whatever node it is on
    wait_until(lambda: job.lines() == [STARTED])
    again.send_signal(signal.SIGUSR1)
    again.wait(timeout=60)


@pytest.mark.parametrize("line", ['    wait "$learner"', "  learner=$!", "  srun "])
def test_a_time_limit_that_comes_as_the_wait_begins_is_heard(line: str, job: Job) -> None:
    """Or as the learner starts. It trained on until Slurm killed it, and did not come back."""
    script = job.folder / "script"
    there = 'while [ ! -s "$SAID" ]; do sleep 0.05; done; '
    word = f"{'' if line == '  srun ' else there}kill -USR1 $$\n"
    assert script.read_text().count(f"\n{line}") == 1
    script.write_text(script.read_text().replace(f"\n{line}", f"\n{word}{line}"))
    assert job.start().wait(timeout=60) == 0
    first, *more, stopped, requeued = job.lines()
    # Before it is there, nobody is told; nor is it told again before it has had its time.
    told = [line for line in (first, *more) if line != STARTED]
    assert told and {*told} == {"scancel --signal=TERM 7_2"}
    assert (stopped, requeued) == ("stopped", "scontrol requeue 7_2")


def test_a_word_to_stop_that_told_nobody_is_repeated_soon(job: Job) -> None:
    process = job.start(DILOCO_STOP_S="900")
    wait_until(lambda: job.lines() == [STARTED])
    (job.folder / "state.away").touch()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == 0
    told = "scancel --signal=TERM 7_2"
    assert job.lines() == [STARTED, told, told, "stopped", "scontrol requeue 7_2"]


def test_a_job_without_an_array_comes_back_too(job: Job) -> None:
    job.status.write_text("0\n")
    process = job.start(SLURM_ARRAY_JOB_ID="", SLURM_ARRAY_TASK_ID="")
    assert process.wait(timeout=60) == 0
    assert job.lines() == [STARTED.replace("-2", "-1"), "scontrol requeue 7"]


def test_a_job_that_is_cancelled_does_not_come_back(job: Job) -> None:
    process = job.start()
    wait_until(lambda: job.lines() == [STARTED])
    job.state.write_text("CANCELLED\n")
    job.cancel()
    assert process.wait(timeout=60) == 0
    assert job.lines() == [STARTED, "stopped"]


def test_a_learner_that_slurm_stops_is_queued_again(job: Job) -> None:
    """Preempted: the step gets the signal, and the script none."""
    job.status.write_text("0\n")
    assert job.start().wait(timeout=60) == 0
    assert job.lines() == [STARTED, "scontrol requeue 7_2"]


@pytest.mark.parametrize("answers", ["away\n", "away\n" * 14, "busy\naway\nbusy\n"])
def test_a_controller_that_is_away_is_asked_again(answers: str, job: Job) -> None:
    """Its silence does not say that somebody has cancelled the job."""
    job.status.write_text("0\n")
    job.controller.write_text(answers)
    assert job.start().wait(timeout=60) == 0
    assert job.lines() == [STARTED, "scontrol requeue 7_2"]


def test_a_controller_that_is_away_when_a_job_is_to_come_back_is_told_again(job: Job) -> None:
    job.status.write_text("0\n")
    job.controller.write_text("here\naway\n")
    assert job.start().wait(timeout=60) == 0
    assert job.lines() == [STARTED, "scontrol requeue 7_2"]


@pytest.mark.parametrize("job", [3], indirect=True)
@pytest.mark.parametrize("answers", ["away\n" * 999, "here\n" + "away\n" * 999, "busy\n" * 99])
def test_a_job_that_cannot_come_back_fails_and_says_so(answers: str, job: Job) -> None:
    """Before its time limit: a busy controller takes as long as it likes for each answer."""
    job.status.write_text("0\n")
    job.controller.write_text(answers)
    process = job.start()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and job.lines() == [STARTED]
    assert "frankfurt-2 does not come back by itself, so submit it again" in error


def test_a_step_that_is_only_on_its_way_is_told_to_stop_once_it_is_there(job: Job) -> None:
    """The first word reaches nobody: it would train until Slurm kills it, and not come back."""
    srun = job.folder / "bin" / "srun"
    waits = 'while [ ! -e "$STATE.there" ]; do sleep 0.05; done\n'
    srun.write_text(SRUN.replace('"$@" &', f'echo srun >> "$SAID"\n{waits}"$@" &'))
    process = job.start(DILOCO_STOP_S="-4")  # so that it is told each second
    wait_until(lambda: job.lines() == ["srun"])
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(job.lines()) > 1)
    (job.folder / "state.there").touch()
    assert process.wait(timeout=60) == 0
    first, told, *_, requeued = job.lines()
    assert (first, told) == ("srun", "scancel --signal=TERM 7_2")
    assert requeued == "scontrol requeue 7_2" and "killed" not in job.lines()


def test_a_fault_starts_it_again_and_a_wrong_set_up_does_not(job: Job) -> None:
    job.status.write_text("1\n")
    process = job.start()
    wait_until(lambda: job.lines() == [STARTED, STARTED])
    job.cancel()
    _, error = process.communicate(timeout=60)
    assert "frankfurt-2 ended with status 1: it starts again in 0 s" in error
    job.said.write_text("")
    job.status.write_text("2\n")
    process = job.start()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2 and "frankfurt-2 is set up wrongly" in error
    assert job.lines() == [STARTED]


def test_a_site_without_a_name_is_told_how_to_give_it_one(job: Job) -> None:
    process = job.start(SITE="")
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and "name this site" in error and job.lines() == []


def test_keys_of_a_bucket_come_from_a_file_that_need_not_be_there(job: Job) -> None:
    """In the other tests there is no such file."""
    keys = job.folder / ".diloco" / "bucket.env"
    keys.parent.mkdir()
    keys.write_text("AWS_ACCESS_KEY_ID=known\n")
    learner = job.folder / "bin" / "diloco-learner"
    learner.write_text(LEARNER.replace('"start ', '"with $AWS_ACCESS_KEY_ID start '))
    process = job.start()
    wait_until(lambda: job.lines() == [f"with known {STARTED}"])
    job.cancel()
    process.wait(timeout=60)


def test_the_file_with_keys_names_what_compose_passes_on_too() -> None:
    text = (DEPLOY / "bucket.env").read_text("utf-8")
    named = set(re.findall(r"^#([A-Z_0-9]+)=", text, flags=re.MULTILINE))
    assert named and named < OF_BUCKETS
    assert env_file(DEPLOY / "bucket.env") == {}, "nobody's keys"
    for path in UNITS:
        files = [value for key, value in unit(path) if key == "EnvironmentFile"]
        assert ("-/etc/diloco/bucket.env" in files) == (path.name != "diloco-nats.service")


def test_the_script_tells_the_learner_settings_that_it_takes(tmp_path: Path) -> None:
    text = SBATCH.read_text("utf-8")
    told = set(re.findall(r"export (\w+)=", text)) | env_file(DEPLOY / "site.env").keys()
    assert told <= names_of("learner") | FOREIGN
    assert {"DILOCO_ID", "DILOCO_DATA", "DILOCO_NATS_CREDENTIALS", "DILOCO_NATS_CA"} <= told
    understood("learner", env_file(DEPLOY / "site.env"), tmp_path)
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert "requeue" in directives and directives["open-mode"] == "append"
    found = re.fullmatch(r"B:USR1@(\d+)", directives["signal"])
    stop_s = re.search(r"export DILOCO_STOP_S=.*:-(\d+)", text)
    assert found is not None and stop_s is not None
    (asks_s,) = re.findall(r"^ASKS_S=(\d+)$", text, flags=re.MULTILINE)
    longest_s = int(stop_s[1]) + int(asks_s)
    assert int(found[1]) > longest_s, "a busy controller takes a while, too"
    asking = re.findall(r"(?:scancel|squeue|scontrol) (?=-|requeue)", text)
    timed = re.findall(r'timeout "\$ANSWERS_S" (?:scancel|squeue|scontrol) ', text)
    assert len(asking) == len(timed) == 3, "each of them may hang"
    assert int(stop_s[1]) + 2 * CLOSES_S <= KILL_WAIT_S


# --------------------------------------------------------------------------------------------------
# SkyPilot.


def test_skypilot_starts_a_learner_with_settings_that_it_takes(tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot" / "learner.yaml").read_text("utf-8"))
    exported = re.findall(r"(\w+)=\"", task["run"])
    assert task["envs"].keys() | set(exported) <= names_of("learner") | FOREIGN
    assert task["envs"]["DILOCO_ID"] is None, "SkyPilot asks for it"
    settings: Any = understood("learner", task["envs"] | {"DILOCO_ID": "cloud-1"}, tmp_path)
    assert settings.nats_url.startswith("tls://") and str(settings.data_root) in task["file_mounts"]
    # What is secret is a file that is brought there.
    for name in ("DILOCO_NATS_CREDENTIALS", "DILOCO_NATS_CA"):
        where: Callable[[str], Any] = task["run"].split
        path = where(f'{name}="$HOME')[1].partition('"')[0]
        assert f"~{path}" in task["file_mounts"]
    assert task["resources"]["use_spot"] and "exec ~/diloco/bin/diloco-learner" in task["run"]
    assert "[learner,gpu]" in task["setup"]
