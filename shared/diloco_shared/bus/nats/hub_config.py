"""What a hub's message server is told: its own settings, and who may connect. Text, and no IO.

Every fenced identity (rights.py) has an account. From it lead *service imports*: what is published
there on one of its subjects arrives in the hub's account, with an answer's subject of the server's
own, so that an answer can only come back. And *stream imports*: what is published in the hub on one
of its subjects arrives there. The patterns of `rights_of` stand in both the imports and the user's
permissions.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_shared.bus.nats.access import API, HUB_API
from diloco_shared.bus.nats.keys import Credentials, inbox_of
from diloco_shared.bus.nats.rights import (
    IDENTITIES_MAX,
    LEADING_NOWHERE,
    Identity,
    Rights,
    of_any_site,
    rights_of,
)
from diloco_shared.hub.leaves import SYSTEM
from diloco_shared.protocol import subjects

HUB = "HUB"
ACCOUNTS = "accounts.conf"  # beside the server's configuration, which includes it
PID = "nats-server.pid"
# One message may be a manifest of 1 MiB plus headers; chunks are half a MiB.
PAYLOAD_BYTES_MAX = 2 << 20
# For the handshake of TLS, in seconds. The server's own two are few for a site behind a slow link,
# and for a machine on which everything starts at once.
HANDSHAKE_S = 10
# Of one site: an island of a thousand hosts with two connections each. The server takes 65,536 of
# all together, so that some thirty stolen keys would be needed to keep others out.
CONNECTIONS_MAX = 2048
# Each connection has one for its answers and some ten more; readers of streams have no more.
SUBSCRIPTIONS_MAX = 16 * CONNECTIONS_MAX
# Of the servers that are one hub together.
CLUSTER = "diloco"
# What identities say, and what the hub's account makes of it.
_OTHER_NAMES = ((HUB_API, API), (subjects.HUB_KEYS, subjects.KEYS))
# An answer may be given once, within this: askers wait for 2 s.
_ANSWERS = {"max": 1, "expires": "5s"}


@dataclass(frozen=True, slots=True)
class Routes:
    """How one node of a hub reaches the others: names of files, and what each must say of itself.

    `others`: host and port of their routes. Whoever has the password, and a certificate where there
    are some, is a node and may do everything.
    """

    listen: str
    others: Sequence[tuple[str, int]]
    password: str = field(repr=False)
    certificate: str = ""
    key: str = ""
    authority: str = ""


def hub_conf(
    *,
    listen: str,
    store: str,
    pid_file: str,
    name: str = "hub",
    routes: Routes | None = None,
    certificate: str = "",
    key: str = "",
    clients_authority: str = "",
    monitor: str = "",
    leaves: str = "",
    file_bytes_max: int = 0,
) -> str:
    """A nats-server's configuration, to lie beside ACCOUNTS. Operators may change it.

    `name`: the server's; of nodes of one hub, each has another one, for good, and `routes`.
    `clients_authority`: the file of the authority that must have signed a certificate of whoever
    connects; empty: nobody needs one. `monitor`: where its monitoring listens, which tells whoever
    reaches it what streams and connections there are; empty: nowhere. `leaves`: where it listens to
    message servers of sites (`leaf_conf`); empty: nowhere. `file_bytes_max`: what all streams
    together may hold; 0: the server's own rule.
    """
    jetstream = [f"store_dir: {in_config(store)}", "sync_interval: always"]
    if file_bytes_max:
        jetstream.append(f"max_file_store: {file_bytes_max}")
    lines = [
        "# The message server of a hub. Who may connect stands in accounts.conf, which is made",
        "# anew by every diloco site command; this file is yours to change.",
        f"server_name: {in_config(name)}",
        f"listen: {in_config(listen)}",
        f"max_payload: {PAYLOAD_BYTES_MAX}",
        'ping_interval: "10s"',
        "ping_max: 2",
        f"pid_file: {in_config(pid_file)}",
    ]
    if monitor:
        lines.append(f"http: {in_config(monitor)}")
    tls = ""
    if certificate:
        files = [f"cert_file: {in_config(certificate)}", f"key_file: {in_config(key)}"]
        if clients_authority:
            files += [f"ca_file: {in_config(clients_authority)}", "verify: true"]
        files.append(f"timeout: {HANDSHAKE_S}")
        tls = f"tls {{ {', '.join(files)} }}"
        lines.append(tls)
    if leaves:
        # What the hub knows as its address need not be what sites reach it under.
        said = [f"listen: {in_config(leaves)}", "no_advertise: true", *([tls] if tls else [])]
        lines.append(f"leafnodes {{ {', '.join(said)} }}")
    if routes is not None:
        lines.append(f"cluster: {in_config(cluster(routes), indent=1)}")
    lines += ["jetstream {", *(f"  {line}" for line in jetstream), "}", f"include {ACCOUNTS!r}", ""]
    return "\n".join(lines)


def leaf_conf(
    credentials: Credentials,
    *,
    name: str,
    listen: str,
    hub: Sequence[str],
    pid_file: str,
    authority: str = "",
    certificate: str = "",
) -> str:
    """Configuration of a site's own message server (a *leaf node*): it holds the site's secret.

    It keeps nothing. What the site's processes say goes to the hub over its one connection, in the
    name and with the rights of the site. They present the same credentials to it as to the hub.
    `hub`: addresses of the hub's nodes, for leaves. `authority`, `certificate`: files in PEM, which
    say whom to trust, and who this is to a hub that demands a certificate.
    """
    tls: dict[str, Any] = {"ca_file": authority} if authority else {}
    if certificate:
        tls |= {"cert_file": certificate, "key_file": certificate}
    remote: dict[str, Any] = {"urls": [*hub], "account": "SITE", "nkey": credentials.seed}
    settings: dict[str, Any] = {
        "server_name": name,
        "listen": listen,
        "max_payload": PAYLOAD_BYTES_MAX,
        "ping_interval": "10s",
        "ping_max": 2,
        "pid_file": pid_file,
        "accounts": {"SITE": {"users": [{"nkey": credentials.public_key}]}},
        "leafnodes": {
            # The first after so long; it tries for as long as it runs.
            "reconnect": "1s",
            "remotes": [remote | ({"tls": tls} if tls else {})],
        },
    }
    return (
        "# A site's own message server. It holds the site's secret: nobody else may read it.\n"
        + in_config(settings, indent=1)[1:-1].strip("\n")
        + "\n"
    )


def in_config(value: object, indent: int | None = None) -> str:
    """A value as the server's configuration language has it, which takes JSON, and comments.

    Of JSON's escapes it knows few, and not those of letters beyond ASCII: these stand there as they
    are, so the file is UTF-8.
    """
    return json.dumps(value, indent=indent, ensure_ascii=False)


def cluster(routes: Routes) -> dict[str, Any]:
    """What a node is told of the others."""
    login = f"{CLUSTER}:{routes.password}"
    found: dict[str, Any] = {
        "name": CLUSTER,
        "listen": routes.listen,
        "authorization": {"user": CLUSTER, "password": routes.password, "timeout": 3},
        # Clients are told of all nodes by their operators: what a node knows as the addresses of
        # others need not be what sites reach them under.
        "no_advertise": True,
        "routes": [f"nats-route://{login}@{host}:{port}" for host, port in routes.others],
    }
    if routes.certificate:
        named = {"cert": routes.certificate, "key": routes.key, "ca": routes.authority}
        files = {f"{kind}_file": file for kind, file in named.items()}
        found["tls"] = files | {"verify": True, "timeout": 3}
    return found


def accounts_conf(identities: Sequence[Identity], system_password: str = "") -> str:
    """The text of ACCOUNTS. Raises ValueError where identities do not go together.

    `system_password`: of who ends connections of sites' message servers; empty: nobody does.
    """
    check_together(identities)
    found = {HUB: _hub(identities)}
    found |= {_account(i): _site(i) for i in identities if i.fenced}
    system = ""
    if system_password:
        found[SYSTEM] = {"users": [{"user": SYSTEM, "password": system_password}]}
        system = f"system_account: {SYSTEM}\n"
    return f"accounts: {in_config(found, indent=1)}\n{system}"


def check_together(identities: Sequence[Identity]) -> None:
    """Raises ValueError: too many, or two of one name, of one key, or for one member."""
    if len(identities) > IDENTITIES_MAX:
        raise ValueError(f"{len(identities)} identities: a hub takes {IDENTITIES_MAX}")
    _differ("name", ((i.name, i.name) for i in identities), "give one of them another")
    keys = ((key, i.name) for i in identities for key in i.keys)
    _differ("key", keys, "make another with 'diloco site key'")
    members = ((member, i.name) for i in identities for member in i.spoken_for)
    _differ("member", members, "take it out of one of them first, or give it another id")


def _differ(what: str, owned: Iterable[tuple[str, str]], change: str) -> None:
    owners: dict[str, str] = {}
    for thing, owner in owned:
        if thing in owners:
            raise ValueError(f"{what} {thing} is of both {owners[thing]} and {owner}: {change}")
        owners[thing] = owner


def _account(identity: Identity) -> str:
    return f"SITE-{identity.name}"


def _hub(identities: Sequence[Identity]) -> dict[str, Any]:
    """The account with the streams, and of all that works at the hub itself."""
    shared = of_any_site()
    return {
        "jetstream": "enabled",
        "mappings": {f"{own}.>": f"{servers}.>" for own, servers in _OTHER_NAMES},
        "users": _users([i for i in identities if not i.fenced]),
        # No list of accounts: this file alone says who imports what, and it need not change here
        # when a site comes or goes.
        "exports": [
            *(_service(_asked(pattern)) for pattern in _leading_in(shared)),
            *({"stream": pattern} for pattern in _leading_out(shared, "*")),
        ],
        "imports": [
            {"service": {"account": _account(i), "subject": subjects.chaos(member)}}
            for i in identities
            if i.fenced
            for member in i.spoken_for
        ],
    }


def _site(identity: Identity) -> dict[str, Any]:
    """The account of one fenced identity: it has no streams of its own."""
    rights = rights_of(identity)
    faults = [subjects.chaos(member) for member in identity.spoken_for]
    return {
        "users": _users([identity]),
        "limits": {
            "max_connections": CONNECTIONS_MAX,
            "max_subscriptions": SUBSCRIPTIONS_MAX,
            "max_payload": PAYLOAD_BYTES_MAX,
        },
        "imports": [
            *(_imported(pattern) for pattern in _leading_in(rights)),
            *(
                {"stream": {"account": HUB, "subject": pattern}}
                for pattern in _leading_out(rights, identity.name)
                if pattern not in faults
            ),
        ],
        "exports": [{"service": pattern, "accounts": [HUB]} for pattern in faults],
    }


def _imported(pattern: str) -> dict[str, Any]:
    found: dict[str, Any] = {"service": {"account": HUB, "subject": _asked(pattern)}}
    # An account's own questions about streams go to itself, which has none: hence the other name.
    return found | ({"to": pattern} if pattern != _asked(pattern) else {})


def _asked(pattern: str) -> str:
    """The same in the hub's account."""
    for own, servers in _OTHER_NAMES:
        if pattern.startswith(f"{own}."):
            return servers + pattern.removeprefix(own)
    return pattern


def _all_asked(patterns: Iterable[str]) -> list[str]:
    # The hub's account translates what is asked before it looks whether that is allowed.
    return [_asked(pattern) for pattern in patterns]


def _service(pattern: str) -> dict[str, Any]:
    # A question about a stream's messages is answered with many.
    kind = "stream" if pattern.startswith(API) else "singleton"
    return {"service": pattern, "response_type": kind}


def _leading_in(rights: Rights) -> list[str]:
    return [pattern for pattern in rights.publish if pattern not in LEADING_NOWHERE]


def _leading_out(rights: Rights, name: str) -> list[str]:
    return [p for p in rights.subscribe if p != f"{inbox_of(name)}.>" and p != subjects.chaos("*")]


def _users(identities: Sequence[Identity]) -> list[dict[str, Any]]:
    found = []
    for identity in identities:
        rights = rights_of(identity)
        name = list if identity.fenced else _all_asked
        permissions: dict[str, Any] = {
            "publish": {"allow": name(rights.publish), "deny": name(rights.never)},
            "subscribe": {"allow": [*rights.subscribe]},
        }
        if rights.answers:
            permissions["allow_responses"] = _ANSWERS
        found += [{"nkey": key, "permissions": permissions} for key in identity.keys]
    return found
