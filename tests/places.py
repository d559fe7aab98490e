"""What deploy/ and compose/ say of each process: who runs, of which image, with which settings."""

import copy
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import BaseSettings

from diloco_coordinator.app import Settings as CoordinatorSettings
from diloco_learner.settings import Settings as LearnerSettings
from diloco_syncer.app import Settings as SyncerSettings

ROOT = Path(__file__).parent.parent
COMPOSE, DEPLOY = ROOT / "compose", ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
SETTINGS: dict[str, type[BaseSettings]] = {
    "coordinator": CoordinatorSettings,
    "syncer": SyncerSettings,
    "learner": LearnerSettings,
}
# Other people's variables that files here may set.
OF_BUCKETS = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL_S3",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_PROFILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
}
FOREIGN = {"SSL_CERT_FILE", "GOMEMLIMIT", "NUMBA_CACHE_DIR"} | OF_BUCKETS


def names_of(program: str) -> set[str]:
    """The variables that a program reads."""
    return {f"DILOCO_{field.upper()}" for field in SETTINGS[program].model_fields}


def understood(program: str, environment: dict[str, str], token: Path) -> BaseSettings:
    """The settings that a program makes of it; ValidationError if it refuses one.

    `token`: a file that is there, in place of the one that the environment names.
    """
    given = {
        name.removeprefix("DILOCO_").lower(): value
        for name, value in environment.items()
        if name in names_of(program)
    }
    if "nats_token_file" in given:
        given["nats_token_file"] = str(token)
    return SETTINGS[program].model_validate(given)


# --------------------------------------------------------------------------------------------------
# Kubernetes: what kustomize makes of the files here, as far as they use it. A test compares both.

_MERGED_BY = ("name", "mountPath")


def _merged(old: Any, new: Any) -> Any:
    """A strategic merge: mappings by key, lists of named things by name, all else replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {k: _merged(old[k], v) if k in old else v for k, v in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        key = next((k for k in _MERGED_BY if all(isinstance(x, dict) and k in x for x in new)), "")
        if not key or not all(isinstance(x, dict) and key in x for x in old):
            return new
        by_key = {x[key]: x for x in new}
        kept = [_merged(x, by_key.pop(x[key], {})) for x in old]
        return [*by_key.values(), *kept]
    return new


def documents(path: Path) -> list[dict[str, Any]]:
    """Of one file."""
    return [d for d in yaml.safe_load_all(path.read_text("utf-8")) if d]


def rendered(folder: str, within: Path = KUBERNETES) -> list[dict[str, Any]]:
    """Everything that a folder of deploy/kubernetes, or of a copy of it, describes."""
    return copy.deepcopy(_rendered((within / folder).resolve()))


@cache
def _rendered(folder: Path) -> list[dict[str, Any]]:
    (kustomization,) = documents(folder / "kustomization.yaml")
    known = {"apiVersion", "kind", "resources", "components", "patches", "images", "namespace"}
    assert kustomization.keys() <= known, "this renderer knows no more"
    found: list[dict[str, Any]] = []
    for resource in kustomization["resources"]:
        path = (folder / resource).resolve()
        found += copy.deepcopy(_rendered(path)) if path.is_dir() else documents(path)
    for component in kustomization.get("components", ()):
        place = (folder / component).resolve()
        (changes,) = documents(place / "kustomization.yaml")
        assert changes["kind"] == "Component" and changes.keys() <= known - {"resources"}
        _changed(found, place, changes)
    _changed(found, folder, kustomization)
    return found


def _changed(found: list[dict[str, Any]], folder: Path, kustomization: dict[str, Any]) -> None:
    """What a kustomization, or a component, makes of what there is."""
    for patch in kustomization.get("patches", ()):
        (change,) = documents(folder / patch["path"])
        hit = [i for i, d in enumerate(found) if _is_meant(d, change, "target" in patch)]
        assert hit, f"{folder}: {patch} changes nothing"
        for i in hit:
            name = found[i]["metadata"]["name"]
            found[i] = _merged(found[i], change)
            found[i]["metadata"]["name"] = name
    for container in (c for d in found for c in containers(d)):
        for image in kustomization.get("images", ()):
            if container["image"].partition(":")[0] == image["name"]:
                container["image"] = f"{image['newName']}:{image['newTag']}"
    if namespace := kustomization.get("namespace"):
        for document in found:
            if document["kind"] != "Namespace":
                document["metadata"]["namespace"] = namespace


def _is_meant(document: dict[str, Any], change: dict[str, Any], of_kind: bool) -> bool:
    same_name = document["metadata"]["name"] == change["metadata"]["name"]
    return document["kind"] == change["kind"] and (of_kind or same_name)


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    """The pod template's specification of a workload; None of anything else."""
    template = document.get("spec", {}).get("template")
    return None if template is None else template["spec"]


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a workload."""
    pod = pod_of(document)
    return [] if pod is None else pod["containers"]


def program_of(image: str) -> str:
    """`learner` of `registry.example.org/diloco-learner-cuda:0.2.0`."""
    name = image.rpartition("/")[2].partition(":")[0]
    return name.removeprefix("diloco-").removesuffix("-cuda")


def kubernetes_environment(
    container: dict[str, Any], configs: dict[str, dict[str, str]]
) -> dict[str, str]:
    """What a container is told; what Kubernetes fills in is a member's name."""
    told = dict[str, str]()
    for source in container.get("envFrom", ()):
        told |= configs[source["configMapRef"]["name"]]
    return told | {e["name"]: e.get("value", "a-name") for e in container.get("env", ())}


