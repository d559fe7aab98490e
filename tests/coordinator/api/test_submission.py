"""What can be known wrong at submission is refused there, with path, figure and setting (I11)."""

import threading
from typing import Any

import pytest

from diloco_shared.budget import known, streams
from diloco_shared.budget.job import _measured
from diloco_shared.bus.port import Refused
from diloco_shared.checking import check
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.protocol import subjects

SPEC = {"name": "demo", "budget": {"steps": 96}}
OWN = {"factory": "my_models:make"}


@pytest.mark.parametrize(
    ("changes", "path", "says"),
    [
        ({"model": {"preset": "gpt4"}}, "model.preset", "nano, micro, small, 35m"),
        ({"model": {"preset": "nona"}}, "model.preset", "'nona' is unknown"),
        ({"model": {"overrides": {"widht": 8}}}, "model.overrides.widht", "did you mean 'width'"),
        ({"model": {"factory": "my_models"}}, "model.factory", "module:factory"),
        ({"model": {"factory": "os:system:x"}}, "model.factory", "module:factory"),
        (
            {"model": {"overrides": {"vocabulary": 100}}},
            "model.overrides.vocabulary",
            "256 different tokens",
        ),
        ({"model": {"parameters": 5}}, "model.parameters", "has 133440"),
        ({"model": {"weights": "run:other"}}, "model.weights", "diloco export NAME"),
        ({"model": {"weights": "checkpoint:3"}}, "model.weights", "names no checkpoint"),
        (
            {"model": {"weights": "checkpoint:other.1/000003"}},
            "model.weights",
            "there is no checkpoint other.1/000003",
        ),
        ({"model": {**OWN, "weights": "w"}}, "model.weights", "names a folder, which is for"),
        ({"data": {"tokenizer": "gpt2"}}, "data.tokenizer", "'bytes'"),
        ({"data": {"source": " "}}, "data.source", "is empty"),
        ({"data": {"source": "s3://corpus"}}, "data.source", "folder that every learner has"),
        ({"budget": {"steps": 1e23}}, "budget.steps", "integer"),
        ({"budget": {"steps": 10**12}}, "budget.steps", "at most 274877906944"),
        ({"budget": {"seconds": 1e300}}, "budget.seconds", "1000000000"),
        ({"inner": {"learning_rate": 1e300}}, "inner.learning_rate", "1000"),
        ({"membership": {"learners_max": 10**6}}, "membership.learners_max", "1024"),
        ({"algorithm": {"quorum": 65}}, "algorithm.quorum", "learners_max (64)"),
        (
            {"model": {**OWN, "parameters": 10**13}},
            "algorithm.fragments",
            "at least 4657",
        ),
        ({"keeping": {"stream_bytes_max": 1 << 20}}, "keeping.stream_bytes_max", "DN needs"),
        (
            {"keeping": {"begin_again_after_s": 1e300}},
            "keeping.begin_again_after_s",
            "86400",
        ),
        ({"keeping": {"sream_bytes_max": 1}}, "keeping.sream_bytes_max", "'stream_bytes_max'"),
        ({"nmae": "x"}, "nmae", "did you mean 'name'"),
    ],
)
async def test_what_cannot_work_is_refused(
    world: Any, changes: dict[str, Any], path: str, says: str
) -> None:
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/runs", SPEC | changes)
        assert answer.status_code == 422, answer.text
        faults = {e["path"]: e["message"] for e in answer.json()["errors"]}
        assert says in faults[path], faults
        assert not desk.registry.runs


@pytest.mark.parametrize(
    ("section", "path", "says"),
    [
        ('"model": {"overrides": {"a": "\\ud800"}}', "model.overrides.a", "half a character"),
        ('"data": {"source": "\\ud800"}', "data.source", "half a character"),
        ('"\\ud800": 1', r"\ud800", "half a character"),
        (
            '"model": {"factory": "a:b", "overrides": {"a": 9e0, "b": 18446744073709551616}}',
            "model.overrides.b",
            "64 bits",
        ),
        ('"model": ' + "[" * 900 + "]" * 900, "model" + ".0" * 16, "16 levels deep"),
    ],
)
async def test_what_could_be_read_and_not_be_kept_is_named(
    world: Any, section: str, path: str, says: str
) -> None:
    body = '{"name": "demo", "budget": {"steps": 96}, ' + section + "}"
    async with world.coordinator() as desk:
        sent = {"Authorization": f"Bearer {desk.token}", "Content-Type": "application/json"}
        answer = await desk.http.post("/v1/runs", content=body, headers=sent)
        assert answer.status_code == 422, answer.text
        (fault,) = answer.json()["errors"]
        assert fault["path"] == path and says in fault["message"]
        assert not desk.registry.runs


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -float("inf")])
def test_no_number_that_is_none(number: float) -> None:
    with pytest.raises(ValueError, match=r"inner\.learning_rate: .*finite"):
        check(SPEC | {"inner": {"learning_rate": number}})


