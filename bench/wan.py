"""The bus over a wide-area link that this machine emulates, and training behind a thin one.

    python bench/wan.py [--part check|transfer|leaf|training|all] [--seconds 300] [--json FILE]

Two links, each with the same rate, loss and delay both ways: 1 Gbit/s with 60 ms round trip and
0.05 % loss for transfers, and 10 Mbit/s with 60 ms for training. The link is checked first: what
it does stands beside what is wanted. Needs root, TUN devices and a C compiler (Linux); without
them the exit status is 77.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from wan.leaf import SITE
from wan.link import CANNOT, HUB, Link, LinkMissing, Shape
from wan.link import SITE as SITE_ADDRESS
from wan.raw import Server
from wan.training import Training

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.nats.hub_config import leaf_conf
from diloco_shared.bus.nats.keys import read_credentials
from diloco_shared.bus.port import StreamSpec
from diloco_shared.hub import folder as hub_folder
from diloco_shared.hub.nats_binary import find_binary
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.process.stopping import dies_with_parent
from diloco_shared.protocol import subjects

CONNECTIONS = (1, 2, 4, 8)
WHAT = ("raw", "cold", "warm")
# A queue of one bandwidth-delay product, the old rule for routers: 7.5 MB.
FAST = Shape(1e9, 0.060, 0.0005, queue_bytes=7_500_000)
# 100 ms of queue: that of a modest home or office router.
THIN = Shape(10e6, 0.060, 0.0005, queue_bytes=125_000)
# Beyond these a part has failed.
CHECK_S, TRANSFER_S = 120.0, 900.0
# Until a site's message server has found the hub, in seconds: it takes a few round trips.
LEAF_S = 3.0


def main() -> None:
    """Print tables; write the figures as JSON."""
    args = _arguments()
    began = time.monotonic()
    result: dict[str, Any] = {"figures": {}}
    try:
        if args.part in ("check", "all"):
            result["links"] = {"1 Gbit/s": _check(FAST, 250), "10 Mbit/s": _check(THIN, 8)}
        if args.part in ("transfer", "all"):
            _transfer(args, result)
        if args.part in ("leaf", "all"):
            _leaf(args, result)
        if args.part in ("training", "all"):
            _training(args, result)
    except LinkMissing as error:
        print(f"this machine cannot emulate a link: {error}", file=sys.stderr)
        sys.exit(CANNOT)
    result |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "tcp": _tcp(),
        "python": platform.python_version(),
        "command": f"python bench/wan.py {' '.join(sys.argv[1:])}".strip(),
        "seed": FAST.seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result["figures"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--part", choices=("check", "transfer", "leaf", "training", "all"), default="all"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of every transfer, interleaved")
    parser.add_argument("--megabytes", type=int, default=128, help="of one transfer")
    parser.add_argument("--seconds", type=float, default=300.0, help="of training")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _tcp() -> dict[str, str]:
    settings = Path("/proc/sys/net/ipv4")
    names = ("tcp_congestion_control", "tcp_wmem", "tcp_rmem")
    return {name: (settings / name).read_text().strip() for name in names}


def _at_site(link: Link, module: str, *arguments: Any, seconds: float) -> Iterator[dict[str, Any]]:
    """What `python -m module` says on the site's side, a JSON object a line."""
    command = link.at_site([sys.executable, "-m", module, *map(str, arguments)])
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=dies_with_parent(),
    ) as process:
        assert process.stdout is not None
        limit = threading.Timer(seconds, process.kill)
        limit.daemon = True
        limit.start()
        for line in process.stdout:
            yield json.loads(line)
    limit.cancel()
    if process.returncode:
        raise SystemExit(f"{module} ended with status {process.returncode}")


# --- parts -------------------------------------------------------------------------------------


