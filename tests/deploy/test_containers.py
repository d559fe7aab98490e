"""Images and Compose: lean, without rights, read-only, and told only what their process knows."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import (
    COMPOSE,
    FOREIGN,
    OF_BUCKETS,
    ROOT,
    SETTINGS,
    TOLD,
    compose,
    images,
    names_of,
    understood,
)

from diloco_learner.settings import STOP_S
from diloco_shared.bus.nats.hub_config import ACCOUNTS
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.watch import LOOK_S
from diloco_shared.process.keep_hub import ENDS_S
from diloco_shared.process.membership import DataFolder, FolderTaken
from diloco_shared.process.stopping import CLOSES_S

FILES = ("compose.yaml", "hub.yaml", "site.yaml")
OURS = [(file, name) for file in FILES for name in compose(file)]
ALL = [*OURS, *(("observability.yaml", name) for name in compose("observability.yaml"))]
USER = 10001
HEALTHY = {"condition": "service_healthy"}
TOKEN = "token"
OF_THE_CLI = {"DILOCO_URL", "DILOCO_TOKEN_FILE"}


def stages(dockerfile: Path) -> tuple[str, str]:
    """The lines that build, and those of what is left."""
    _, build, final = re.split(r"^FROM ", dockerfile.read_text("utf-8"), flags=re.MULTILINE)
    return build, final


@pytest.mark.parametrize("image", images())
def test_an_image_keeps_nothing_of_what_built_it(image: str) -> None:
    text = images()[image].read_text("utf-8")
    build, final = stages(images()[image])
    assert re.search(r"^ARG BASE=python:3\.\d+-slim-\w+$", text, re.MULTILINE), "a pinned base"
    assert build.startswith("${BASE} AS build\n") and final.startswith("${BASE}\n")
    assert "COPY --from=build" in final
    assert not re.search(r"\bpip\b|apt-get|\bcurl\b|\bCOPY (services|shared) ", final)
    if image != "diloco-nats":  # of which only the program is taken
        assert "pip uninstall" in build


@pytest.mark.parametrize("image", images())
def test_an_image_says_what_it_is_and_runs_as_nobody_in_particular(image: str) -> None:
    _, final = stages(images()[image])
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", final))
    assert labels == {"title", "description", "licenses", "version", "revision"}
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert f"ARG VERSION={version}\n" in final
    assert f"USER {USER}:{USER}\n" in final, "by number, or Kubernetes refuses it"
    assert f"useradd --uid {USER} --gid {USER}" in final
    after = final.partition(f"USER {USER}:{USER}\n")[2]
    assert "USER" not in after and "ENTRYPOINT [" in after and "VOLUME /data" in after
    # Whatever is written goes to the volume: numba's kernels would go beside the sources otherwise.
    if image != "diloco-nats":
        assert "DILOCO_DATA=/data" in final and "NUMBA_CACHE_DIR=/data/" in final


def requirements(*extras: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(COMPOSE / "requirements.py"), *extras],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\n")


def test_each_image_has_what_its_service_needs_and_the_coordinator_no_jax() -> None:
    for image in ("coordinator", "syncer", "learner"):
        build, _ = stages(images()[f"diloco-{image}"])
        extras = re.search(r'^ARG EXTRAS="(.+)"$', build, re.MULTILINE)
        wanted = re.search(r"requirements\.py (.+) > requirements\.txt", build)
        assert wanted is not None
        # The operator of a hub works in the coordinator's image.
        more = " hub" if image == "coordinator" else ""
        assert (extras[1] if extras else wanted[1]) == image + more
        assert "numpy" in requirements(image)
    assert not [
        r for r in requirements("coordinator", "hub") if re.match(r"jax|optax|orbax|grain", r)
    ]
    with_cuda = requirements("learner", "gpu")
    assert set(requirements("learner")) <= set(with_cuda)
    assert any(r.startswith("jax[cuda") for r in with_cuda)


@pytest.mark.parametrize(("file", "service"), ALL)
def test_no_service_has_rights_or_writes_where_it_should_not(file: str, service: str) -> None:
    said = compose(file)[service]
    assert said["read_only"] is True and said["cap_drop"] == ["ALL"]
    assert said["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"\d+[mg]", said["mem_limit"])
    assert said.get("privileged", False) is False and "cap_add" not in said


@pytest.mark.parametrize(("file", "service"), OURS)
def test_every_setting_is_one_of_its_process_and_is_taken(
    file: str, service: str, tmp_path: Path
) -> None:
    environment = compose(file)[service].get("environment", {})
    program = service.partition("-")[0]
    if service == "operator":
        assert environment.keys() <= OF_THE_CLI
        return
    if program not in SETTINGS:
        assert not environment
        return
    assert environment.keys() <= names_of(program) | FOREIGN
    (token := tmp_path / "token").write_text("s3cret\n")
    settings: Any = understood(program, environment, token)
    apart = file != "compose.yaml"
    assert settings.nats_token == ("" if apart else "s3cret")
    assert bool(settings.nats_credentials) == apart == (settings.nats_tls is not None)
    assert settings.chaos is False, "faults are inflicted only where somebody says so"


@pytest.mark.parametrize(("file", "service"), OURS)
def test_secrets_are_files_that_are_declared_and_mounted(file: str, service: str) -> None:
    said = compose(file)[service]
    text = (COMPOSE / file).read_text("utf-8")
    declared = yaml.safe_load(text).get("secrets", {})
    mounted = set(said.get("secrets", ()))
    assert mounted <= declared.keys()
    for value in said.get("environment", {}).values():
        if str(value).startswith("/run/secrets/"):
            assert Path(value).name in mounted, value
        if str(value).startswith("/site/"):
            assert any(v.endswith(":/site:ro") for v in said["volumes"])


def test_what_a_hub_s_containers_are_given_is_what_its_folder_has(tmp_path: Path) -> None:
    """Nobody but the message server and the operator sees the secrets of another."""
    hub_folder.create(
        tmp_path / "hub",
        listen="0.0.0.0:4222",
        store=Path("/data"),
        hosts=("hub.example.org", "nats"),
        mutual_tls=True,
    )
    given = yaml.safe_load((COMPOSE / "hub.yaml").read_text("utf-8"))["secrets"]
    files = {secret["file"].removeprefix("${HUB_FOLDER}/") for secret in given.values()}
    for file in files:
        assert (tmp_path / "hub" / file).is_file()
    of = {name: set(said.get("secrets", ())) for name, said in compose("hub.yaml").items()}
    for name in ("coordinator", "syncer-a", "syncer-b"):
        # Of a reader the coordinator makes use, to take weights out of runs.
        more = {"reader"} if name == "coordinator" else set()
        assert of[name] == {"authority.pem", name, f"{name}.pem"} | more
    whole = {n for n, s in compose("hub.yaml").items() if any(":/hub" in v for v in s["volumes"])}
    assert whole == {"nats", "operator"}
    reloads = [a for a in compose("hub.yaml")["nats"]["entrypoint"] if a.startswith("--reload=")]
    assert {Path(r.partition("=")[2]).name for r in reloads} == {ACCOUNTS, "hub.pem"}


def test_the_secret_of_one_machine_lies_in_a_volume_of_those_who_connect() -> None:
    """Made by the message server, and written by nobody else: `live/test_compose_server.py`."""
    has = {
        name: [v for v in said.get("volumes", ()) if v.startswith("secret:")]
        for name, said in compose("compose.yaml").items()
    }
    theirs = {name: ["secret:/secret:ro"] for name in SETTINGS}
    assert has == {"nats": ["secret:/secret"], **theirs, "submit": []}
    for name in SETTINGS:
        environment = compose("compose.yaml")[name]["environment"]
        assert environment["DILOCO_NATS_TOKEN_FILE"] == f"/secret/{TOKEN}"
        assert compose("compose.yaml")[name]["depends_on"]["nats"] == HEALTHY
    _, final = stages(images()["diloco-nats"])
    assert "install -d -o diloco -g diloco -m 700 /secret" in final
    assert "COPY compose/nats/with_secret.py /opt/hub/\n" in final


def test_the_image_of_the_message_server_has_all_that_its_keeper_imports(tmp_path: Path) -> None:
    """It has Python, and nothing of ours beside these files."""
    _, final = stages(images()["diloco-nats"])
    for file in re.findall(r"shared/(diloco_shared/\S+\.py)", final):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "shared" / file, tmp_path / file)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import diloco_shared.process.keep_hub"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize("file", FILES)
def test_what_is_kept_outlives_a_container_and_what_is_open_is_meant_to_be(file: str) -> None:
    text = yaml.safe_load((COMPOSE / file).read_text("utf-8"))
    for name, said in compose(file).items():
        kept = [v.split(":") for v in said.get("volumes", ())]
        if name.partition("-")[0] in (*SETTINGS, "nats"):
            assert next(v for v in kept if v[1] == "/data")[0] in text["volumes"]
        for volume in kept:
            assert volume[0][0] in "./" or volume[0] in text["volumes"] or "ro" in volume
        for port in said.get("ports", ()):
            to_others = not port.startswith("127.0.0.1:")
            assert to_others == (file == "hub.yaml" and name == "nats"), port


@pytest.mark.parametrize("file", FILES)
def test_a_process_that_is_told_to_stop_has_the_time_that_it_needs(file: str) -> None:
    for name, said in compose(file).items():
        if name.partition("-")[0] in (*SETTINGS, "nats"):
            assert said["init"] is True
            grace_s = float(said["stop_grace_period"].removesuffix("s"))
            stop_s = float((said.get("environment") or {}).get("DILOCO_STOP_S", STOP_S))
            assert grace_s >= max(stop_s + 2 * CLOSES_S, ENDS_S + LOOK_S)


def test_a_hub_has_no_learners_and_a_site_nothing_else() -> None:
    hub = {"nats", "coordinator", "syncer-a", "syncer-b", "operator"}
    assert compose("hub.yaml").keys() == hub
    assert compose("site.yaml").keys() == {"learner"}
    for file in ("hub.yaml", "site.yaml"):
        for name, said in compose(file).items():
            url = said.get("environment", {}).get("DILOCO_NATS_URL", "tls://")
            assert url.startswith("tls://"), f"{file} {name} speaks in the clear"


def test_keys_of_a_bucket_come_to_whoever_keeps_checkpoints() -> None:
    """What is not set stays so: an empty key would be one that the bucket refuses."""
    for file, names in (
        ("hub.yaml", ("coordinator", "syncer-a", "syncer-b")),
        ("site.yaml", ("learner",)),
    ):
        for name in names:
            said = compose(file)[name]
            passed = {k for k, v in said["environment"].items() if v is None}
            assert passed == OF_BUCKETS, f"{file} {name}"
            assert "/dev/null:/bucket-keys:ro" in said["volumes"], "BUCKET_FILE is not set"


def test_learners_on_gpus_are_built_with_cuda_and_are_the_same_otherwise() -> None:
    text = (COMPOSE / "gpu.yaml").read_text("utf-8")
    ((name, said),) = yaml.safe_load(text)["services"].items()
    assert name in compose("site.yaml")
    assert said.keys() == {"build", "image", "scale", "shm_size", "deploy"}
    assert said["scale"] == 1, "each would have all GPUs of the machine"
    assert said["image"] == "diloco-learner-cuda"
    extras = said["build"]["args"]["EXTRAS"]
    assert any(r.startswith("jax[cuda") for r in requirements(*extras.split()))
    assert 'ARG EXTRAS="learner"' in images()["diloco-learner"].read_text("utf-8")
    (device,) = said["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])


def shown(page: str) -> str:
    return (ROOT / "docs/how-to" / f"{page}.md").read_text("utf-8")


def test_the_stack_of_one_machine_is_one_project_however_it_is_started() -> None:
    """A name of its own would begin a second one, with empty volumes."""
    (name,) = re.findall(r"^COMPOSE_PROJECT_NAME=(\w+)$", (ROOT / ".env").read_text(), re.MULTILINE)
    texts = [path.read_text("utf-8") for path in (ROOT / "docs").rglob("*.md")]
    texts += [path.read_text("utf-8") for path in COMPOSE.glob("*.yaml")]
    told = [x for text in texts for x in re.findall(r"docker compose (.*)-f compose/compose", text)]
    assert len(told) >= 2 and {*told} == {f"-p {name} "}


def test_one_more_learner_of_a_site_takes_the_new_name_and_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    """Theirs is the list that was there before: it need not be read anew."""
    before = [DataFolder.claim(tmp_path, "learner", "", ("oslo-1", "oslo-2")) for _ in range(2)]
    after = DataFolder.claim(tmp_path, "learner", "", ("oslo-1", "oslo-2", "oslo-3"))
    assert {folder.member for folder in before} == {"oslo-1", "oslo-2"}
    assert after.member == "oslo-3"
    for folder in (*before, after):
        folder.release()
    more = re.findall(
        r"^docker compose -f compose/site\.yaml up (.*)$", shown("deploy"), re.MULTILINE
    )
    one_more = "-d --no-recreate --scale learner=3"
    assert more == ["--build -d --scale learner=2", one_more, one_more]


def test_learners_of_a_site_that_know_different_names_may_find_none_after_a_reboot(
    tmp_path: Path,
) -> None:
    """So the page has all of them made anew, one by one: whoever knows all names finds one."""
    old, new = ("oslo-1", "oslo-2"), ("oslo-1", "oslo-2", "oslo-3")
    for name in (*reversed(new), "oslo-1"):  # the first container was started again alone
        DataFolder(tmp_path, name).release()
    held = [DataFolder.claim(tmp_path, "learner", "", names) for names in (new, old)]
    assert [folder.member for folder in held] == ["oslo-1", "oslo-2"]
    with pytest.raises(FolderTaken, match="give all the same list"):
        DataFolder.claim(tmp_path, "learner", "", old)
    held.append(DataFolder.claim(tmp_path, "learner", "", new))
    assert held[-1].member == "oslo-3"
    for folder in held:
        folder.release()
    exchanged = r"^docker stop CONTAINER && docker rm CONTAINER\ndocker compose .* --no-recreate "
    assert re.search(exchanged, shown("deploy"), re.MULTILINE)


def test_no_page_scales_a_site_down_to_the_number_of_an_example() -> None:
    """Who types it as it stands takes learners away from a larger site."""
    scaled = re.findall(r"--scale learner=(\S+)", shown("upgrade"))
    assert {*scaled} == {"NUMBER", "1`,"}, "one where all GPUs are one learner's"


def test_what_is_started_beside_a_hub_that_runs_leaves_the_hub_alone() -> None:
    """In the foreground Ctrl-C would end all of it, and --build would make all of it anew."""
    texts = [shown("deploy"), (COMPOSE / "observability.yaml").read_text("utf-8")]
    for text in texts:
        beside = re.findall(r"docker compose (.*) -f compose/observability\.yaml (.*)", text)
        assert len(beside) == 2
        assert {rest for _, rest in beside} == {"up -d prometheus grafana"}
        assert sum("--env-file " in files for files, _ in beside) == 1, "the hub's"


def test_runs_read_nothing_in_a_container_that_is_told_of_no_data_root() -> None:
    """As the page says: it works in the root of the file system."""
    for path in images().values():
        _, final = stages(path)
        assert not re.search(r"^WORKDIR", final, re.MULTILINE)
    assert "In a container the working directory is `/`" in shown("deploy")


def test_what_holds_tokens_is_copied_for_nobody_else_to_read() -> None:
    lines = [x for x in shown("backup").splitlines() if re.search(r"-cf - \. > \w+\.tar", x)]
    assert len(lines) == 2 and all(x.startswith("(umask 077; ") for x in lines)


@pytest.mark.parametrize(
    "files",
    [
        *((f,) for f in FILES),
        ("compose.yaml", "observability.yaml"),
        ("site.yaml", "gpu.yaml"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("command", ["docker-compose", "docker compose"])
def test_compose_takes_the_files(files: tuple[str, ...], command: str) -> None:
    """Of either series: 1 is a command of its own, 2 came as a part of `docker`."""
    words = command.split()
    if shutil.which(words[0]) is None:
        pytest.skip(f"'{command}' is not installed")
    asked = subprocess.run([*words, "version"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"'{command}' is not installed")
    named = [part for file in files for part in ("-f", str(COMPOSE / file))]
    done = subprocess.run(
        [*words, *named, "config"],
        cwd=ROOT,
        env={**os.environ, **TOLD, "COMPOSE_PROFILES": "operator"},  # series 2 hides it without
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert all("image" in s and s["read_only"] for s in services.values())
    ours = [f for f in files if f in FILES]
    assert services.keys() >= {name for file in ours for name in compose(file)}
    if "gpu.yaml" in files:
        learner = services["learner"]
        assert learner["image"] == "diloco-learner-cuda" and learner["build"]["args"]["EXTRAS"]
        (device,) = learner["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]
    if "hub.yaml" in files or "site.yaml" in files:
        told = {
            s["environment"]["DILOCO_CHECKPOINTS"] for n, s in services.items() if n in SETTINGS
        }
        assert told == {TOLD["DILOCO_CHECKPOINTS"]}
