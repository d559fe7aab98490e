"""Fixtures for all tests: coroutine tests, and a real nats-server on a free port."""

import asyncio
import gc
import inspect
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from random import Random

import pytest
import structlog
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.process.imported import importing
from diloco_simulator.virtual_loop import play

# Little is computed by what tests compile: fast compilation matters more than fast code. The last
# two take half of it each: no MLIR, and small programs are not cut into 32 pieces.
FAST_COMPILING = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", FAST_COMPILING)
# Examples in exploring for each one of every day.
EXPLORING = 20
# The same examples in every run, so that what is red is red because of what was changed. Exploring
# draws others every time, many more, and remembers what it found. Neither has a limit of time: a
# busy machine is no fault of what is tested.
settings.register_profile("ci", deadline=None, derandomize=True, database=None, max_examples=100)
settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    max_examples=100 * EXPLORING,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
# No test may hang: above the patience of a single wait, which says more, and below pytest's limit.
TEST_TIMEOUT_S = 180
# Objects before Python looks for garbage among the new ones, and how often it does before it looks
# among older ones. With its own limits that is a seventh of the tests' time. What tests hold is
# small, and 20,000 objects more are some megabytes.
COLLECTING = (20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What tests import stays, as in a service."""
    with importing():
        collected = yield
    gc.set_threshold(*COLLECTING)
    return collected


@pytest.fixture(autouse=True, scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What tests prepare of text is kept for as long as they run, and not in anybody's home."""
    folder = tmp_path_factory.getbasetemp() / "corpora"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco_learner.data.corpus.users_cache", lambda: folder)
        yield folder


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """What a test has them written to is closed after it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def` tests in a loop of their own; those marked `virtual` need not wait."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    marker = pyfuncitem.get_closest_marker("timeout")
    timeout_s = marker.args[0] if marker else TEST_TIMEOUT_S

    async def limited() -> None:
        async with asyncio.timeout(timeout_s):
            await pyfuncitem.obj(**arguments)

    marked = pyfuncitem.get_closest_marker
    if marked("virtual") and not marked("live"):
        play(limited(), Random(0))
    else:
        asyncio.run(limited())
    return True


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A running nats-server with an empty store of its own. Use only in tests marked `live`."""
    server = NatsServer(tmp_path / "nats", name="test")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())