def _check(shape: Shape, megabytes: int) -> dict[str, Any]:
    """Wanted beside measured: rates without loss, which TCP would answer by sending less."""
    rates = _checked(replace(shape, loss=0.0), "rates", megabytes)[0]
    seen, counts = _checked(shape, "loss")
    # TCP and IP take 52 of 1,500 bytes.
    payload_bits = {way: rate * 8 * 1500 / 1448 for way, rate in rates.items()}
    counted = {way: counts[way]["lost"] / counts[way]["segments"] for way in ("up", "down")}
    rows = [
        ("plain TCP up, no loss, Mbit/s", shape.bits_per_s / 1e6, payload_bits["put"] / 1e6),
        ("plain TCP down, no loss, Mbit/s", shape.bits_per_s / 1e6, payload_bits["get"] / 1e6),
        ("round trip, ms", shape.round_trip_s * 1e3, seen["round_trip_s"] * 1e3),
        ("loss up, % of segments", shape.loss * 100, counted["up"] * 100),
        ("loss down, % of segments", shape.loss * 100, counted["down"] * 100),
        ("loss there and back, % of datagrams", shape.loss * 200, seen["datagrams_lost"] * 100),
    ]
    print(f"\n{'the link':<36} {'wanted':>9} {'measured':>9}")
    for what, wanted, measured in rows:
        print(f"{what:<36} {wanted:9.3f} {measured:9.3f}", flush=True)
    return {what: {"wanted": wanted, "measured": measured} for what, wanted, measured in rows}


def _checked(shape: Shape, *arguments: Any) -> tuple[dict[str, float], dict[str, Any]]:
    """What wan.check says, and what the link counted meanwhile."""
    with Link(shape, CHECK_S) as link:
        link.enter_hub()
        port = Server(HUB).port
        (seen,) = _at_site(link, "wan.check", HUB, port, *arguments, seconds=CHECK_S)
    return seen, link.counts


def _transfer(args: argparse.Namespace, result: dict[str, Any]) -> None:
    size = args.megabytes << 20
    rates: dict[tuple[str, str, int], list[float]] = {}
    counts = ",".join(map(str, CONNECTIONS))
    with tempfile.TemporaryDirectory(prefix="wan-") as folder, Link(FAST, TRANSFER_S) as link:
        link.enter_hub()
        server = NatsServer(Path(folder), host=HUB, dies_with_owner=True)
        asyncio.run(server.start())
        try:
            port = Server(HUB).port
            arguments = (HUB, port, server.url, size, args.repeats, counts)
            for row in _at_site(link, "wan.transfer", *arguments, seconds=TRANSFER_S):
                key = (row["what"], row["way"], row["connections"])
                rates.setdefault(key, []).append(row["bytes_per_s"])
        finally:
            asyncio.run(server.stop())
    median = {key: statistics.median(found) for key, found in rates.items()}
    print(
        f"\nMB/s over 1 Gbit/s, 60 ms, 0.05 % loss; {args.megabytes} MiB, median of {args.repeats}"
    )
    print("connections   raw put   raw get  cold put  cold get  warm put  warm get  of link")
    figures = result["figures"]
    for count in CONNECTIONS:
        speeds = [median[what, way, count] for what in WHAT for way in ("put", "get")]
        figures[f"wan_link_fraction_{count}"] = _fraction(speeds[4:])
        figures[f"wan_link_fraction_cold_{count}"] = _fraction(speeds[2:4])
        figures[f"wan_over_raw_{count}"] = _fraction(speeds[4:]) / _fraction(speeds[:2])
        shown = " ".join(f"{rate / 1e6:9.1f}" for rate in speeds)
        print(f"{count:11d} {shown} {_fraction(speeds[4:]):8.2f}")
    figures["wan_link_fraction"] = max(figures[f"wan_link_fraction_{n}"] for n in CONNECTIONS)
    result["transfer"] = {
        f"{what} {way} {count}": [round(rate) for rate in found]
        for (what, way, count), found in rates.items()
    }


