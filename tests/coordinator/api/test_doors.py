"""Being let in, limits, problem details, health, metrics and the page."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

from diloco_coordinator.api.admin_token_io import FILE, AdminToken
from diloco_coordinator.api.auth_io import FAILURES_BURST
from diloco_coordinator.api.gateway_io import BODY_BYTES_MAX
from diloco_coordinator.api.listening_io import listen
from diloco_coordinator.app import Coordinator, Settings, measured
from diloco_coordinator.runs.registry_io import Registry
from diloco_shared.bus.port import TooFewNodes
from diloco_shared.process.loop_watch import Hold, LoopWatch
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.set_up import AddressTaken
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import StreamUse

SPEC: dict[str, Any] = {"name": "demo", "budget": {"steps": 96}}
OPEN = ("/", "/main.js", "/style.css", "/healthz", "/readyz", "/openapi.json")


async def test_everything_about_the_cluster_needs_a_token(world: Any) -> None:
    async with world.coordinator() as desk:
        for path in OPEN:
            assert (await desk.http.get(path)).status_code == 200, path
        described = (await desk.http.get("/openapi.json")).json()
        assert described["openapi"].startswith("3.1")
        assert (await desk.http.get("/metrics")).status_code == 401
        for path, operations in described["paths"].items():
            for method in operations if path.startswith("/v1") else ():
                answer = await desk.http.request(method, path)
                # Once the burst is used up, guessing has to wait.
                assert answer.status_code in (401, 429), (method, path)
                assert answer.headers["content-type"] == "application/problem+json"


async def test_guessing_is_bounded_per_address_and_the_owner_comes_in_from_elsewhere(
    world: Any,
) -> None:
    async with world.coordinator() as desk:
        codes = [
            (await desk.asks_as("wrong", "GET", "/v1/runs")).status_code
            for _ in range(FAILURES_BURST + 1)
        ]
        assert codes == [401] * FAILURES_BURST + [429]
        right = await desk.ask("GET", "/v1/runs")
        assert right.status_code == 429, "a guess that is right is answered like the others"
        assert int(right.headers["retry-after"]) >= 1
        transport = httpx.ASGITransport(desk.app, client=("10.0.0.9", 4000))
        headers = {"Authorization": f"Bearer {desk.token}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://c") as elsewhere:
            assert (await elsewhere.get("/v1/runs", headers=headers)).status_code == 200


async def test_who_came_in_before_is_not_locked_out_by_others_at_the_same_address(
    world: Any,
) -> None:
    async with world.coordinator() as desk:
        assert (await desk.ask("GET", "/v1/runs")).status_code == 200
        for _ in range(FAILURES_BURST + 1):
            answer = await desk.asks_as("wrong", "GET", "/v1/runs")
        assert answer.status_code == 429
        assert (await desk.ask("GET", "/v1/runs")).status_code == 200


async def fails_too_often(desk: Any) -> None:
    for _ in range(FAILURES_BURST + 1):
        answer = await desk.asks_as("wrong", "GET", "/v1/runs")
    assert answer.status_code == 429


async def test_a_token_that_nobody_can_guess_is_let_in_after_any_number_of_failures(
    world: Any,
) -> None:
    """A forgotten script from the same address; and after a restart nobody came in before."""
    async with world.coordinator() as desk:
        eve = await desk.makes("eve", "read")
    async with world.coordinator() as desk:
        await fails_too_often(desk)
        assert (await desk.asks_as(eve, "GET", "/v1/runs")).status_code == 200
        assert (await desk.ask("GET", "/v1/runs")).status_code == 429, "this one was chosen"


@pytest.mark.parametrize(
    ("token", "code"),
    [(None, 200), ("0123456789abcdef" * 4, 200), ("my favourite passphrase", 429)],
)
async def test_an_administrators_token_that_was_chosen_is_looked_at_by_the_door(
    world: Any, tmp_path: Path, token: str | None, code: int
) -> None:
    path = tmp_path / FILE
    if token is not None:
        path.write_text(f"{token}\n")
    world.admin = AdminToken.at(tmp_path, None)
    async with world.coordinator() as desk:
        desk.token = path.read_text().strip()
        await fails_too_often(desk)
        assert (await desk.ask("GET", "/v1/runs")).status_code == code


async def test_a_token_that_has_expired_is_no_failed_attempt(world: Any) -> None:
    async with world.coordinator() as desk:
        soon = {"name": "eve", "scopes": ["read"], "expires_in_s": 1e-6}
        eve = (await desk.ask("POST", "/v1/tokens", soon)).json()["token"]
    async with world.coordinator() as desk:
        for _ in range(FAILURES_BURST + 1):
            answer = await desk.asks_as(eve, "GET", "/v1/runs")
            assert answer.status_code == 401 and "has expired" in answer.json()["detail"]
        assert (await desk.ask("GET", "/v1/runs")).status_code == 200


async def test_too_large_a_body_is_refused_however_it_comes(world: Any) -> None:
    async with world.coordinator() as desk:
        headers = {"Authorization": f"Bearer {desk.token}"}

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(2 * BODY_BYTES_MAX // 65536):
                yield b" " * 65536

        for content in (b"[" + b" " * BODY_BYTES_MAX, pieces()):
            answer = await desk.http.post("/v1/runs", content=content, headers=headers)
            assert (answer.status_code, answer.json()["title"]) == (413, "Too large")
            assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("method", "path", "content", "code"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("PUT", "/v1/runs", None, 405),
        ("POST", "/v1/runs", b"{", 422),
        ("POST", "/v1/runs", b"[]", 422),
        ("GET", "/v1/runs?limit=0", None, 422),
        ("GET", "/v1/events?after=-1", None, 422),
        ("GET", "/../app.py", None, 404),
    ],
)
async def test_every_error_is_a_problem_detail(
    world: Any, method: str, path: str, content: bytes | None, code: int
) -> None:
    async with world.coordinator() as desk:
        headers = {"Authorization": f"Bearer {desk.token}", "Content-Type": "application/json"}
        answer = await desk.http.request(method, path, content=content, headers=headers)
        assert answer.status_code == code
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json().keys() >= {"type", "title", "status", "detail"}


async def test_the_page_loads_nothing_from_elsewhere(world: Any) -> None:
    async with world.coordinator() as desk:
        page = await desk.http.get("/")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        folder = Path(__file__).parents[3] / "services/coordinator/diloco_coordinator/web"
        for file in folder.iterdir():
            text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text and "https://" not in text, file.name
            assert (await desk.http.get(f"/{file.name}")).status_code == 200


async def test_ready_means_that_the_bus_is_there(world: Any) -> None:
    async with world.coordinator() as desk:
        assert (await desk.http.get("/readyz")).status_code == 200
        desk.registry.bus.disconnect()
        assert (await desk.http.get("/readyz")).status_code == 503
        assert (await desk.http.get("/healthz")).status_code == 200
        assert (await desk.ask("GET", "/v1/runs")).status_code == 200, "the mirror still answers"
        desk.registry.bus.reconnect()


async def test_a_balancer_may_ask_by_head(world: Any) -> None:
    async with world.coordinator() as desk:
        assert (await desk.http.head("/readyz")).status_code == 200
        desk.registry.bus.disconnect()
        assert (await desk.http.head("/readyz")).status_code == 503
        assert (await desk.http.head("/healthz")).status_code == 200
        desk.registry.bus.reconnect()
        described = (await desk.http.get("/openapi.json")).json()["paths"]
        assert [[*described[path]] for path in ("/healthz", "/readyz")] == [["get"]] * 2


async def test_a_hub_that_lost_its_majority_is_named(world: Any) -> None:
    """Connections to it stay."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", {"name": "demo", "budget": {"steps": 96}})
        world.broker.lose_leader()
        answer = await desk.http.get("/readyz")
        assert answer.status_code == 503 and "lost its majority" in answer.text
        run = (await desk.ask("GET", "/v1/runs/demo")).json()
        assert run["reason_codes"][-1] == "hub-away" and "lost its majority" in run["reason"]
        world.broker.elected()
        assert (await desk.http.get("/readyz")).status_code == 200


