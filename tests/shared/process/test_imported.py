"""Garbage collection at the start of the services."""

import gc
import os
import subprocess
import sys

import pytest

from diloco_shared.process.imported import importing

# A service whose work is to tell what is left to the collector.
STANDIN = """
import gc
import {package}.app as app
from {package}.__main__ import main

async def serve(*_):
    print(len(gc.get_objects()), gc.get_freeze_count(), gc.isenabled(), flush=True)

app.serve = serve
main()
"""
# What settings and an event loop have made since, in objects; imports alone leave 80,000 and more.
FEW = 20_000


def test_nothing_is_collected_while_a_process_imports_and_what_is_there_then_is_kept() -> None:
    before = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.get_freeze_count() >= before + len(kept)
    assert gc.isenabled()


def test_what_cannot_be_imported_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("package", ["diloco_coordinator", "diloco_syncer", "diloco_learner"])
def test_a_service_leaves_little_to_look_through(package: str) -> None:
    told = subprocess.run(
        [sys.executable, "-c", STANDIN.format(package=package)],
        env=os.environ | {"DILOCO_LOG": "ERROR", "GLIBC_TUNABLES": ""},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    ).stdout.split()
    assert int(told[0]) < FEW < int(told[1])
    assert told[2] == "True"