# --------------------------------------------------------------------------------------------------
# Compose: one file, with what it takes from services.yaml.

# What the variables that have no default are set to.
TOLD = {
    "DILOCO_CHECKPOINTS": "s3://x",
    "DILOCO_NATS_URL": "tls://hub.example.org",
    "HUB_FOLDER": "./hub",
    "SITE": "oslo",
    "LEARNERS": "oslo-1,oslo-2",
}
_FILLED = re.compile(r"\$\{(\w+)(?::?[-?]([^}]*))?\}")


def compose(name: str) -> dict[str, dict[str, Any]]:
    """The services of a file by name, variables filled with their defaults or TOLD."""
    common, found = _services("services.yaml"), _services(name)
    for service, said in found.items():
        if "extends" in said:
            assert said["extends"]["file"] == "services.yaml"
            found[service] = _extended(common[said["extends"]["service"]], said)
    return found


def _services(name: str) -> dict[str, dict[str, Any]]:
    text = _FILLED.sub(_default, (COMPOSE / name).read_text("utf-8"))
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def _default(found: re.Match[str]) -> str:
    return TOLD.get(found[1], found[2] or "")


def _extended(base: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    whole = base | {k: v for k, v in said.items() if k != "extends"}
    whole["environment"] = base.get("environment", {}) | said.get("environment", {})
    whole["volumes"] = [*base.get("volumes", ()), *said.get("volumes", ())]
    return whole


def images() -> dict[str, Path]:
    """The Dockerfile of each image that this repository builds."""
    services = _services("services.yaml").values()
    return {s["image"]: ROOT / s["build"]["dockerfile"] for s in services}


# --------------------------------------------------------------------------------------------------
# systemd, Slurm, SkyPilot: lines of NAME=VALUE.


def env_file(path: Path) -> dict[str, str]:
    """A file that systemd and a shell both read alike."""
    lines = path.read_text("utf-8").splitlines()
    said = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Z0-9_]+=[^\s'\"$`\\]*", line) for line in said), path
    return dict(line.split("=", 1) for line in said)  # type: ignore[misc]


def unit(path: Path) -> Iterator[tuple[str, str]]:
    """Keys and values of a unit of systemd, in order; a key may come again."""
    for line in path.read_text("utf-8").replace("\\\n", "").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            yield key, value


def unit_environment(path: Path) -> dict[str, str]:
    """What a unit tells its process, files that the repository has included."""
    told = dict[str, str]()
    for key, value in unit(path):
        if key == "EnvironmentFile":
            told |= env_file(DEPLOY / Path(value).name)
        if key == "Environment":
            told |= dict(pair.split("=", 1) for pair in value.split())  # type: ignore[misc]
        if key == "ExecStart":
            told |= dict(re.findall(r"\s([A-Z_]+)=(\S+)", value))
    return {name: value.replace("%i", "a-name") for name, value in told.items()}