async def test_buckets_and_events_have_the_copies_that_were_asked_for(world: Any) -> None:
    world.broker.nodes = 3
    async with world.coordinator():
        pass
    mirror = Registry(world.bus, replicas=3)
    await mirror.prepare()
    for stream in ("KV_members", "KV_tokens", "EVENTS"):
        assert (await world.bus.stream_info(stream)).replicas == 3
    world.broker.nodes = 1
    with pytest.raises(TooFewNodes, match="set DILOCO_REPLICAS=1"):
        await Registry(world.bus, replicas=5).prepare()


async def test_metrics_of_the_whole_cluster(world: Any, status: Callable[..., Any]) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.joins("a", "b")
        await world.says(status())
        await world.tells("evaluation", val_loss=2.5, steps=8, each={"code": 2.25, "talk": 3.5})
        registry = desk.registry
        await until(lambda: registry.statuses and len(registry.roll.living) == 2)
        await until(lambda: registry.events[-1][1].kind == "evaluation")
        lines = (await desk.ask("GET", "/metrics")).text.splitlines()
        for line in (
            'diloco_members{role="learner"} 2.0',
            'diloco_runs{state="running"} 1.0',
            'diloco_run_state{run="demo",state="running"} 1.0',
            'diloco_export_failed{run="demo"} 0.0',
            'diloco_rounds_committed_total{run="demo"} 1.0',
            'diloco_tokens_processed_total{run="demo"} 4096.0',
            'diloco_tokens_useful_total{run="demo"} 2048.0',
            'diloco_tokens{became="overwritten",run="demo"} 40.0',
            'diloco_tokens_reread{run="demo"} 8.0',
            'diloco_refused_total{reason="non-finite",run="demo"} 3.0',
            'diloco_learners_alive{run="demo"} 2.0',
            'diloco_learners_participating{run="demo"} 1.0',
            'diloco_val_loss{run="demo"} 2.5',
            'diloco_val_loss_by_corpus{corpus="code",run="demo"} 2.25',
            'diloco_val_loss_by_corpus{corpus="talk",run="demo"} 3.5',
            'diloco_http_requests_total{method="POST",status="2xx"} 1.0',
            "diloco_hub_connected 1.0",
        ):
            assert line in lines, line
        registry.bus.disconnect()
        assert "diloco_hub_connected 0.0" in (await desk.ask("GET", "/metrics")).text
        registry.bus.reconnect()


