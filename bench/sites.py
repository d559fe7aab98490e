"""A hub and two sites on networks of their own: a link is cut, a site is exchanged, one is revoked.

    make sites-test                    (python bench/sites.py [--cut 120] [--json FILE])
    make sites-test DOCKER=1           (python bench/sites.py --docker ...)

Three network namespaces on this machine, so it needs root: `hub` with the message server, the
coordinator and a syncer; `oslo` and `bergen` with a learner each. A site's only way out is a link
to the hub, and over it everything goes through TLS with credentials and certificate of the site, as
`diloco hub init --mutual-tls` and `diloco site add` write them.

    cut       oslo's link is gone for `--cut` seconds: bergen's work is merged meanwhile, oslo
              steps on, and is merged again without a new life
    upgrade   bergen's learner is stopped, and one of the next release takes its place, as far as
              others can tell: it says so, and each of its messages has fields that they do not know
    revoke    bergen is revoked while it trains: it is out, oslo goes on, the server stays up

With --docker the three are Compose projects of their own (bench/site_containers.py): the hub is
compose/hub.yaml and each site compose/site.yaml, and a firewall is between them.

Exit status 0 only if all of that happened and every token is accounted for.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runs import keep, surroundings
from site_containers import Containers
from site_drill import SITES, Drill, until

from diloco_client import Client
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nats_binary import find_binary

ROOT = Path(__file__).resolve().parents[1]
NEXT_RELEASE = ROOT / "tests" / "next_release.py"
HUB = "hub"
# Of every link the first address is the hub's. The last one is for whoever asks the coordinator.
LINKS = {"oslo": "10.201.1", "bergen": "10.201.2", "": "10.201.3"}


class Networks:
    """The namespaces of hub and sites, and their links. Removed by `close`."""

    def __init__(self) -> None:
        self.tag = f"diloco{os.getpid()}"
        self.made: list[str] = []

    def open(self) -> None:
        for place in (HUB, *SITES):
            self.ip("netns", "add", self.name(place))
            self.made.append(place)
            self.ip("-n", self.name(place), "link", "set", "lo", "up")
        for number, (site, net) in enumerate(LINKS.items()):
            near, far = self.end(number), f"{self.end(number)}s"
            self.ip("link", "add", near, "type", "veth", "peer", "name", far)
            self.ip("link", "set", near, "netns", self.name(HUB))
            self._up(HUB, near, f"{net}.1/24")
            if site:
                self.ip("link", "set", far, "netns", self.name(site))
            self._up(site, far, f"{net}.2/24")

    def _up(self, place: str, link: str, address: str) -> None:
        where = ("-n", self.name(place)) if place else ()
        self.ip(*where, "address", "add", address, "dev", link)
        self.ip(*where, "link", "set", link, "up")

    def cut(self, site: str, *, healed: bool = False) -> None:
        link = self.end(list(LINKS).index(site))
        self.ip("-n", self.name(HUB), "link", "set", link, "up" if healed else "down")

    def close(self) -> None:
        for place in self.made:
            subprocess.run(["ip", "netns", "del", self.name(place)], check=False)

    def name(self, place: str) -> str:
        return f"{self.tag}-{place}"

    def end(self, number: int) -> str:
        return f"dl{os.getpid() % 10**7}{'abc'[number]}"

    @staticmethod
    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Cluster:
    """The processes of hub and sites, in `folder`."""

    def __init__(self, folder: Path, networks: Networks) -> None:
        self.folder, self.networks = folder, networks
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def prepare(self) -> None:
        """What an operator does before anything starts."""
        hosts = [word for net in LINKS.values() for word in ("--host", f"{net}.1")]
        self.diloco("hub", "init", str(self.hub), "--mutual-tls", *hosts)
        for site in SITES:
            self.diloco("site", "add", site, "--hub", str(self.hub))

    @property
    def hub(self) -> Path:
        return self.folder / "hub"

    def diloco(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "diloco_cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"diloco {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done.stdout

    def start(self, place: str, name: str, *command: str, **more: str) -> None:
        """A process of this name in a namespace, with nothing of ours but what it is told."""
        net = LINKS[place] if place in LINKS else LINKS["oslo"]
        credentials = self.hub / hub_folder.CREDENTIALS / name
        certificate = str(self.hub / hub_folder.CERTIFICATES / f"{name}.pem")
        told = {
            "DILOCO_ID": name,
            "DILOCO_NATS_URL": f"tls://{net}.1:4222",
            "DILOCO_NATS_CREDENTIALS": str(credentials),
            "DILOCO_DATA": str(self.folder / "data"),
            "DILOCO_NATS_CA": str(self.hub / hub_folder.AUTHORITY),
            "DILOCO_NATS_CLIENT_CERT": certificate,
            "DILOCO_NATS_CLIENT_KEY": certificate,
            "OMP_NUM_THREADS": "1",
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DILOCO_")}
        kept = {k: v for k, v in os.environ.items() if k == "DILOCO_CACHE"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                ["ip", "netns", "exec", self.networks.name(place), *command],
                env=inherited | kept | (told if credentials.exists() else {}) | more,
                stdout=log,
                stderr=log,
            )

    def start_all(self) -> Client:
        config = str(self.hub / "nats-server.conf")
        self.start(HUB, "nats", str(find_binary(None)), "-c", config)
        api = {"DILOCO_HOST": f"{LINKS['']}.1", "DILOCO_PORT": "8400", "DILOCO_HEALTH_PORT": "0"}
        self.start(HUB, "coordinator", sys.executable, "-m", "diloco_coordinator", **api)
        self.start(HUB, "syncer-a", sys.executable, "-m", "diloco_syncer")
        for site in SITES:
            self.learner(site)
        token = self.folder / "data" / "admin-token"
        until("the administrator's token", lambda: token.exists() and token.read_text())
        client = Client(f"http://{LINKS['']}.1:8400", token.read_text().strip())
        until("the coordinator", client.ready)
        return client

    def learner(self, site: str, *, upgraded: bool = False) -> None:
        how = [str(NEXT_RELEASE)] if upgraded else ["-m"]
        self.start(site, site, sys.executable, *how, "diloco_learner", DILOCO_THREADS="1")

    def cut(self, site: str, *, healed: bool = False) -> None:
        """Take its link away; or give it back."""
        self.networks.cut(site, healed=healed)

    def revoke(self, site: str) -> None:
        self.diloco("site", "revoke", site, "--hub", str(self.hub))

    def life_of_server(self) -> str:
        """Of the message server; another one after it was started anew."""
        server = self.running["nats"]
        return str(server.pid if server.poll() is None else "")

    def stop(self, name: str) -> None:
        """As a supervisor does: asked first, killed when it takes a minute."""
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()

    def connected(self, site: str) -> bool:
        """Whether the hub's machine has a connection from that site."""
        command = ["ip", "netns", "exec", self.networks.name(HUB), "ss", "-Htn"]
        shown = subprocess.run(
            [*command, "state", "established", "( sport = :4222 )"],
            capture_output=True,
            text=True,
            check=True,
        )
        # A server that listens on IPv6 sees an address as [::ffff:10.0.0.2]:port.
        return f"{LINKS[site]}.2:" in shown.stdout.replace("]", "")

    def tails(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in logs)


