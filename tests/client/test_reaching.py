"""An authority of one's own, and proxies: against a server and a proxy on this machine."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import diloco_cli.api
from diloco_cli.api import connect, explained
from diloco_cli.cluster import Where
from diloco_cli.words import INVALID, NO_CLUSTER, CliError
from diloco_client import Client, Unreachable, Untrusted
from diloco_client.reaching import proxy_of, trusted

NAME = "coordinator.test"  # which no resolver knows: only a proxy leads there


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem of an authority, and cert.pem that it signed for NAME and 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make certificates")
    folder = tmp_path_factory.mktemp("tls")
    new = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    new += ["-nodes", "-days", "2"]

    def make(name: str, *more: str) -> None:
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        subprocess.run([*new, *files, *more], cwd=folder, check=True, capture_output=True)

    make("ca")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE")
    make("cert", *signed, "-addext", f"subjectAltName=IP:127.0.0.1,DNS:{NAME}")
    make("other", *signed, "-addext", "subjectAltName=DNS:elsewhere.test")
    return folder


class Answering(BaseHTTPRequestHandler):
    """A coordinator as far as a client's `health` asks."""

    def do_GET(self) -> None:
        body = json.dumps({"alive": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def served(server: ThreadingHTTPServer) -> Iterator[int]:
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def server_of(tls: Path, name: str) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / f"{name}.pem", tls / f"{name}.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


@pytest.fixture
def port(tls: Path) -> Iterator[int]:
    """Of a server whose certificate is good."""
    yield from served(server_of(tls, "cert"))


@pytest.fixture
def misnamed(tls: Path) -> Iterator[int]:
    """Of a server whose certificate is for another name."""
    yield from served(server_of(tls, "other"))


class Proxy(ThreadingHTTPServer):
    """Leads everybody to one port of this machine, and notes who was asked for."""

    def __init__(self, to: int) -> None:
        super().__init__(("127.0.0.1", 0), Tunnel)
        self.to = to
        self.asked: list[tuple[str, str]] = []  # the target, and with which password


class Tunnel(Answering):
    server: Proxy

    def do_CONNECT(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Proxy-Authorization", "")))
        with socket.create_connection(("127.0.0.1", self.server.to)) as there:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=_pass_on, args=(there, self.connection), daemon=True)
            back.start()
            _pass_on(self.connection, there)
            back.join(5)
        self.close_connection = True


def _pass_on(source: socket.socket, to: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.fixture
def proxy(port: int) -> Iterator[Proxy]:
    found = Proxy(port)
    running = served(found)
    next(running)
    yield found
    next(running, None)


@pytest.mark.parametrize("said", ["ca", "DILOCO_CA", "SSL_CERT_FILE"])
def test_an_authority_of_ones_own_is_trusted_where_it_is_named(
    tls: Path, port: int, said: str
) -> None:
    file = str(tls / "ca.pem")
    environ = {} if said == "ca" else {said: file}
    ca = file if said == "ca" else ""
    with Client(f"https://127.0.0.1:{port}", "t", ca=ca, environ=environ) as client:
        assert client.health() == {"alive": True} and client.ready()


def test_the_option_counts_before_the_variables(tls: Path, port: int) -> None:
    environ = {"DILOCO_CA": str(tls / "ca.pem"), "SSL_CERT_FILE": "/nowhere"}
    with Client(f"https://127.0.0.1:{port}", "t", environ=environ) as client:
        assert client.ready()
    with pytest.raises(ValueError, match="--ca names /nowhere"):
        Client(f"https://127.0.0.1:{port}", "t", ca="/nowhere", environ=environ)


def test_a_certificate_that_is_not_trusted_says_what_to_do(tls: Path, port: int) -> None:
    with Client(f"https://127.0.0.1:{port}", "t", environ={}) as client:
        for call in (client.health, lambda: list(client.stream_events())):
            with pytest.raises(Untrusted) as caught:
                call()
            text = str(caught.value)
            assert f"https://127.0.0.1:{port} is not trusted" in text and "--ca" in text
    error = explained(caught.value, Where())
    assert error.status == NO_CLUSTER and "is it running" not in str(error)


def test_a_certificate_for_another_name_is_not_mended_by_trusting_more(
    tls: Path, misnamed: int
) -> None:
    ca = str(tls / "ca.pem")
    with Client(f"https://127.0.0.1:{misnamed}", "t", ca=ca, environ={}) as client:
        with pytest.raises(Untrusted, match="is for another name") as caught:
            client.health()
        assert "--ca" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "no certificate\n"])
def test_a_file_without_certificates_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    where = Where(url="https://far:1", token="t", ca=str(file))
    with pytest.raises(CliError, match=r"--ca names .*ca\.pem, which cannot be used") as caught:
        connect(where).__enter__()
    assert caught.value.status == INVALID


def test_a_server_is_asked_through_the_proxy_and_by_its_own_certificate(
    tls: Path, proxy: Proxy
) -> None:
    address = f"127.0.0.1:{proxy.server_address[1]}"
    environ = {
        "HTTPS_PROXY": f"http://me:pass-word@{address}",
        "SSL_CERT_FILE": str(tls / "ca.pem"),
    }
    with Client(f"https://{NAME}:8400", "t", environ=environ) as client:
        assert client.health() == {"alive": True}
    ((asked, password),) = proxy.asked
    assert asked == f"{NAME}:8400" and password.startswith("Basic ")
    with (
        Client("https://elsewhere.test:1", "t", environ=environ) as client,
        pytest.raises(Untrusted, match="another name"),
    ):
        client.health()


def test_a_proxy_that_is_away_is_named_without_its_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    environ = {"HTTPS_PROXY": f"http://me:pass-word@127.0.0.1:{free_port}"}
    with (
        Client(f"https://{NAME}", "t", environ=environ) as client,
        pytest.raises(Unreachable, match=rf"through the proxy http://127.0.0.1:{free_port}") as e,
    ):
        client.health()
    assert "pass-word" not in str(e.value)


def test_this_machine_is_asked_without_a_proxy(tls: Path, port: int, proxy: Proxy) -> None:
    environ = {"ALL_PROXY": f"http://127.0.0.1:{proxy.server_address[1]}"}
    ca = str(tls / "ca.pem")
    with Client(f"https://127.0.0.1:{port}", "t", ca=ca, environ=environ) as client:
        assert client.ready()
    assert proxy.asked == []


def test_a_name_and_password_of_netrc_do_not_replace_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Noting(Answering):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            super().do_GET()

    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    running = served(ThreadingHTTPServer(("127.0.0.1", 0), Noting))
    with Client(f"http://127.0.0.1:{next(running)}", "t0ken") as client:
        client.health()
    next(running, None)
    assert seen == ["Bearer t0ken"]


def test_a_proxy_that_needs_another_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where it is not installed
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(CliError, match=r"ALL_PROXY.*'socksio'.*NO_PROXY") as caught:
        connect(Where(url="http://far:1", token="t")).__enter__()
    assert caught.value.status == INVALID


@pytest.mark.parametrize(
    ("url", "environ", "proxy"),
    [
        ("https://a.org", {}, ""),
        ("https://a.org", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://a.org", {"https_proxy": "p:1", "HTTPS_PROXY": "http://q:1"}, "http://p:1"),
        ("https://a.org", {"HTTP_PROXY": "http://p:1"}, ""),
        ("http://a.org", {"HTTP_PROXY": "http://p:1"}, "http://p:1"),
        ("http://a.org", {"ALL_PROXY": "http://p:1"}, "http://p:1"),
        ("https://a.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": "*"}, ""),
        ("https://a.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": "b.org, a.org"}, ""),
        ("https://x.a.org", {"ALL_PROXY": "http://p:1", "no_proxy": ".a.org"}, ""),
        ("https://x.a.org", {"ALL_PROXY": "http://p:1", "no_proxy": "*.a.org"}, ""),
        ("https://xa.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": "a.org"}, "http://p:1"),
        ("https://a.org:8400", {"ALL_PROXY": "http://p:1", "NO_PROXY": "a.org:8400"}, ""),
        ("https://a.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": "a.org:8400"}, "http://p:1"),
        ("https://a.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": "a.org:443"}, ""),
        ("https://10.1.2.3", {"ALL_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, ""),
        ("https://11.1.2.3", {"ALL_PROXY": "http://p:1", "NO_PROXY": "10.0.0.0/8"}, "http://p:1"),
        ("https://10.1.2.3", {"ALL_PROXY": "http://p:1", "NO_PROXY": "10.1.2.3"}, ""),
        ("https://[2001:db8::1]:9", {"ALL_PROXY": "http://p:1", "NO_PROXY": "2001:db8::/32"}, ""),
        ("https://[2001:db8::1]:9", {"ALL_PROXY": "http://p:1", "NO_PROXY": "[2001:db8::1]:9"}, ""),
        ("https://127.0.0.1:8400", {"ALL_PROXY": "http://p:1"}, ""),
        ("http://localhost:8400", {"ALL_PROXY": "http://p:1"}, ""),
        ("https://[::1]:8400", {"ALL_PROXY": "http://p:1"}, ""),
        ("https://a.org", {"ALL_PROXY": "http://p:1", "NO_PROXY": ", ,"}, "http://p:1"),
    ],
)
def test_which_proxy_leads_to_a_server(url: str, environ: dict[str, str], proxy: str) -> None:
    assert proxy_of(url, environ) == proxy


def test_nothing_is_read_for_an_address_without_certificates() -> None:
    assert trusted("http://a.org", "/nowhere", {"DILOCO_CA": "/nowhere"}) is True


def test_the_command_passes_its_authority_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def client(url: str, token: str, **more: str) -> Any:
        given.update(more)
        return contextlib.nullcontext()

    monkeypatch.setattr(diloco_cli.api, "Client", client)
    with connect(Where(url="https://far:1", token="t", ca="own.pem")):
        assert given == {"ca": "own.pem"}