async def test_one_byte_too_little_is_refused_and_just_enough_is_not(world: Any) -> None:
    spec = SPEC | {"model": {"preset": "micro"}, "algorithm": {"codec_up": "int4"}}
    job = known(check(spec))
    assert job is not None
    needed = max(need.bytes for need in streams(job).values())
    async with world.coordinator() as desk:
        short = spec | {"keeping": {"stream_bytes_max": needed - 1}}
        answer = await desk.ask("POST", "/v1/runs", short)
        assert answer.status_code == 422
        (fault,) = answer.json()["errors"]
        assert fault["path"] == "keeping.stream_bytes_max" and str(needed) in fault["message"]
        enough = spec | {"keeping": {"stream_bytes_max": needed}}
        assert (await desk.ask("POST", "/v1/runs", enough)).status_code == 201


async def test_streams_are_promised_their_budget_at_submission(world: Any) -> None:
    spec = SPEC | {"model": {"preset": "gemma-12b"}}
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", spec)).status_code == 201
        job = known(check(spec))
        assert job is not None
        for kind, need in streams(job).items():
            info = await desk.registry.bus.stream_info(subjects.run_stream("demo", kind))
            assert info.bytes_max >= need.bytes


async def test_more_than_the_server_has_is_refused_with_the_figures(world: Any) -> None:
    world.broker.storage_max = 20 << 30
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/runs", SPEC | {"model": {"preset": "gemma-12b"}})
        assert answer.status_code == 422
        (fault,) = answer.json()["errors"]
        assert "max_file_store" in fault["message"] and "promised" in fault["message"]
        assert "DN" in fault["message"] and "GB" in fault["message"]
        # Nothing stays of it, and a smaller one goes ahead.
        assert not desk.registry.runs
        for stream in subjects.run_streams("demo"):
            with pytest.raises(Refused):
                await desk.registry.bus.stream_info(stream)
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201


async def test_a_large_specification_is_counted_once_and_not_on_the_event_loop(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests, watches and ends go on meanwhile."""
    threads = set()

    def looked(*given: Any) -> Any:
        threads.add(threading.get_ident())
        return check(*given)

    monkeypatch.setattr("diloco_coordinator.api.runs_io.check", looked)
    _measured.cache_clear()
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
    assert threads and threading.get_ident() not in threads
    assert _measured.cache_info().misses == 1


async def test_a_taken_name_leaves_the_streams_of_its_run_alone(world: Any) -> None:
    async with world.coordinator() as desk:
        assert (await desk.ask("POST", "/v1/runs", SPEC)).status_code == 201
        bus, name = desk.registry.bus, subjects.run_stream("demo", "DN")
        before = await bus.stream_info(name)
        world.broker.storage_max = (await bus.storage()).reserved
        again = await desk.ask("POST", "/v1/runs", SPEC | {"model": {"preset": "gemma-12b"}})
        assert again.status_code == 409
        assert await bus.stream_info(name) == before


async def test_a_run_begins_from_a_checkpoint_that_the_coordinator_reaches(
    world: Any, kept: Any
) -> None:
    """It fills in the model and the digest, so that every learner begins from the same."""
    async with world.coordinator() as desk:
        first = await desk.ask("POST", "/v1/runs", {**SPEC, "model": {"preset": "micro"}})
        ref = kept(first.json()["spec"], 3)
        begun = {**SPEC, "name": "more", "model": {"weights": f"checkpoint:{ref}"}}
        answer = await desk.ask("POST", "/v1/runs", begun)
        assert answer.status_code == 201, answer.text
        model = answer.json()["spec"]["model"]
        digest = RunCheckpoints(world.checkpoints).manifest(ref)[1]
        assert (model["preset"], model["weights_digest"]) == ("micro", digest)


async def test_more_copies_than_the_hub_has_nodes_are_refused_and_nothing_stays(world: Any) -> None:
    three = SPEC | {"keeping": {"replicas": 3}}
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/runs", three, Idempotency_Key="k")
        assert answer.status_code == 422
        (fault,) = answer.json()["errors"]
        assert fault["path"] == "keeping.replicas"
        assert "no 3 nodes" in fault["message"] and "Give 1" in fault["message"]
        assert "'diloco hub init' with --node HOST, once for each" in fault["message"]
        assert not desk.registry.runs
        world.broker.nodes = 3
        again = await desk.ask("POST", "/v1/runs", three, Idempotency_Key="k")
        assert again.status_code == 201, "that it was removed is no user's deletion"
        for stream in subjects.run_streams("demo"):
            assert (await desk.registry.bus.stream_info(stream)).replicas == 3


async def test_an_even_number_of_copies_is_refused_with_its_path(world: Any) -> None:
    async with world.coordinator() as desk:
        answer = await desk.ask("POST", "/v1/runs", SPEC | {"keeping": {"replicas": 2}})
        assert answer.status_code == 422
        (fault,) = answer.json()["errors"]
        assert fault["path"] == "keeping.replicas" and "give 1, 3 or 5" in fault["message"]