async def test_living_syncers_are_counted_by_shard_of_runs_that_go_on(
    world: Any, status: Callable[..., Any]
) -> None:
    """A syncer works for one shard of one run: three of them may be no standby at all."""
    sharded = {"fragments": 2, "shards": 2}
    async with world.coordinator() as desk:
        registry, ids = desk.registry, {}
        for run, wish in (("demo", sharded), ("over", {"fragments": 2}), ("next", {})):
            body = {"name": run, "budget": {"steps": 96}, "algorithm": wish}
            ids[run] = (await desk.ask("POST", "/v1/runs", body)).json()["spec"]["id"]
        for name, run, shard in (("s1", "demo", 0), ("s2", "demo", 0), ("s3", "demo", 1)):
            await world.joins(name, role="syncer", run=run, shard=shard, state="standby")
        await until(lambda: len(registry.roll.living) == 3)
        for name, shard in (("s1", 0), ("s2", 0), ("s3", 1)):
            await registry.assign(name, "demo", shard)
        await world.says(status(versions=(1, -1), run_id=ids["demo"]))
        await world.says(status("over", "finished", run_id=ids["over"]))
        await until(lambda: len(registry.statuses) == 2)

        async def counted() -> list[str]:
            text = (await desk.ask("GET", "/metrics")).text
            return [x for x in text.splitlines() if x.startswith("diloco_syncers_alive{")]

        line = 'diloco_syncers_alive{run="demo",shard="%d"} %.1f'
        assert await counted() == [line % (0, 2), line % (1, 1)]
        await world.dies("s2")
        await until(lambda: len(registry.roll.living) == 2)
        assert await counted() == [line % (0, 1), line % (1, 1)]


async def test_health_and_metrics_are_on_a_port_of_their_own(world: Any, tmp_path: Path) -> None:
    """Loopback unless told so, and without a token; the API's own metrics need one."""
    settings = Settings(data=tmp_path / "kept")
    assert settings.health_host == settings.host == "127.0.0.1" and not settings.chaos
    folder = DataFolder(settings.data, "coordinator")
    watch = LoopWatch()
    watch.worst = Hold(0.5, "digest (wire.py:9)")
    coordinator = Coordinator(settings, world.bus, folder, "secret", loop_watch=watch)
    with listen(settings.health_host, settings.health_port, "DILOCO_HEALTH_PORT") as bound:
        base = f"http://127.0.0.1:{bound.getsockname()[1]}"
        async with measured(bound, "c") as server, httpx.AsyncClient(base_url=base) as http:
            coordinator.tell(server)
            assert "diloco_members" in (await http.get("/metrics")).text
            told = {"loop_lag_max_s": 0.5, "loop_lag_by": "digest (wire.py:9)", "loop_held": 0}
            known = {"id": "coordinator", "bus": "connected", **told}
            assert (await http.get("/healthz")).json() == known
            assert (await http.get("/readyz")).status_code == 503, "nothing is mirrored yet"
            for path in ("/v1/runs", "/", "/openapi.json"):
                assert (await http.get(path)).status_code == 404
    folder.release()


