"""Which of an island's processes this one is."""

import pytest
from pydantic import ValidationError

from diloco_learner.hosts.place import (
    HostPlace,
    WrongHosts,
    checkpoints_at,
    first_node,
    hosts_of,
    place_of,
)
from diloco_learner.settings import Settings

SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_ID": "123456"}
NODES = {"SLURM_STEP_NODELIST": "gpu[003-005,9],login1"}


def test_one_process_is_no_island_of_several() -> None:
    assert place_of("1", None, "", {}) is None
    # Others may have been counted by whoever started this one: it was not told that it is theirs.
    assert place_of("1", None, "", SLURM | {"JOB_COMPLETION_INDEX": "3"}) is None


def test_what_is_said_counts() -> None:
    assert place_of("4", 1, "node0:9000", {}) == HostPlace(4, 1, "node0", 9000)
    assert place_of(" 4 ", 0, "node0", {}) == HostPlace(4, 0, "node0", 8470)
    assert place_of("2", 1, "[fd00::1]:9000", {}) == HostPlace(2, 1, "fd00::1", 9000)
    found = place_of("2", 0, "node0", {})
    assert found is not None and found.leads


def test_a_job_that_counts_its_pods_says_which_one_this_is() -> None:
    counted = {"JOB_COMPLETION_INDEX": "1"}
    assert place_of("2", None, "a-0.a", counted) == HostPlace(2, 1, "a-0.a", 8470)
    assert place_of("2", 0, "a-0.a", counted) == HostPlace(2, 0, "a-0.a", 8470)


def test_slurm_says_everything() -> None:
    assert place_of("slurm", None, "", SLURM | NODES) == HostPlace(4, 2, "gpu003", 23456)
    assert place_of("slurm", None, "head:1", SLURM) == HostPlace(4, 2, "head", 1)
    assert place_of("slurm", None, "", SLURM | NODES | {"SLURM_NTASKS": "1"}) is None


def test_how_many_there_are_is_known_without_which_this_one_is() -> None:
    """To check a run on one of them."""
    assert hosts_of("1", SLURM) == 1 and hosts_of(" 8 ", {}) == 8
    assert hosts_of("Slurm", {"SLURM_NTASKS": "4"}) == 4
    for hosts in ("slurm", "0", "many"):
        with pytest.raises(WrongHosts, match="DILOCO_HOSTS"):
            hosts_of(hosts, {})


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("rack2-[7,9]", "rack2-7"),
        ("n[1-2].example.org", "n1.example.org"),
    ],
)
def test_the_first_node_leads(names: str, first: str) -> None:
    assert first_node(names) == first


@pytest.mark.parametrize(
    ("hosts", "index", "address", "environment", "words"),
    [
        ("two", 0, "a", {}, "DILOCO_HOSTS is 'two': write a number from 1 to 1024"),
        ("0", 0, "a", {}, "DILOCO_HOSTS is '0'"),
        ("9999", 0, "a", {}, "from 1 to 1024"),
        ("2", None, "a", {}, "give each its number from 0 on in DILOCO_HOST_INDEX"),
        ("2", 2, "a", {}, "DILOCO_HOST_INDEX is 2, and the processes .* from 0 to 1"),
        ("2", -1, "a", {}, "DILOCO_HOST_INDEX is -1"),
        ("2", None, "a", {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX is 'x'"),
        ("2", 0, "", {}, "DILOCO_HOST_ADDRESS must say where process 0"),
        ("2", 0, "a:b:c", {}, "write a host and a port, as node0:8470"),
        ("2", 0, "a:0", {}, "write a host and a port"),
        ("2", 0, "a:70000", {}, "write a host and a port"),
        ("slurm", None, "", {}, "start them with srun"),
        ("slurm", None, "", SLURM, "DILOCO_HOST_ADDRESS must say"),
        ("slurm", None, "", SLURM | {"SLURM_STEP_NODELIST": "[1-2]"}, "names no node"),
    ],
)
def test_what_does_not_fit_is_told(
    hosts: str, index: int | None, address: str, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(WrongHosts, match=words):
        place_of(hosts, index, address, environment)


def test_limits_of_a_link_are_shared_out_among_those_who_use_it() -> None:
    given = Settings(uplink_bytes_per_s=8e6, downlink_bytes_per_s=2e6)
    each = given.of_host(4)
    assert (each.uplink_bytes_per_s, each.downlink_bytes_per_s) == (2e6, 5e5)
    alone = given.model_copy(update={"hosts_carry": "first"})
    assert alone.of_host(4) == alone, "process 0 has the link for itself"


def test_where_checkpoints_of_all_hosts_are() -> None:
    for place in ("", "/shared/diloco", "shared", "gs://bucket/folder", "/srv/s3/x", "/s3x", "."):
        assert checkpoints_at(f" {place} ") == place


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("file:///shared", "write the path of a folder"),
        ("http://x/y", "write the path of a folder"),
        ("~/shared", "write the whole path"),
        ("/s3/bucket", "takes for a bucket"),
        ("/gs", "takes for a bucket"),
        ("/shared/[1]", "finds nothing again"),
        ("/shared/*", "finds nothing again"),
    ],
)
def test_places_that_the_library_could_not_write_to_are_refused(place: str, why: str) -> None:
    with pytest.raises(WrongHosts, match=f"DILOCO_HOSTS_CHECKPOINTS is .*{why}"):
        checkpoints_at(place)
    with pytest.raises(ValidationError, match=why):
        Settings(hosts_checkpoints=place)
