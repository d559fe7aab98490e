"""deploy/kubernetes: sound by Kubernetes' own schemas, and in keeping with the code."""

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pages import DOCS, blocks
from places import (
    FOREIGN,
    KUBERNETES,
    ROOT,
    compose,
    containers,
    images,
    kubernetes_environment,
    names_of,
    pod_of,
    program_of,
    rendered,
    understood,
)

from diloco_learner.settings import STOP_S
from diloco_shared.bus.nats.hub_config import ACCOUNTS, HANDSHAKE_S, hub_conf
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nodes import nodes_at
from diloco_shared.hub.watch import LOOK_S, READING_S_MAX, UNANSWERED_S
from diloco_shared.process.health import Health, HealthServer
from diloco_shared.process.keep_hub import ENDS_S
from diloco_shared.process.stopping import CLOSES_S

PLACES = ("hub", "site", "site-gpu")
# The oldest whose Jobs wait for the last pod to be gone (podReplacementPolicy), and one of today.
VERSIONS = ("1.29", "1.37")
USER = 10001
# Of Kubernetes: all annotations of an object together, and all that a secret holds.
ANNOTATIONS_BYTES_MAX, SECRET_BYTES_MAX = 256 << 10, 1 << 20
# Where nodes of a hub meet, unless they were given another port.
ROUTES = nodes_at(["a", "b", "c"])[0].routes_port


@pytest.fixture(scope="module")
def validator() -> ModuleType:
    return pytest.importorskip(
        "kubernetes_validate",
        reason="the package kubernetes-validate, which has the schemas, is not installed",
        exc_type=ImportError,
    )


def workloads(place: str) -> list[dict[str, Any]]:
    return [d for d in rendered(place) if containers(d)]


def configs(place: str) -> dict[str, dict[str, str]]:
    return {d["metadata"]["name"]: d["data"] for d in rendered(place) if d["kind"] == "ConfigMap"}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:kubernetes_validate.*")
def test_every_document_is_sound(place: str, version: str, validator: ModuleType) -> None:
    for document in rendered(place):
        validator.validate(document, version, strict=True)


