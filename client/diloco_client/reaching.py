"""How a server is reached: whose certificates are trusted, through which proxy, and what failed.

Nothing here waits; a file of certificates is read.
"""

import ipaddress
import ssl
from collections.abc import Mapping
from urllib.parse import urlsplit

import certifi
import httpx

# Files of certificates to trust, the first one that is set.
CA_VARIABLES = ("DILOCO_CA", "SSL_CERT_FILE")
# Of OpenSSL: what is wrong with a certificate that nobody can be helped with by trusting another.
_EXPIRED, _NOT_YET, _OTHER_NAME, _OTHER_ADDRESS = 10, 9, 62, 64


def trusted(url: str, ca: str, environ: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Which authorities are trusted: those of a file alone if there is one, else all known ones.

    Known are those of the system, and those that come with Python's packages: a small container has
    none of its own. Raises ValueError for a file that cannot be read, or holds no certificate.
    """
    if urlsplit(url).scheme != "https":
        return True
    named = [("--ca", ca), *((name, environ.get(name, "")) for name in CA_VARIABLES)]
    said, file = next(((name, value) for name, value in named if value), ("", ""))
    if not file:
        context = ssl.create_default_context()
        context.load_verify_locations(certifi.where())
        return context
    try:
        return ssl.create_default_context(cafile=file)
    except (OSError, ValueError) as error:
        why = "it holds no certificate" if isinstance(error, ssl.SSLError) else _strerror(error)
        raise ValueError(
            f"{said} names {file}, which cannot be used: {why}; give a PEM file with the "
            "certificate of the authority that signed the server's"
        ) from None


def _strerror(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).lower()


def proxy_of(url: str, environ: Mapping[str, str]) -> str:
    """The proxy for a server, "" for none: as other programs understand the variables.

    NO_PROXY lists hosts, domains (with or without a dot before them), networks such as 10.0.0.0/8,
    any of them with a port, or *.
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or {"https": 443, "http": 80}.get(parts.scheme, 0)
    if _of_this_machine(host) or _excepted(host, port, _variable(environ, "no_proxy")):
        return ""
    found = _variable(environ, f"{parts.scheme}_proxy") or _variable(environ, "all_proxy")
    return found if "://" in found or not found else f"http://{found}"


def without_password(proxy: str) -> str:
    """An address without what stands before its host."""
    scheme, _, rest = proxy.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _variable(environ: Mapping[str, str], name: str) -> str:
    """Either spelling; the small one counts first, as it does elsewhere."""
    return (environ.get(name) or environ.get(name.upper()) or "").strip()


def _of_this_machine(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _excepted(host: str, port: int, listed: str) -> bool:
    return any(_matches(host, port, entry.strip()) for entry in listed.split(","))


def _matches(host: str, port: int, entry: str) -> bool:
    if entry in ("", "*"):
        return entry == "*"
    name, _, wanted = entry.rpartition(":")
    if name and wanted.isdigit() and (":" not in name or name.startswith("[")):
        if int(wanted) != port:
            return False
        entry = name
    entry = entry.strip("[]")
    address = _address(host)
    if address is not None:
        try:
            return address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    domain = entry.lstrip("*").lstrip(".").lower()
    return host.lower() == domain or host.lower().endswith("." + domain)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def cut_off(error: Exception) -> bool:
    """Whether the connection ended after a request was sent and before its answer was whole.

    Something else than HTTP is no such answer.
    """
    if isinstance(error, httpx.RemoteProtocolError):
        # "Server disconnected without sending a response", "peer closed connection without ...".
        return any(said in str(error) for said in ("disconnected", "closed connection"))
    return isinstance(error, httpx.ReadError)


def what_failed(error: httpx.HTTPError, url: str) -> str:
    """Why a server's certificate is not believed, and what to do; "" if something else failed."""
    found = _verification(error)
    if found is None:
        return ""
    server = f"the certificate of {url}"
    match found.verify_code:
        case code if code in (_EXPIRED, _NOT_YET):
            return (
                f"{server} is not valid today ({found.verify_message}): renew it, or set the clock "
                "of this machine"
            )
        case code if code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"{server} is for another name ({found.verify_message.rstrip('.')}): use the "
                "address that it is for, or give the server one for this address"
            )
    return (
        f"{server} is not trusted ({found.verify_message}): if an authority of your own signed it, "
        "give the file of that authority's certificate with --ca or DILOCO_CA"
    )


def _verification(error: BaseException) -> ssl.SSLCertVerificationError | None:
    """The refusal to believe that an error comes from, if it comes from one."""
    seen: BaseException | None = error
    for _ in range(10):  # a chain of causes is short
        if seen is None or isinstance(seen, ssl.SSLCertVerificationError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None
