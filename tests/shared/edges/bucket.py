"""A bucket in memory behind the S3 protocol, as far as checkpoints need it."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar, Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Bucket:
    """A context manager; `endpoint` is where it answers, `objects` what it holds."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        kind = type("Handler", (_Handler,), {"objects": self.objects})
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
    protocol_version = "HTTP/1.1"

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).partition("/")[2].partition("/")[2]

    def do_PUT(self) -> None:
        self.objects[self.key] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, tag=self.objects[self.key])

    def do_GET(self) -> None:
        if not self.key:
            self._answer(200, self._listed())
        elif self.key in self.objects:
            self._answer(200, self.objects[self.key], tag=self.objects[self.key])
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def do_DELETE(self) -> None:
        self.objects.pop(self.key, None)
        self._answer(204)

    def _listed(self) -> bytes:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        rows = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>{_tag(self.objects[key])}</ETag></Contents>"
            for key in sorted(self.objects)
            if key.startswith(prefix)
        ]
        head = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        end = "<IsTruncated>false</IsTruncated></ListBucketResult>"
        return f"{head}{''.join(rows)}{end}".encode()

    def _answer(self, status: int, body: bytes = b"", tag: bytes | None = None) -> None:
        self.send_response(status)
        if tag is not None:
            self.send_header("ETag", f'"{_tag(tag)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""


def _tag(body: bytes) -> str:
    return hashlib.md5(body).hexdigest()