def _leaf(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """A site with a message server of its own, beside the same site without."""
    size = args.megabytes << 20
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    answer_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="wan-") as made, Link(FAST, TRANSFER_S) as link:
        link.enter_hub()
        folder = Path(made)
        with _hub_with_leaf(folder, link, 4 * size * (args.repeats + 2)) as (hub, leaf):
            credentials = folder / "hub" / hub_folder.CREDENTIALS / SITE
            arguments = (hub, leaf, credentials, size, args.repeats)
            for row in _at_site(link, "wan.leaf", *arguments, seconds=TRANSFER_S):
                if "answer_s" in row:
                    answer_s[row["way"]] = row["answer_s"]
                    continue
                key = (row["way"], row["connections"])
                rates.setdefault(key, []).append((row["put"], row["get"]))
    print(
        f"\nMB/s over 1 Gbit/s, 60 ms, 0.05 % loss; {args.megabytes} MiB, median of {args.repeats}"
    )
    print(f"{'way':<8} connections       put       get  of link")
    for (way, count), found in rates.items():
        speeds = [statistics.median(column) for column in zip(*found, strict=True)]
        result["figures"][f"leaf_{way}_link_fraction_{count}"] = _fraction(speeds)
        shown = " ".join(f"{rate / 1e6:9.1f}" for rate in speeds)
        print(f"{way:<8} {count:11d} {shown} {_fraction(speeds):8.2f}")
    result["figures"] |= {f"leaf_{way}_answer_s": seconds for way, seconds in answer_s.items()}
    result["leaf"] = {
        f"{way} {count}": [[round(put), round(get)] for put, get in found]
        for (way, count), found in rates.items()
    }


@contextmanager
def _hub_with_leaf(folder: Path, link: Link, stream_bytes: int) -> Iterator[tuple[str, str]]:
    """Addresses of a hub, and of the message server of a site."""
    hub = folder / "hub"
    hub_folder.create(
        hub, listen=f"{HUB}:4222", store=folder / "store", monitor="", leaves=f"{HUB}:7422"
    )
    hub_folder.add(hub, SITE, "learner")
    config = folder / "leaf.conf"
    who = read_credentials(hub / hub_folder.CREDENTIALS / SITE)
    pid_file = str(folder / "leaf.pid")
    own = f"{SITE_ADDRESS}:4333"
    leaf_hub = [f"nats://{HUB}:7422"]
    config.write_text(
        leaf_conf(who, name="leaf", listen=own, hub=leaf_hub, pid_file=pid_file), encoding="utf-8"
    )
    program = str(find_binary(None))
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet |= {"preexec_fn": dies_with_parent()}
    servers = []
    try:
        servers.append(subprocess.Popen([program, "-c", str(hub / hub_folder.CONFIG)], **quiet))
        asyncio.run(_streams(hub, stream_bytes))
        command = link.at_site([program, "-c", str(config)])
        servers.append(subprocess.Popen(command, **quiet))
        time.sleep(LEAF_S)
        yield f"nats://{HUB}:4222", f"nats://{own}"
    finally:
        for server in servers:
            server.kill()
            server.wait()


async def _streams(hub: Path, stream_bytes: int) -> None:
    """That sites write to."""
    credentials = hub / hub_folder.CREDENTIALS / "coordinator"
    bus = await NatsBus.connect(f"nats://{HUB}:4222", name="coordinator", credentials=credentials)
    filters = (subjects.run_streams("r")[subjects.up_stream("r")],)
    await bus.ensure_stream(StreamSpec(subjects.up_stream("r"), filters, stream_bytes))
    await bus.close()


def _fraction(rates: list[float]) -> float:
    """Of the link's rate, when as much is put as fetched, one after the other."""
    return len(rates) / sum(1 / rate for rate in rates) / FAST.bytes_per_s


def _training(args: argparse.Namespace, result: dict[str, Any]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="wan-") as folder,
        Link(THIN, args.seconds + Training.AROUND_S) as link,
    ):
        link.enter_hub()
        found = Training(Path(folder), link, args.learners).run(args.seconds)
    result["figures"] |= found.pop("figures")
    result["training"] = found | {"link": link.counts}
    print(f"\n{args.seconds:.0f} s of training over 10 Mbit/s, 60 ms, {args.learners} learners")
    for what, value in found.items():
        print(f"  {what}: {value}")


if __name__ == "__main__":
    main()
