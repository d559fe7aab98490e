"""Attacks on the REST interface, by whoever reaches its port or has somebody's token."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from live.attacks import cases as c
from live.attacks.cases import How, attack
from live.attacks.scene import GUESSER, OWNER, RUN, STRANGER, Scene, small_run
from waiting import until

Body = dict[str, Any] | None


async def audited(scene: Scene, **expected: Any) -> dict[str, Any]:
    """The next row of the audit log that has all of this."""
    rows: list[dict[str, Any]] = []

    async def there() -> dict[str, Any] | None:
        rows.extend(await scene.audit())
        found = [r for r in rows if all(r[name] == value for name, value in expected.items())]
        return found[-1] if found else None

    try:
        row: dict[str, Any] = await until(there, f"a row of {expected}", patience_s=10, every_s=0.1)
    except AssertionError as error:
        raise AssertionError(f"{error}; there are {rows}") from None
    return row


async def refused(
    scene: Scene, how: How, status: int, actor: str, method: str, path: str, **request: Any
) -> httpx.Response:
    """A request is answered with that status, and has its row with the actor."""
    token = request.pop("token", scene.tokens.get(actor, ""))
    address = request.pop("address", OWNER)
    answer = await scene.ask(method, path, token or "none", address, **request)
    assert answer.status_code == status, (method, path, answer.status_code, answer.text[:500])
    where = {"address": address, "method": method, "status": status}
    await audited(scene, actor=actor, **where)
    how.seen(scene)
    return answer


def turned_away(
    name: str,
    by: str,
    how: How,
    status: int,
    actor: str,
    requests: tuple[tuple[str, str, Any], ...],
    **more: Any,
) -> None:
    """An attack that is some requests of one token, all refused alike."""

    @attack("rest", name, by, how)
    async def play(scene: Scene) -> None:
        for method, path, body in requests:
            given = body(scene) if callable(body) else body
            await refused(scene, how, status, actor, method, path, json=given, **more)


# --------------------------------------------------------------------------------------------------
# Tokens.

turned_away(
    "asks without a token, and with a made-up one",
    c.NOBODY,
    c.UNKNOWN,
    401,
    "",
    (
        ("GET", "/v1/runs", None),
        ("POST", f"/v1/runs/{RUN}/stop", None),
        ("DELETE", f"/v1/runs/{RUN}", None),
        ("POST", "/v1/tokens", {"name": "mine", "scopes": ["administer"]}),
    ),
    address=STRANGER,
)
turned_away("uses a token after its end", c.EXPIRED, c.ENDED, 401, "expired",
            (("GET", "/v1/runs", None), ("POST", f"/v1/runs/{RUN}/stop", None)))  # fmt: skip
turned_away("uses a token after it was revoked", c.REVOKED, c.UNKNOWN, 401, "",
            (("GET", "/v1/runs", None),), token="revoked")  # fmt: skip
turned_away("uses a token after it was replaced", c.ROTATED, c.UNKNOWN, 401, "",
            (("GET", "/v1/runs", None),), token="rotated")  # fmt: skip


@attack("rest", "guesses tokens until it may come in", c.GUESSER, c.WAITS)
async def guesses(scene: Scene) -> None:
    codes = [
        (await scene.ask("GET", "/v1/runs", f"guess-{n}", GUESSER)).status_code for n in range(21)
    ]
    assert codes == [401] * 20 + [429], codes
    more = await scene.ask("GET", "/v1/runs", "one more guess", GUESSER)
    assert more.status_code == 429 and int(more.headers["retry-after"]) >= 1
    right = await scene.ask("GET", "/v1/runs", scene.tokens["reader"], GUESSER)
    assert right.status_code == 200, "256 random bits are no guess"
    elsewhere = await scene.ask("GET", "/v1/runs", scene.tokens["reader"])
    assert elsewhere.status_code == 200, "who comes from elsewhere is not kept out"
    await audited(scene, actor="", status=429, address=GUESSER)
    c.WAITS.seen(scene)


turned_away(
    "submits, stops and deletes runs",
    c.READ,
    c.SCOPE,
    403,
    "reader",
    (
        ("POST", "/v1/runs", {"name": "mine"}),
        ("POST", f"/v1/runs/{RUN}/stop", None),
        ("DELETE", f"/v1/runs/{RUN}", None),
        ("PATCH", f"/v1/runs/{RUN}", {"quorum": 1}),
        ("POST", f"/v1/runs/{RUN}/begin-again", None),
        ("DELETE", "/v1/members/a-1", None),
    ),
)
turned_away(
    "makes itself an administrator",
    c.OPERATOR,
    c.SCOPE,
    403,
    "operator",
    (
        ("POST", "/v1/tokens", {"name": "mine", "scopes": ["administer"]}),
        ("POST", "/v1/tokens/operator/rotate", {"overlap_s": 0}),
        ("POST", "/v1/tokens/admin/rotate", {"overlap_s": 0}),
        ("DELETE", "/v1/tokens/reader", None),
        ("GET", "/v1/audit", None),
    ),
)
turned_away("inflicts faults", c.OPERATOR, c.SCOPE, 403, "operator",
            (("POST", "/v1/chaos", {"kind": "kill", "target": "a-1"}),
             ("POST", "/v1/chaos", {"kind": "kill", "target": "nats"})))  # fmt: skip
turned_away(
    "reaches runs and members that its token does not name",
    c.OPERATE,
    c.SCOPE,
    403,
    "limited",
    (
        ("POST", "/v1/runs", {"name": "rr"}),
        ("POST", "/v1/members/a-1/drain", None),
        ("DELETE", "/v1/checkpoints/other.ab/1", None),
        ("POST", "/v1/checkpoints/submit?checkpoint=other.ab/000001", {"name": RUN}),
    ),
)


@attack("rest", "names one run for the check and another one for the deed", c.OPERATE, c.SCOPE)
async def twice_named(scene: Scene) -> None:
    doubled = b'{"name": "r", "name": "elsewhere", "budget": {"steps": 96}}'
    headers = {"Content-Type": "application/json"}
    await refused(
        scene, c.SCOPE, 403, "limited", "POST", "/v1/runs", content=doubled, headers=headers
    )


@attack("rest", "sends two tokens in one request", c.READ, c.SCOPE)
async def two_tokens(scene: Scene) -> None:
    path = f"/v1/runs/{RUN}/stop"
    for first, second, status in (("reader", "x" * 43, 403), ("x" * 43, "reader", 401)):
        headers = [
            ("Authorization", f"Bearer {scene.tokens.get(token, token)}")
            for token in (first, second)
        ]
        answer = await scene.http().request("POST", path, headers=headers)
        assert answer.status_code == status, answer.text
    await audited(scene, actor="reader", status=403)
    c.SCOPE.seen(scene)


@attack("rest", "says in a header that it comes from another address", c.GUESSER, c.ALONE)
async def another_address(scene: Scene) -> None:
    headers = {"X-Forwarded-For": "10.1.2.3", "Forwarded": "for=10.1.2.3"}
    answer = await scene.ask(
        "POST", f"/v1/runs/{RUN}/stop", scene.tokens["reader"], STRANGER, headers=headers
    )
    assert answer.status_code == 403
    await audited(scene, actor="reader", status=403, address=STRANGER)
    c.ALONE.seen(scene)


# --------------------------------------------------------------------------------------------------
# Requests that are too large, nested, packed or not even requests.

HEADERS = {"Content-Type": "application/json"}


@attack("rest", "sends two megabytes", c.OPERATOR, c.TOO_LARGE)
async def too_large(scene: Scene) -> None:
    body = b'{"name": "' + b"x" * (2 << 20) + b'"}'
    await refused(
        scene, c.TOO_LARGE, 413, "operator", "POST", "/v1/runs", content=body, headers=HEADERS
    )


@attack("rest", "sends megabytes without saying how many, and without a token", c.NOBODY,
        c.TOO_LARGE)  # fmt: skip
async def endless(scene: Scene) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    with_answer: httpx.Response | None = None
    with suppress(httpx.HTTPError):  # answered and closed before all of it was sent
        with_answer = await scene.http(STRANGER).post("/v1/runs", content=pieces())
    assert with_answer is None or with_answer.status_code == 413
    await audited(scene, actor="", status=413, address=STRANGER)
    c.TOO_LARGE.seen(scene)


@attack("rest", "nests JSON a hundred thousand deep", c.OPERATOR, c.UNREADABLE)
async def deep(scene: Scene) -> None:
    for body in (b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000):
        answer = await scene.ask(
            "POST", "/v1/runs", scene.tokens["operator"], content=body, headers=HEADERS
        )
        assert answer.status_code in (400, 422), answer.text[:300]
        await audited(scene, actor="operator", status=answer.status_code)
    c.UNREADABLE.seen(scene)


@attack("rest", "sends a body that unpacks to a gigabyte", c.OPERATOR, c.UNREADABLE)
async def packed(scene: Scene) -> None:
    body = gzip.compress(bytes(1 << 24))
    headers = {**HEADERS, "Content-Encoding": "gzip"}
    await refused(
        scene, c.UNREADABLE, 400, "operator", "POST", "/v1/runs", content=body, headers=headers
    )


@attack("rest", "names numbers that no machine can hold", c.OPERATOR, c.INVALID)
async def numbers(scene: Scene) -> None:
    for budget in ({"steps": 10**300}, {"steps": -1}, {"steps": 1e999}):
        body = json.dumps({"name": "big", "budget": budget}).encode()
        await refused(
            scene, c.INVALID, 422, "operator", "POST", "/v1/runs", content=body, headers=HEADERS
        )


@attack("rest", "hides a run's or a token's name behind look-alike letters", c.OPERATOR, c.INVALID)
async def look_alikes(scene: Scene) -> None:
    for name in ("\uff52", "\u0433", "r\u200b", "R", "r\n", "r\0", "r.", "../r", "r" * 64,
                 "<script>alert(1)</script>", "\u202er", "r\r\nX: y"):  # fmt: skip
        given = {"name": name, "budget": {"steps": 96}}
        await refused(scene, c.INVALID, 422, "operator", "POST", "/v1/runs", json=given)
    for name in ("admin", "\u0430dmin", "Admin"):
        made = {"name": name, "scopes": ["read"]}
        answer = await scene.ask("POST", "/v1/tokens", json=made)
        assert answer.status_code == 422, answer.text


async def said(scene: Scene, *pieces: bytes, address: str = STRANGER) -> bytes:
    """What is answered to bytes on a connection of their own."""
    host, _, port = scene.url.removeprefix("https://").rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=scene.trust, server_hostname="localhost", local_addr=(address, 0)
    )
    try:
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@attack("rest", "smuggles a second request behind two lengths of a body", c.NOBODY, c.NO_REQUEST)
async def smuggles(scene: Scene) -> None:
    inner = f"POST /v1/runs/{RUN}/stop HTTP/1.1\r\nHost: h\r\n\r\n".encode()
    log = scene.log_of("coordinator")
    for lengths in (
        b"Content-Length: 0\r\nContent-Length: 80",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked",
        b"Content-Length: +5",
        b"Transfer-Encoding: chunked, identity",
        b"Content-Length : 5",
        b"Content-Length: 5\r\n\tX: y",
    ):
        head = b"POST /v1/runs HTTP/1.1\r\nHost: h\r\n" + lengths + b"\r\n\r\n"
        answer = await said(scene, head, b"0\r\n\r\n" + inner)
        assert b" 400 " in answer.split(b"\r\n")[0], (lengths, answer[:200])
        assert answer.count(b"HTTP/1.1 ") == 1, "a second request was answered"
    assert "Invalid HTTP request" in scene.log_of("coordinator")[len(log) :]
    c.NO_REQUEST.seen(scene)


@attack("rest", "sends 200 kB of headers, and what is no HTTP", c.NOBODY, c.NO_REQUEST)
async def headers(scene: Scene) -> None:
    log = scene.log_of("coordinator")
    many = b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(200))
    for words in (b"GET / HTTP/1.1\r\nHost: h\r\n" + many + b"\r\n", b"\x16\x03\x01" + bytes(64)
                  + b"\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n\r\n"):  # fmt: skip
        answer = await said(scene, words)
        assert answer == b"" or b" 400 " in answer.split(b"\r\n")[0], answer[:200]
    assert "Invalid HTTP request" in scene.log_of("coordinator")[len(log) :]
    c.NO_REQUEST.seen(scene)


@attack("rest", "speaks plain HTTP to the port that speaks https", c.BETWEEN, c.NO_REQUEST)
async def without_tls(scene: Scene) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.HTTPError):
            await http.get(scene.url.replace("https", "http") + "/v1/runs")
    c.NO_REQUEST.seen(scene)


@attack("rest", "poses as the coordinator with a certificate of another authority", c.BETWEEN,
        c.NOT_TRUSTED)  # fmt: skip
async def another_authority(scene: Scene) -> None:
    other = scene.folder / "tls" / "other.pem"
    said = scene.command("runs", ca=other, status=3)
    assert "certificate" in said, said
    c.NOT_TRUSTED.seen(scene)


@asynccontextmanager
async def never_ending(scene: Scene) -> AsyncIterator[list[Any]]:
    """Connections that begin a request and do not end it."""
    host, _, port = scene.url.removeprefix("https://").rpartition(":")
    opened = []
    body = b"POST /v1/runs HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{"
    for words in (b"", b"GET /v1/runs HTTP/1.1\r\nHost: h\r\nX: ", body):
        secured: dict[str, Any] = {"ssl": scene.trust, "server_hostname": "localhost"}
        where = {"host": host, "port": int(port), "local_addr": (STRANGER, 0)}
        opened.append(await asyncio.open_connection(**where, **secured))
        opened[-1][1].write(words)
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


@attack("rest", "sends requests that never end, a byte now and then", c.NOBODY, c.SLOW)
async def slow(scene: Scene) -> None:
    assert scene.slow, "they were begun before all other attacks"

    async def ended(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with_bytes = asyncio.create_task(reader.read())
        try:
            while not with_bytes.done():
                if writer.transport.is_closing():
                    break
                writer.write(b"x")
                await asyncio.wait({with_bytes}, timeout=0.5)
        except ConnectionError:
            pass
        with_bytes.cancel()

    async with asyncio.timeout(60):
        await asyncio.gather(*(ended(r, w) for r, w in scene.slow))
    assert "not complete in time" in scene.log_of("coordinator")
    assert STRANGER in scene.log_of("coordinator")
    c.SLOW.seen(scene)


# --------------------------------------------------------------------------------------------------
# Paths and addresses in requests.


@attack("rest", "leads the page's address out of its folder", c.NOBODY, c.NO_PAGE)
async def out_of_the_page(scene: Scene) -> None:
    for path in ("/../app.py", "/..%2fapp.py", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd",
                 "/main.js%00.py", "/" + "a" * 5000, "/..\\app.py", "/%252e%252e/app.py",
                 "/%c0%ae%c0%ae/app.py", "/file:///etc/passwd"):  # fmt: skip
        line = f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
        answer = await said(scene, line.encode())
        assert answer.split(b"\r\n")[0].split()[1] in (b"404", b"400"), (path, answer[:200])
        assert b"root:" not in answer and b"import " not in answer
    c.NO_PAGE.seen(scene)


@attack("rest", "leads the download of an export out of its folder", c.READ, c.NO_PAGE)
async def out_of_an_export(scene: Scene) -> None:
    token = scene.tokens["reader"]
    for file in ("..%2f..%2fadmin-token", "%2e%2e/admin-token", "%2fetc%2fpasswd", "a%00b"):
        path = f"/v1/runs/{RUN}/exports/x/files/{file}"
        line = f"GET {path} HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {token}\r\n"
        answer = await said(scene, line.encode() + b"Connection: close\r\n\r\n")
        assert answer.split(b"\r\n")[0].split()[1] == b"404", answer[:200]
        assert scene.admin.encode() not in answer
    c.NO_PAGE.seen(scene)


ELSEWHERE = (
    "s3://169.254.169.254/latest",
    "s3://bucket",
    "gs://metadata.google.internal/x",
    "http://127.0.0.1:9/x",
    "https://hub.example.org/x",
    "file:///etc",
    "file://host/etc",
    "/etc",
    "../outside",
    "~/x",
    "/proc/self",
    "s3://bucket@127.0.0.1/x",
    "s3://b%2f..%2fx",
    "\0",
    "x" * 5000,
)


@attack("rest", "has the coordinator ask another host, bucket or folder for a checkpoint",
        c.OPERATOR, c.ABSENT)  # fmt: skip
async def asks_elsewhere(scene: Scene) -> None:
    for place in ELSEWHERE:
        path = "/v1/checkpoints/submit"
        request = {"json": {"name": "mine"}, "params": {"checkpoint": f"{place}/r.ab/000001"}}
        await refused(scene, c.ABSENT, 404, "operator", "POST", path, **request)


@attack("rest", "has a run keep or begin with checkpoints elsewhere", c.OPERATOR, c.INVALID)
async def keeps_elsewhere(scene: Scene) -> None:
    for place in ELSEWHERE:
        kept = small_run(scene, "mine", keeping={"run_checkpoint_root": place})
        begun = small_run(scene, "mine", model={"weights": f"checkpoint:{place}/r.ab/000001"})
        for given in (kept, begun):
            answer = await refused(
                scene, c.INVALID, 422, "operator", "POST", "/v1/runs", json=given
            )
            assert "mine.ab" not in answer.text


@attack("rest", "follows a link in the place of checkpoints out of it", c.OPERATOR, c.ABSENT)
async def linked_checkpoints(scene: Scene) -> None:
    root = scene.running.data / "checkpoints"
    root.mkdir(exist_ok=True)
    link = root / "link.ab"
    link.symlink_to(scene.folder / "outside")
    params = {"checkpoint": "link.ab/000001"}
    try:
        answer = await refused(
            scene, c.ABSENT, 404, "operator", "POST", "/v1/checkpoints/submit",
            json={"name": "mine"}, params=params,
        )  # fmt: skip
        assert str(scene.folder) not in answer.text
    finally:
        link.unlink()