def drilled(folder: Path, cut_s: float, *, docker: bool = False) -> dict[str, Any]:
    """From nothing to the end; raises RuntimeError naming what did not happen."""
    with ExitStack() as closing:
        cluster: Cluster | Containers
        if docker:
            cluster = Containers(folder)
        else:
            networks = Networks()
            closing.callback(networks.close)
            networks.open()
            cluster = Cluster(folder, networks)
        closing.callback(cluster.close)
        cluster.prepare()
        try:
            with cluster.start_all() as client:
                return Drill(cluster, client, cut_s).all()
        except Exception:
            print(cluster.tails(), file=sys.stderr)
            raise


def lines(found: dict[str, Any], at: str = "") -> list[str]:
    """One line per figure."""
    shown: list[str] = []
    for name, value in found.items():
        where = f"{at} {name.replace('_', ' ')}".strip()
        shown += lines(value, where) if isinstance(value, dict) else [f"{where:48} {value}"]
    return shown


def main() -> None:
    """Run it; whatever happens, no process and no network is left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cut", type=float, default=120.0, help="seconds without a link")
    parser.add_argument("--docker", action="store_true", help="as three projects of Compose")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.geteuid() or shutil.which("ip") is None or shutil.which("ss") is None:
        sys.exit("sites-test: needs root, and the commands ip and ss (Debian: iproute2)")
    command = "make sites-test" + (" DOCKER=1" if args.docker else "")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = drilled(Path(folder), args.cut, docker=args.docker)
        except RuntimeError as error:
            sys.exit(f"sites-test: {error}")
    print("\n".join(lines(found)))
    keep(args.json, surroundings("sites.py") | {"command": command} | found)


if __name__ == "__main__":
    main()
