"""Which of an island's processes this one is, by its settings or by those who started it; and
where their checkpoints are.

DILOCO_HOSTS=4 DILOCO_HOST_INDEX=1 DILOCO_HOST_ADDRESS=node0:8470    # said
DILOCO_HOSTS=slurm                                                   # asked of `srun`
DILOCO_HOSTS=4 DILOCO_HOST_ADDRESS=island-0.island:8470              # a Job of Kubernetes that
                                                                     # counts its pods
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

SLURM = "slurm"
# Where process 0 is listened to, where nothing else is said.
PORT = 8470
# More is a slip, and no island: process 0 holds two connections to each of the others.
HOSTS_MAX = 1024
# Jobs of Slurm that share a node must not share a port: theirs are this, and up to 9999 above.
SLURM_PORT = 20_000
# What checkpoints of all hosts may be in, besides folders.
BUCKETS = ("gs://", "s3://")
# The library that writes them takes a folder directly below / of one of these names for a bucket,
# and looks for what hosts have written by patterns, in which these letters mean something else.
_NOT_FOLDERS, _NOT_LETTERS = ("gs", "s3", "az", "hf"), "*?[]\\"


class WrongHosts(ValueError):
    """The settings do not say which of how many processes this is; the text says what to do."""


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Process `index` of `hosts`, counted from 0. `address` and `port`: of process 0."""

    hosts: int
    index: int
    address: str
    port: int

    @property
    def leads(self) -> bool:
        """Whether it is the one that speaks for all."""
        return self.index == 0


def hosts_of(hosts: str, environment: Mapping[str, str]) -> int:
    """How many processes DILOCO_HOSTS says that make one learner. Raises WrongHosts."""
    if not _by_slurm(hosts):
        return _number(hosts.strip(), "DILOCO_HOSTS", 1, HOSTS_MAX)
    tasks = environment.get("SLURM_NTASKS")
    if not tasks:
        raise _without_slurm()
    return _number(tasks, "SLURM_NTASKS", 1, HOSTS_MAX)


def place_of(
    hosts: str, index: int | None, address: str, environment: Mapping[str, str]
) -> HostPlace | None:
    """What the settings DILOCO_HOSTS, DILOCO_HOST_INDEX and DILOCO_HOST_ADDRESS mean.

    None where the island is this process alone. Raises WrongHosts.
    """
    many = hosts_of(hosts, environment)
    if _by_slurm(hosts):
        index, address = _of_slurm(index, address, environment)
    elif index is None and many > 1 and (counted := environment.get("JOB_COMPLETION_INDEX")):
        index = _number(counted, "JOB_COMPLETION_INDEX", 0, HOSTS_MAX)
    if many == 1:
        return None
    if index is None:
        raise WrongHosts(
            f"DILOCO_HOSTS says that {many} processes make one learner: give each its number from "
            "0 on in DILOCO_HOST_INDEX"
        )
    if not 0 <= index < many:
        raise WrongHosts(
            f"DILOCO_HOST_INDEX is {index}, and the processes of an island of {many} are counted "
            f"from 0 to {many - 1}"
        )
    if not address:
        raise WrongHosts(
            "DILOCO_HOST_ADDRESS must say where process 0 of this island is, as node0:8470, the "
            "same for all of them"
        )
    return HostPlace(many, index, *_address(address))


def checkpoints_at(text: str) -> str:
    """What DILOCO_HOSTS_CHECKPOINTS means: a bucket's address, the path of a folder, or "".

    Raises WrongHosts.
    """
    said = text.strip()
    if not said or said.startswith(BUCKETS):
        return said
    if "://" in said:
        raise WrongHosts(
            f"DILOCO_HOSTS_CHECKPOINTS is {said[:80]!r}: write the path of a folder, or an address "
            f"that begins with {' or '.join(BUCKETS)}"
        )
    if said.startswith("~"):
        raise WrongHosts(
            f"DILOCO_HOSTS_CHECKPOINTS is {said[:80]!r}, and nobody replaces the ~ here: write the "
            "whole path"
        )
    if odd := sorted(set(_NOT_LETTERS).intersection(said)):
        raise WrongHosts(
            f"DILOCO_HOSTS_CHECKPOINTS is {said[:80]!r}: the library that writes there finds "
            f"nothing again in a folder with {odd[0]!r} in its path: name a link to it"
        )
    path = PurePosixPath(said)
    if path.is_absolute() and path.parts[1:2] and path.parts[1] in _NOT_FOLDERS:
        raise WrongHosts(
            f"DILOCO_HOSTS_CHECKPOINTS is {said[:80]!r}, which the library that writes there takes "
            "for a bucket: mount that folder elsewhere, or name a link to it"
        )
    return said


def _by_slurm(hosts: str) -> bool:
    return hosts.strip().lower() == SLURM


def _without_slurm() -> WrongHosts:
    return WrongHosts(
        "DILOCO_HOSTS=slurm is for processes that srun started, and SLURM_NTASKS and "
        "SLURM_PROCID are not set: start them with srun, or give DILOCO_HOSTS a number"
    )


def _of_slurm(index: int | None, address: str, environment: Mapping[str, str]) -> tuple[int, str]:
    """(which, where) of a step that `srun` started. Raises WrongHosts."""
    task = environment.get("SLURM_PROCID")
    if not task:
        raise _without_slurm()
    if index is None:
        index = _number(task, "SLURM_PROCID", 0, HOSTS_MAX)
    if not address:
        names = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        port = (
            SLURM_PORT + int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0) % 10_000
        )
        address = f"{first_node(names)}:{port}" if names else ""
    return index, address


def first_node(names: str) -> str:
    """The first of the nodes that Slurm writes as `gpu[003-005,9],login1`. Raises WrongHosts."""
    found = re.match(r"([\w.-]+)(?:\[(\d+)[\d,-]*\])?([\w.-]*)", names)
    if found is None:
        raise WrongHosts(
            f"SLURM_STEP_NODELIST says {names[:60]!r}, which names no node: set DILOCO_HOST_ADDRESS"
        )
    return f"{found[1]}{found[2] or ''}{found[3]}"


def _address(text: str) -> tuple[str, int]:
    """(host, port). An address of IPv6 is written in brackets. Raises WrongHosts."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\s\[\]]+))(?::(\d{1,5}))?", text.strip())
    if found is None or (found[3] is not None and not 1 <= int(found[3]) <= 65_535):
        raise WrongHosts(
            f"DILOCO_HOST_ADDRESS is {text[:80]!r}: write a host and a port, as node0:8470"
        )
    return found[1] or found[2], int(found[3] or PORT)


def _number(text: str, name: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise WrongHosts(f"{name} is {text[:40]!r}: write a number from {least} to {most}")
    return int(text)