@pytest.mark.parametrize("page", ["kubernetes", "backup"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:kubernetes_validate.*")
def test_every_document_that_a_page_shows_is_sound(page: str, validator: ModuleType) -> None:
    shown = [b for b in blocks(DOCS / "how-to" / f"{page}.md") if b.language == "yaml"]
    documents = [d for b in shown for d in yaml.safe_load_all(b.body) if "kind" in d]
    assert documents
    for document in documents:
        assert document["metadata"]["namespace"] == "diloco"
        for version in VERSIONS:
            validator.validate(document, version, strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:kubernetes_validate.*")
def test_a_misspelled_field_would_be_seen(validator: ModuleType) -> None:
    document = workloads("hub")[0]
    document["spec"]["replica"] = 2
    with pytest.raises(validator.ValidationError):
        validator.validate(document, VERSIONS[-1], strict=True)


def plain(value: Any) -> Any:
    """Lists of named things in one order: kustomize puts what it adds elsewhere."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return sorted((plain(v) for v in value), key=lambda v: yaml.safe_dump(v))
    return value


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """What kustomize itself makes of a folder."""
    for command in (["kustomize", "build"], ["kubectl", "kustomize"]):
        if shutil.which(command[0]):
            break
    else:
        pytest.skip("neither kustomize nor kubectl is installed")
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=True)
    return [d for d in yaml.safe_load_all(done.stdout) if d]


def rendered_in(folder: Path) -> list[dict[str, Any]]:
    """The same without it."""
    return rendered(folder.name, within=folder.parent)


def test_the_hosts_of_an_island_meet_at_a_site_with_a_prefix(tmp_path: Path) -> None:
    """With the example of docs/how-to/many-hosts.md, at the site of docs/how-to/kubernetes.md."""
    page = (DOCS / "how-to" / "many-hosts.md").read_text("utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "island.yaml").write_text(example)
    prefix = (DOCS / "how-to" / "kubernetes.md").read_text("utf-8")
    (line,) = re.findall(r"^namePrefix: .*$", prefix, re.MULTILINE)
    (tmp_path / "kustomization.yaml").write_text(f"{line}\nresources: [island.yaml]\n")
    by_kind = {d["kind"]: d for d in kustomized(tmp_path)}
    island, service = by_kind["StatefulSet"], by_kind["Service"]["metadata"]["name"]
    name = island["metadata"]["name"]
    assert island["spec"]["serviceName"] == service and name.startswith("frankfurt-")
    (container,) = containers(island)
    told = {e["name"]: e.get("value") for e in container["env"]}
    assert told["DILOCO_ID"] == name and told["DILOCO_HOSTS"] == str(island["spec"]["replicas"])
    assert told["DILOCO_HOST_ADDRESS"] == f"{name}-0.{service}:8470"


def test_a_prefix_names_the_learners_of_a_site(tmp_path: Path) -> None:
    """As docs/how-to/kubernetes.md says: volumes and settings are found under the new names."""
    shutil.copytree(KUBERNETES, tmp_path / "all")
    with (tmp_path / "all" / "site" / "kustomization.yaml").open("a") as file:
        file.write("namePrefix: frankfurt-\n")
    found = kustomized(tmp_path / "all" / "site")
    (job,) = [d for d in found if d["kind"] == "Job"]
    assert job["metadata"]["name"] == "frankfurt-learner-1"
    names = {(d["kind"], d["metadata"]["name"]) for d in found}
    pod = pod_of(job)
    assert pod is not None
    claims = [v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    named = {claim["claimName"] for claim in claims}
    assert named == {"frankfurt-learner-1", "frankfurt-corpora"}
    assert named == {name for kind, name in names if kind == "PersistentVolumeClaim"}
    (source,) = containers(job)[0]["envFrom"]
    assert ("ConfigMap", source["configMapRef"]["name"]) in names
    assert ("Namespace", "diloco") in names


@pytest.mark.parametrize("place", PLACES)
def test_one_line_gives_a_hub_or_a_site_a_namespace_of_its_own(place: str, tmp_path: Path) -> None:
    """As docs/how-to/kubernetes.md says: two of them in one would take each other's settings."""
    shutil.copytree(KUBERNETES, tmp_path / "all")
    file = tmp_path / "all" / place.removesuffix("-gpu") / "kustomization.yaml"
    text, times = re.subn(r"^namespace: .*$", "namespace: other", file.read_text(), flags=re.M)
    assert times == 1
    file.write_text(text)
    for document in kustomized(tmp_path / "all" / place):
        meta = document["metadata"]
        assert meta["name" if document["kind"] == "Namespace" else "namespace"] == "other"


@pytest.mark.parametrize("place", PLACES)
def test_kustomize_makes_the_same_of_it(place: str) -> None:
    theirs = kustomized(KUBERNETES / place)

    def by_name(found: list[dict[str, Any]]) -> dict[str, Any]:
        return {f"{d['kind']}/{d['metadata']['name']}": plain(d) for d in found}

    assert by_name(theirs) == by_name(rendered(place))


@pytest.mark.parametrize("place", PLACES)
def test_every_setting_is_one_of_its_process_and_is_taken(place: str, tmp_path: Path) -> None:
    told = 0
    for workload in workloads(place):
        for container in containers(workload):
            program = program_of(container["image"])
            own = {e["name"] for e in container.get("env", ())}
            if program == "nats":
                assert own <= FOREIGN
                continue
            assert own <= names_of(program) | FOREIGN, workload["metadata"]["name"]
            environment = kubernetes_environment(container, configs(place))
            assert environment["DILOCO_CHECKPOINTS"] and environment["DILOCO_NATS_URL"]
            settings: Any = understood(program, environment, tmp_path)
            mine = {"coordinator": "coordinator", "syncer": "$(DILOCO_ID)", "learner": "site"}
            assert settings.nats_credentials == f"/run/secrets/diloco/{mine[program]}"
            assert settings.nats_ca and not settings.nats_token
            told += 1
    assert told == {"hub": 2, "site": 1, "site-gpu": 1}[place]
    for name, value in configs(place).get("diloco", {}).items():
        assert name in FOREIGN | names_of("learner") | names_of("syncer"), name
        assert isinstance(value, str), f"{name}: Kubernetes takes only text here"


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for p in container["ports"]}


@pytest.mark.parametrize("place", PLACES)
def test_probes_and_scrapes_ask_where_something_answers(place: str) -> None:
    health = HealthServer(lambda: Health(True, {}), None)  # type: ignore[arg-type]
    api = (ROOT / "services/coordinator/diloco_coordinator/app.py").read_text("utf-8")
    for workload in workloads(place):
        (container,) = containers(workload)
        program, ports = program_of(container["image"]), ports_of(container)
        environment = kubernetes_environment(container, configs(place))
        if program == "nats":
            conf = configs(place)["nats"]["nats.conf"]
            assert f"listen: 0.0.0.0:{ports['nats']}\n" in conf
        elif program == "coordinator":
            health_port = int(environment["DILOCO_HEALTH_PORT"])
            assert ports == {"api": int(environment["DILOCO_PORT"]), "health": health_port}
        else:
            assert ports == {"health": int(environment["DILOCO_HEALTH_PORT"])}
        for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
            probe = container[kind]
            if program == "nats":
                # It logs each connection to its port that speaks no TLS. As the container's own.
                asked = probe["exec"]["command"]
                monitor = re.search(r'http: "(\S+)"', configs(place)["nats"]["nats.conf"])
                assert asked[:2] == ["python3", "-c"] and monitor is not None
                assert f"'http://{monitor[1]}/" in asked[2]
                patience = re.search(r"timeout=(\d+)\)$", asked[2])
                assert patience is not None and int(patience[1]) < probe["timeoutSeconds"]
                continue
            path = probe["httpGet"]["path"]
            assert probe["httpGet"]["port"] in ports
            assert path == ("/readyz" if kind == "readinessProbe" else "/healthz")
            assert health._answer(f"GET {path} HTTP/1.1")[0] == "200 OK"
            assert f'@app.get("{path}"' in api
        scraped = workload["spec"]["template"]["metadata"].get("annotations", {})
        if scraped:
            # Nowhere else: the coordinator's API answers who has no token with 401.
            assert int(scraped["prometheus.io/port"]) == ports["health"]
            assert environment["DILOCO_HEALTH_HOST"] == "0.0.0.0"
            assert scraped["prometheus.io/path"] == "/metrics"
        assert bool(scraped) == (program != "nats")


def test_the_message_server_is_told_what_every_hub_s_is_told() -> None:
    conf = configs("hub")["nats"]["nats.conf"]
    said = hub_conf(
        listen="0.0.0.0:4222",
        store="/data",
        pid_file="/tmp/nats-server.pid",
        certificate="/run/secrets/diloco/hub.pem",
        key="/run/secrets/diloco/hub-key.pem",
        monitor="127.0.0.1:8222",
    )
    plain = re.compile(r'^\s*(\w+): *"?([^"\s]+)"?', re.MULTILINE)
    told, theirs = dict(plain.findall(conf)), dict(plain.findall(said))
    assert {"ping_interval", "ping_max", "max_payload", "sync_interval"} <= theirs.keys()
    assert told.pop("max_payload") == f"{int(theirs.pop('max_payload')) >> 20}MB"
    assert theirs.items() <= told.items()
    assert told["timeout"] == str(HANDSHAKE_S)


def test_the_message_server_reads_anew_what_a_secret_brings() -> None:
    """Whoever is revoked is out once Kubernetes has replaced the files, as in Compose."""
    (nats,) = [w for w in workloads("hub") if w["metadata"]["name"] == "nats"]
    command = containers(nats)[0]["command"]
    image = images()["diloco-nats"].read_text("utf-8")
    start = json.loads(re.findall(r"^ENTRYPOINT (.*)$", image, re.MULTILINE)[-1])
    reloads = [word for word in command if word.startswith("--reload=")]
    assert [word for word in command if word not in reloads] == start
    theirs = [w for w in compose("hub.yaml")["nats"]["entrypoint"] if w.startswith("--reload=")]
    assert [r.rpartition("/")[2] for r in reloads] == [r.rpartition("/")[2] for r in theirs]


def test_the_coordinator_can_be_asked_while_the_message_server_is_away() -> None:
    """It is not ready then: a service without this would lead nowhere."""
    services = {d["metadata"]["name"]: d["spec"] for d in rendered("hub") if d["kind"] == "Service"}
    assert services["coordinator"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in services["nats"]


def test_a_secret_takes_the_list_of_as_many_sites_as_the_page_says(tmp_path: Path) -> None:
    """`apply` would note it in an annotation, which takes a quarter of that."""
    page = (DOCS / "how-to" / "kubernetes.md").read_text("utf-8")
    ways = re.findall(r"\| kubectl (\S+) -f -\n", page)
    assert ways and {*ways} == {"replace"}
    found = re.search(
        r"about (\d+) kB for a site of one learner and (\d+) kB for one of sixteen, "
        r"so about (\d+) sites of sixteen learners fit",
        page,
    )
    assert found
    alone_kb, many_kb, sites = map(int, found.groups())
    hub = tmp_path / "hub"
    hub_folder.create(hub, listen="0.0.0.0:4222", store=tmp_path, hosts=("hub.example.org",))

    def grows(site: str, learners: int) -> int:
        before = (hub / ACCOUNTS).stat().st_size
        names = tuple(f"{site}-learner-{n}" for n in range(1, learners + 1))
        hub_folder.add(hub, site, "learner", names)
        return (hub / ACCOUNTS).stat().st_size - before

    assert grows("frankfurt", 1) == pytest.approx(alone_kb * 1e3, rel=0.15)
    many = [grows(f"frankfurt-{n}", 16) for n in range(6)]
    assert many[0] == pytest.approx(many_kb * 1e3, rel=0.15)
    assert sum(many) * 4 / 3 > ANNOTATIONS_BYTES_MAX, "in base64: apply fails"
    assert SECRET_BYTES_MAX * 0.8 < sites * many[0] < SECRET_BYTES_MAX


def test_a_message_server_that_reads_its_store_for_long_is_left_to_it() -> None:
    (nats,) = [w for w in workloads("hub") if w["metadata"]["name"] == "nats"]
    probe = containers(nats)[0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > READING_S_MAX + UNANSWERED_S


def test_no_process_of_a_hub_has_the_keys_of_a_kind_that_may_do_other_things() -> None:
    has = {}
    for workload in workloads("hub"):
        for volume in pod_of(workload)["volumes"]:  # type: ignore[index]
            for source in volume.get("projected", {}).get("sources", ()):
                secret = source["secret"]
                keys = {item["key"] for item in secret["items"]}
                has.setdefault(workload["metadata"]["name"], set()).update(keys)
                # Nodes may have the right to the bucket themselves; all else must be there.
                assert secret.get("optional", False) == (keys == {"bucket"})
    assert has == {
        "coordinator": {"coordinator", "reader", "hub-ca.pem", "bucket"},
        "syncer": {"syncer-0", "syncer-1", "hub-ca.pem", "bucket"},
    }


@pytest.mark.parametrize("by", [rendered_in, kustomized])
def test_one_edit_names_the_registry_and_the_release_of_every_container(
    by: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    """kustomize says nothing of a rule for images that fits none of them."""
    shutil.copytree(KUBERNETES, tmp_path / "all")
    edited = [p for p in (tmp_path / "all").rglob("*.yaml") if "registry." in p.read_text("utf-8")]
    assert edited == [tmp_path / "all" / "images" / "kustomization.yaml"]
    text = edited[0].read_text("utf-8").replace("registry.example.org", "images.ours:5000")
    edited[0].write_text(re.sub(r"newTag: [^}]+", "newTag: next", text))
    for place in PLACES:
        images = [c["image"] for d in by(tmp_path / "all" / place) for c in containers(d)]
        assert images
        for image in images:
            assert re.fullmatch(r"images\.ours:5000/diloco-\w+(-cuda)?:next", image), place
            assert image.removesuffix(":next").endswith("-cuda") == (place == "site-gpu")


@pytest.mark.parametrize("place", PLACES)
def test_images_are_those_that_this_repository_builds(place: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    for workload in workloads(place):
        (container,) = containers(workload)
        name, _, tag = container["image"].rpartition("/")[2].partition(":")
        assert name.removesuffix("-cuda") in images()
        assert tag == project["version"], "or a cluster runs another release than its files say"


def test_a_learner_with_a_gpu_has_an_image_with_cuda() -> None:
    (plain_job,), (job,) = workloads("site"), workloads("site-gpu")
    (container,) = containers(job)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["image"].partition(":")[0].endswith("/diloco-learner-cuda")
    assert "nvidia.com/gpu" not in containers(plain_job)[0]["resources"]["limits"]
    # It is the same learner otherwise: its limit of memory above all.
    assert container["resources"]["limits"]["memory"]
    assert {e["name"] for e in container["env"]} == {
        e["name"] for e in containers(plain_job)[0]["env"]
    }


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_is_told_to_stop_has_the_time_that_it_needs(place: str) -> None:
    for workload in workloads(place):
        pod = pod_of(workload)
        assert pod is not None
        # A learner says good-bye after that; and whoever watches the message server looks up first.
        told = {e["name"]: e.get("value") for c in containers(workload) for e in c.get("env", ())}
        needed_s = max(float(told.get("DILOCO_STOP_S", STOP_S)) + 2 * CLOSES_S, ENDS_S + LOOK_S)
        assert pod["terminationGracePeriodSeconds"] > needed_s


def test_an_evicted_learner_comes_back_under_its_id_and_never_twice() -> None:
    (job,) = workloads("site")
    spec, (container,) = job["spec"], containers(job)
    # A learner that is told to stop ends with status 0, which is one completion.
    assert spec["completions"] >= 100_000 and spec["parallelism"] == 1
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure"
    (me,) = [e for e in container["env"] if e["name"] == "DILOCO_ID"]
    path = me["valueFrom"]["fieldRef"]["fieldPath"]
    assert path == "metadata.labels['batch.kubernetes.io/job-name']"
    claims = {d["metadata"]["name"] for d in rendered("site") if d["kind"].endswith("Claim")}
    volumes = spec["template"]["spec"]["volumes"]
    mounted = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    named = {claim["claimName"] for claim in mounted}
    assert named == claims and job["metadata"]["name"] in claims


@pytest.mark.parametrize("place", PLACES)
def test_every_process_may_do_as_little_as_it_needs(place: str) -> None:
    for workload in workloads(place):
        pod, (container,) = pod_of(workload), containers(workload)
        assert pod is not None and pod["serviceAccountName"] == "diloco"
        assert pod["automountServiceAccountToken"] is False
        may = pod["securityContext"]
        assert may["runAsNonRoot"] and may["seccompProfile"] == {"type": "RuntimeDefault"}
        assert may["runAsUser"] == may["runAsGroup"] == may["fsGroup"] == USER
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        # What it writes has a place, and a limit; a secret is for its group alone.
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        assert mounts.keys() >= {"/data", "/tmp", "/run/secrets/diloco"}
        volumes = {v["name"]: v for v in pod["volumes"]}
        for mount in mounts.values():
            claimed = workload["spec"].get("volumeClaimTemplates", ())
            assert mount["name"] in {*volumes, *(c["metadata"]["name"] for c in claimed)}
        for volume in volumes.values():
            assert volume.get("emptyDir", {"sizeLimit": 1})["sizeLimit"]
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440
        assert mounts["/run/secrets/diloco"]["readOnly"]
        environment = kubernetes_environment(container, configs(place))
        for name in ("DILOCO_NATS_CREDENTIALS", "DILOCO_EXPORT_CREDENTIALS", "DILOCO_NATS_CA"):
            assert environment.get(name, "/run/secrets/diloco/x").startswith("/run/secrets/diloco/")
        assert "DILOCO_NATS_TOKEN" not in environment, "a secret is a file"


@pytest.mark.parametrize(
    ("page", "place", "prefix"), [("kubernetes", "site", "frankfurt-"), ("backup", "hub", "")]
)
def test_a_pod_that_fills_a_volume_is_let_in_and_finds_it(
    page: str, place: str, prefix: str
) -> None:
    """The namespace is `restricted`: Kubernetes takes no other pods there."""
    shown = [b for b in blocks(DOCS / "how-to" / f"{page}.md") if b.language == "yaml"]
    pods = [d for b in shown for d in yaml.safe_load_all(b.body) if d.get("kind") == "Pod"]
    (pod,) = [d["spec"] for d in pods]
    may, (container,) = pod["securityContext"], pod["containers"]
    assert may["runAsNonRoot"] and may["seccompProfile"] == {"type": "RuntimeDefault"}
    assert may["runAsUser"] == may["runAsGroup"] == may["fsGroup"] == USER
    inside = container["securityContext"]
    assert inside == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["image"] in {c["image"] for w in workloads(place) for c in containers(w)}
    claims = {f"{prefix}{d['metadata']['name']}" for d in rendered(place) if "Claim" in d["kind"]}
    for workload in workloads(place):
        for claim in workload["spec"].get("volumeClaimTemplates", ()):
            claims.add(f"{claim['metadata']['name']}-{workload['metadata']['name']}-0")
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] in claims
    assert mount["name"] == volume["name"] and "readOnly" not in volume["persistentVolumeClaim"]


@pytest.mark.parametrize("place", PLACES)
def test_selectors_choose_pods_and_open_no_other_ports(place: str) -> None:
    found = rendered(place)
    labels = {
        w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads(place)
    }
    ports = {p for w in workloads(place) for c in containers(w) for p in ports_of(c).values()}
    for document in found:
        spec = document.get("spec", {})
        selector = spec.get("podSelector", spec.get("selector"))
        if document["kind"] in ("Service", "StatefulSet", "PodDisruptionBudget", "NetworkPolicy"):
            wanted = (
                selector.get("matchLabels", selector) if "matchExpressions" not in selector else {}
            )
            chosen = [n for n, has in labels.items() if wanted.items() <= has.items()]
            assert chosen, document["metadata"]["name"]
        if document["kind"] == "Service":
            assert [p["port"] for p in spec["ports"]] and {
                p["port"] for p in spec["ports"]
            } <= ports
        for rule in spec.get("ingress", ()) if document["kind"] == "NetworkPolicy" else ():
            opened = {p["port"] for p in rule["ports"]}
            assert opened <= {8400, 8401, 4222, ROUTES}
            if ROUTES in opened:  # to no site: who speaks there is a node of the hub
                assert rule["from"] == [{"podSelector": selector}]
                assert spec["egress"] == [{"to": rule["from"], "ports": rule["ports"]}]
    (closed,) = [d for d in found if d["metadata"]["name"] == "nothing-else"]
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_a_copy_of_a_learners_pod_gets_the_labels_by_which_it_may_connect() -> None:
    """As docs/how-to/doctor.md makes one: kubectl leaves all labels out, and the name with them."""
    page = (DOCS / "how-to" / "doctor.md").read_text("utf-8")
    (given,) = re.findall(r"label pod doctor (.+)$", page, re.MULTILINE)
    labels = dict(pair.split("=") for pair in given.split())
    (job,) = workloads("site")
    assert labels.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    policies = [d["spec"] for d in rendered("site") if d["kind"] == "NetworkPolicy"]
    chosen = [p["podSelector"].get("matchLabels", {}) for p in policies if "egress" in p]
    assert chosen and all(wanted.items() <= labels.items() for wanted in chosen)
    copied = re.findall(r"debug POD .*--profile=(\w+) --container=(\w+) ", page)
    (namespace,) = [d for d in rendered("site") if d["kind"] == "Namespace"]
    enforced = namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert copied == [(enforced, containers(job)[0]["name"])]


def test_a_syncer_is_left_when_a_machine_is_emptied_or_lost() -> None:
    (syncer,) = [w for w in workloads("hub") if w["metadata"]["name"] == "syncer"]
    (budget,) = [d for d in rendered("hub") if d["kind"] == "PodDisruptionBudget"]
    assert syncer["spec"]["replicas"] > budget["spec"]["maxUnavailable"]
    assert budget["spec"]["selector"] == syncer["spec"]["selector"]
    pod = pod_of(syncer)
    assert pod is not None
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"] == syncer["spec"]["selector"]
