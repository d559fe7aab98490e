"""The hub and the sites of sites.py as Compose projects of their own, set up as an operator does.

The hub is compose/hub.yaml and each site compose/site.yaml, on networks of their own. A site
reaches the hub's port at this machine's address. Depending on the engine that goes through a
program of its own, or from one network to the other, which it forbids: the firewall's rules here
let it through both ways, and cut both.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from site_drill import SITES, until

from diloco_client import Client

ROOT = Path(__file__).resolve().parents[1]
PORT, API_PORT = "4229", "8489"
# Of iptables: a chain, and what follows.
Rule = tuple[str, ...]
# Who all containers run as.
USER = 10001
# The operator's container at the hub, and for how long it waits for commands, in seconds.
SHELL, DAY_S = "diloco-hub-shell", "86400"
NEXT_IMAGE = "diloco-learner-next-release"
# The same program, which says that it is the next release (tests/next_release.py).
NEXT_DOCKERFILE = """FROM diloco-learner
COPY next_release.py /opt/next_release.py
ENTRYPOINT ["python3", "/opt/next_release.py", "diloco_learner"]
"""
NEXT_COMPOSE = f"services: {{learner: {{image: {NEXT_IMAGE}}}}}\n"


# At the message server: the names that connections give themselves. One that is not let in yet has
# none.
_NAMES = (
    "import json, urllib.request as u;"
    "there = json.load(u.urlopen('http://127.0.0.1:8222/connz?limit=1000'))['connections'];"
    "print(*(c.get('name', '') for c in there), sep='\\n')"
)


def out_of(*command: str, told: str | None = None) -> str:
    """What a command prints; RuntimeError with what it complains of."""
    done = subprocess.run(command, capture_output=True, text=True, input=told, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def compose_command() -> list[str]:
    """The Compose that is here; exits with a clear word where there is none."""
    if shutil.which("docker") is None:
        sys.exit("no docker command here: install a Docker engine to run this")
    engine = subprocess.run(["docker", "info"], capture_output=True, text=True, check=False)
    if engine.returncode:
        sys.exit(f"no Docker engine answers: {engine.stderr.strip()[:200]}")
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        sys.exit("neither 'docker compose' nor 'docker-compose' is installed")
    return ["docker-compose"]


def left_of(project: str) -> list[str]:
    """What the engine still has of a project: containers, volumes and networks."""
    ours = ("--filter", f"label=com.docker.compose.project={project}", "-q")
    asked = (("ps", "-a", *ours), ("volume", "ls", *ours), ("network", "ls", *ours))
    return [name for what in asked for name in out_of("docker", *what).split()]


class Containers:
    """Three projects, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.command = folder, compose_command()
        self.rules: list[Rule] = []
        self.server = ""
        # The address under which every network of this machine reaches the hub's port.
        (bridge,) = json.loads(out_of("ip", "-4", "-json", "address", "show", "docker0"))
        self.host = str(bridge["addr_info"][0]["local"])
        self.told = {
            "DILOCO_CHECKPOINTS": "/data/checkpoints",
            "DILOCO_PORT": API_PORT,
            "HUB_PORT": PORT,
            "HUB_FOLDER": str(folder / "hub"),
            "DILOCO_NATS_URL": f"tls://{self.host}:{PORT}",
        }

    def prepare(self) -> None:
        """What an operator does before anything starts: docs/how-to/deploy.md, "In containers"."""
        self.compose("hub", "build")
        self.compose("oslo", "build")
        self._upgraded_image()
        for place in ("hub", *SITES):
            (self.folder / place).mkdir(mode=0o700)
            os.chown(self.folder / place, USER, USER)
        # Its shell stays open, as the page advises: what is typed there starts no container.
        self.compose(
            "hub", "run", "-d", "--name", SHELL, "--entrypoint", "sleep", "operator", DAY_S
        )
        hosts = ("--host", self.host, "--host", "nats")
        listen = ("--listen", "0.0.0.0:4222", "--store", "/data")
        self.operator("hub", "init", "/hub", *listen, *hosts, "--mutual-tls")
        for site in SITES:
            self.operator("site", "add", site, "--hub", "/hub")
            self._carry(site)

    def start_all(self) -> Client:
        self.compose("hub", "up", "-d", "nats", "coordinator", "syncer-a", "syncer-b")
        for site in SITES:
            self.learner(site)
            self._let_through(site)
        token = str(until("the administrator's token", self._token))
        client = Client(f"http://127.0.0.1:{API_PORT}", token)
        until("the coordinator", client.ready)
        return client

    def cut(self, site: str, *, healed: bool = False) -> None:
        for rule in self._rules(site, "DROP"):
            out_of("iptables", "-D" if healed else "-I", *rule)
            if healed:
                self.rules.remove(rule)
            else:
                self.rules.append(rule)

    def stop(self, site: str) -> None:
        self.compose(site, "stop", "learner")

    def learner(self, site: str, *, upgraded: bool = False) -> None:
        self.compose(site, "up", "-d", upgraded=upgraded)

    def revoke(self, site: str) -> None:
        self.operator("site", "revoke", site, "--hub", "/hub")

    def connected(self, site: str) -> bool:
        """Whether the message server has let a connection of that site in."""
        names = out_of("docker", "exec", self._server(), "python3", "-c", _NAMES)
        return any(name.startswith(f"{site}-") for name in names.splitlines())

    def life_of_server(self) -> str:
        shown = out_of("docker", "top", self._server())
        return next(
            (line.split()[1] for line in shown.splitlines() if "nats-server -c" in line), ""
        )

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(
            f"== {place}\n{self.compose(place, 'logs', '--tail', '30')}"
            for place in ("hub", *SITES)
        )

    def close(self) -> list[str]:
        """Take everything down; what is left all the same."""
        for rule in self.rules:
            with suppress(RuntimeError):
                out_of("iptables", "-D", *rule)
        with suppress(RuntimeError):
            out_of("docker", "rm", "-f", SHELL)
        for place in ("hub", *SITES):
            self.compose(place, "down", "-v", "--remove-orphans")
        with suppress(RuntimeError):
            out_of("docker", "image", "rm", "-f", NEXT_IMAGE)
        return [name for place in ("hub", *SITES) for name in left_of(self._project(place))]

    def compose(self, place: str, *arguments: str, upgraded: bool = False) -> str:
        file = "hub.yaml" if place == "hub" else "site.yaml"
        files = ["-f", str(ROOT / "compose" / file)]
        if upgraded:
            files += ["-f", str(self.folder / "next.yaml")]
        site = {
            "SITE": place,
            "LEARNERS": place,
            "SITE_FOLDER": str(self.folder / place),
            "CORPORA_FOLDER": str(self.folder),
        }
        done = subprocess.run(
            [*self.command, "-p", self._project(place), *files, *arguments],
            env={**os.environ, **self.told, **site},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr or done.stdout)[-2000:]
            raise RuntimeError(f"compose {place} {' '.join(arguments)}: {said}")
        return done.stdout

    def operator(self, *arguments: str) -> str:
        """The command line of the hub, in the operator's open shell."""
        return out_of("docker", "exec", SHELL, "diloco", *arguments)

    @staticmethod
    def _project(place: str) -> str:
        return f"diloco-{place}"

    def _server(self) -> str:
        """The message server's container. Compose takes a second to say it, so it is asked once."""
        if not self.server:
            self.server = self.compose("hub", "ps", "-q", "nats").split()[0]
        return self.server

    def _token(self) -> str:
        try:
            told = ("exec", "-T", "coordinator", "cat", "/data/admin-token")
            return self.compose("hub", *told).strip()
        except RuntimeError:
            return ""

    def _carry(self, site: str) -> None:
        """From the hub's folder to the site's, as a tar file that somebody carries there."""
        files = ("authority.pem", f"credentials/{site}", f"certificates/{site}.pem")
        for file in files:
            target = self.folder / site / file
            target.parent.mkdir(exist_ok=True)
            shutil.copy(self.folder / "hub" / file, target)
            for path in (target, target.parent):
                os.chown(path, USER, USER)

    def _upgraded_image(self) -> None:
        place = self.folder / "next"
        place.mkdir()
        shutil.copy(ROOT / "tests" / "next_release.py", place)
        (place / "Dockerfile").write_text(NEXT_DOCKERFILE)
        out_of("docker", "build", "-t", NEXT_IMAGE, str(place))
        (self.folder / "next.yaml").write_text(NEXT_COMPOSE)

    def _let_through(self, site: str) -> None:
        for rule in self._rules(site, "ACCEPT"):
            out_of("iptables", "-I", *rule)
            self.rules.append(rule)

    def _rules(self, site: str, what: str) -> list[Rule]:
        """Of what goes from the site to the hub's port, and back, by both ways."""
        here, hub = self._bridge(site), self._bridge("hub")
        tcp, end = ("-p", "tcp"), ("-j", what)
        return [
            ("DOCKER-USER", "-i", here, "-o", hub, *tcp, "--dport", "4222", *end),
            ("DOCKER-USER", "-i", hub, "-o", here, *tcp, "--sport", "4222", *end),
            ("INPUT", "-i", here, *tcp, "--dport", PORT, *end),
            ("OUTPUT", "-o", here, *tcp, "--sport", PORT, *end),
        ]

    def _bridge(self, place: str) -> str:
        name = f"{self._project(place)}_hub"
        return "br-" + out_of("docker", "network", "inspect", "-f", "{{.Id}}", name)[:12]