async def test_metrics_of_a_run_that_nobody_leads_any_more_go_on_ageing(
    world: Any, status: Callable[..., Any]
) -> None:
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        await world.says(status(since_round_s=2.0))
        registry = desk.registry
        await until(lambda: bool(registry.statuses))
        registry.standings.renewed_at[subjects.status_key("demo", 0)] -= 100.0
        text = (await desk.ask("GET", "/metrics")).text
        (line,) = [x for x in text.splitlines() if x.startswith("diloco_seconds_since_round{")]
        assert float(line.split()[1]) >= 102.0


async def metrics(desk: Any, name: str) -> list[str]:
    text = (await desk.ask("GET", "/metrics")).text
    return [line for line in text.splitlines() if line.startswith(f"{name}{{")]


async def test_streams_of_runs_that_are_over_are_in_no_alert(
    world: Any, status: Callable[..., Any]
) -> None:
    """They are nearly full for ever, and nobody will write to them."""
    held = {"UP": StreamUse(bytes=90, limit=100)}
    async with world.coordinator() as desk:
        for run in ("demo", "over"):
            await desk.ask("POST", "/v1/runs", SPEC | {"name": run})
        await world.says(status("demo", streams=held))
        await world.says(status("over", "finished", streams=held))
        await until(lambda: len(desk.registry.statuses) == 2)
        for name in ("diloco_stream_bytes", "diloco_stream_limit_bytes"):
            assert [x.partition("}")[0] for x in await metrics(desk, name)] == [
                f'{name}{{run="demo",stream="UP"'
            ]


async def test_no_count_is_shown_as_none_before_it_is_known(
    world: Any, status: Callable[..., Any]
) -> None:
    """As while a coordinator begins: from there to what it was would be an increase."""
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        desk.registry.ready = False
        assert await metrics(desk, "diloco_refused_total") == []


async def test_counters_that_alerts_watch_are_there_before_their_first_count(
    world: Any, status: Callable[..., Any]
) -> None:
    """Of a counter that begins with 3 no increase is ever seen."""
    refused = 'diloco_refused_total{reason="%s",run="demo"} %.1f'
    failed = 'diloco_evaluations_failed_total{run="demo"} %.1f'
    async with world.coordinator() as desk:
        await desk.ask("POST", "/v1/runs", SPEC)
        assert await metrics(desk, "diloco_refused_total") == [refused % ("non-finite", 0)]
        assert await metrics(desk, "diloco_evaluations_failed_total") == [failed % 0]
        await world.says(status(refused={"late": 2}))
        await until(lambda: desk.registry.statuses)
        for n in (1, 2):
            await world.tells("evaluation-failed", learner="a")
            await until(lambda some=n: len(desk.registry.events) == some + 1)
            for _ in range(2):  # whoever asks again counts nothing twice
                assert await metrics(desk, "diloco_evaluations_failed_total") == [failed % n]
        found = await metrics(desk, "diloco_refused_total")
        assert found == [refused % ("non-finite", 0), refused % ("late", 2)]
        desk.registry.told.kept.clear()
        assert await metrics(desk, "diloco_evaluations_failed_total") == [failed % 2]


async def test_members_that_are_gone_are_counted_unless_they_were_drained(world: Any) -> None:
    async with world.coordinator() as desk:
        notes = desk.registry.roll.notes
        await world.joins("a", "b", "c")
        await world.joins("s", role="syncer")
        await until(lambda: len(notes) == 4)
        assert (await desk.ask("POST", "/v1/members/b/drain")).status_code == 200
        for name in ("a", "b", "s"):
            await world.dies(name)
        await until(lambda: len(desk.registry.roll.living) == 1)
        line = 'diloco_members_gone{role="%s"} %.1f'
        found = await metrics(desk, "diloco_members_gone")
        assert found[:2] == [line % ("learner", 1), line % ("syncer", 1)]
        await world.joins("a")
        await until(lambda: notes["a"].alive)
        assert (await metrics(desk, "diloco_members_gone"))[0] == line % ("learner", 0)


def test_a_port_that_is_taken_is_told() -> None:
    with listen("127.0.0.1", 0) as first:
        first.listen()
        with pytest.raises(AddressTaken, match=r"is taken: set DILOCO_PORT to another"):
            listen("127.0.0.1", first.getsockname()[1])
