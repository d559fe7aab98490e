"""A bucket in memory behind the protocol of S3 or of Google, as far as checkpoints need it."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Bucket:
    """A context manager; `endpoint` is where it answers, `objects` what it holds.

    scheme: s3 or gs. `asked`: the header `Authorization` of every request, and `parts`: how many
    bytes of an object each answer gave.
    """

    def __init__(self, scheme: str) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.parts: list[int] = []
        protocol = {"s3": _Amazon, "gs": _Google}[scheme]
        kept = {"objects": self.objects, "asked": self.asked, "parts": self.parts}
        kind = type("Handler", (protocol,), kept)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    objects: ClassVar[dict[str, bytes]]
    asked: ClassVar[list[str]]
    parts: ClassVar[list[int]]
    protocol_version = "HTTP/1.1"

    def parse_request(self) -> bool:
        sound = super().parse_request()
        if sound:
            self.asked.append(self.headers.get("Authorization", ""))
        return sound

    @property
    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    @property
    def query(self) -> dict[str, str]:
        return {name: found[0] for name, found in parse_qs(urlsplit(self.path).query).items()}

    def _give(self, body: bytes) -> None:
        """An object, or the part of it that is asked for."""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted is None:
            self.parts.append(len(body))
            self._answer(200, body, tag=body)
            return
        first, last = int(wanted[1]), int(wanted[2])
        if first >= len(body):
            self._answer(416)
            return
        part = body[first : last + 1]
        self.parts.append(len(part))
        end = first + len(part) - 1
        self._answer(206, part, tag=body, of=f"bytes {first}-{end}/{len(body)}")

    def _answer(
        self, status: int, body: bytes = b"", tag: bytes | None = None, of: str = ""
    ) -> None:
        self.send_response(status)
        if of:
            self.send_header("Content-Range", of)
        if tag is not None:
            self.send_header("ETag", f'"{_tag(tag)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""


class _Amazon(_Handler):
    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).partition("/")[2].partition("/")[2]

    def do_PUT(self) -> None:
        self.objects[self.key] = self.body
        self._answer(200, tag=self.objects[self.key])

    def do_GET(self) -> None:
        if not self.key:
            self._answer(200, self._listed())
        elif self.key in self.objects:
            self._give(self.objects[self.key])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_DELETE(self) -> None:
        self.objects.pop(self.key, None)
        self._answer(204)

    def _listed(self) -> bytes:
        prefix = self.query.get("prefix", "")
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>{_tag(self.objects[key])}</ETag></Contents>"
            for key in sorted(self.objects)
            if key.startswith(prefix)
        ]
        head = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        end = "<IsTruncated>false</IsTruncated></ListBucketResult>"
        return f"{head}{''.join(rows)}{end}".encode()


class _Google(_Handler):
    """Objects of a bucket lie below /storage/v1/b/BUCKET/o, uploads go to a place of their own."""

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path.partition("/o")[2].removeprefix("/"))

    def do_POST(self) -> None:
        self.objects[self.query["name"]] = self.body
        self._answer(200, self._told(self.query["name"]))

    def do_GET(self) -> None:
        if not self.key:
            first, end = self.query.get("startOffset", ""), self.query.get("endOffset", "\x7f")
            items = [{"name": key} for key in sorted(self.objects) if first <= key < end]
            self._answer(200, json.dumps({"items": items}).encode())
        elif self.key in self.objects:
            self._give(self.objects[self.key])
        else:
            self._answer(404)

    def do_DELETE(self) -> None:
        self._answer(404 if self.objects.pop(self.key, None) is None else 204)

    def _told(self, key: str) -> bytes:
        return json.dumps({"name": key, "size": str(len(self.objects[key]))}).encode()


def _tag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
