"""What `diloco doctor` makes of what was measured: a verdict, and what to do. Pure.

Every function takes what one check measured, and gives one line. What it says never holds a secret:
nothing here is given one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from diloco_cli.words import counted
from diloco_shared.budget import Job, Need
from diloco_shared.budget.terms import shown
from diloco_shared.budget.traffic import transfers
from diloco_shared.gpus import unused

if TYPE_CHECKING:  # what was measured, and not how
    from diloco_shared.bus.nats.probing import ClockSample, Rate

# What a library or a server says may be long; nobody reads more of it.
TEXT_MAX = 500

Verdict = Literal["ok", "warn", "FAIL", "skipped"]

# What needs what: where one FAILs, those that need it are skipped, and a mistake is told once.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "settings": (),
    "name": ("settings",),
    "port": ("name",),
    "TLS": ("port",),
    "credentials": ("TLS",),
    "nodes": ("credentials",),
    "rights": ("credentials",),
    "round trip": ("credentials",),
    "clock": ("credentials", "nodes"),
    "versions": ("credentials", "nodes"),
    "bandwidth up": ("rights",),
    "bandwidth down": ("credentials", "nodes"),
    "disk": ("settings",),
    "hosts' checkpoints": (),
    "devices": (),
}
CHECKS = tuple(NEEDS)  # besides those of a run, which have names of their own

# A certificate is renewed by a person, who may be away for some weeks.
ENDS_SOON_DAYS = 30.0
# Times in events and logs of several sites are compared by people. Beyond the second limit tokens
# and certificates are refused, and buckets refuse what was signed at another time.
CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 300.0
# Beyond it one connection does not fill a link: docs/how-to/deploy.md.
FAR_S = 0.03
# A learner counts as gone after 5 s of silence unless the run says otherwise, and reports twice a
# second: a ping that takes this long leaves it no second chance.
SLOW_S = 2.0
# Slower than this, one fragment of the smallest useful model takes minutes.
THIN_BYTES_PER_S = 125_000.0
# Of the message server: keys of buckets that expire, streams that say how they are kept.
OLDEST, ADVISED = (2, 11), (2, 12)
# A chunk of a fragment and its headers must fit into one message; for the first parameters of a
# model of thousands of tensors also a manifest of 1 MiB.
PAYLOAD_BYTES_MIN, PAYLOAD_BYTES_ADVISED = 1 << 20, 2 << 20
# Where no run says what it needs: logs, and moments of a small model.
FREE_BYTES_WARN = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one check. `figures`: by name, units in it."""

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def view(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "text": self.text,
            "remedy": self.remedy,
            "figures": dict(self.figures),
        }


def sound(findings: Sequence[Finding]) -> bool:
    """Whether a machine with these findings can work."""
    return not any(finding.verdict == "FAIL" for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    bad, doubtful = (
        sum(finding.verdict == verdict for finding in findings) for verdict in ("FAIL", "warn")
    )
    if bad:
        return f"{counted(bad, 'check')} failed: mend the first one, and ask again"
    rest = f"; {counted(doubtful, 'warning')}" if doubtful else ""
    return f"this machine can work for the hub{rest}"


def blocked(name: str, failed: Mapping[str, str]) -> Finding | None:
    """The finding in the place of a check that needs one that failed, or was left out itself.

    `failed`: by name of a check, the one whose failure it goes back to.
    """
    for need in NEEDS.get(name, ()):
        if need in failed:
            return Finding(name, "skipped", f"needs what failed: {failed[need]}")
    return None


def late(name: str, limit_s: float, why: str) -> Finding:
    """A check that was not done in its time."""
    return Finding(name, "FAIL", f"was not done within {limit_s:g} s", why)


def failed(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, "FAIL", " ".join(text.split())[:TEXT_MAX], remedy)


# --------------------------------------------------------------------------------------------------
# The way to the hub.


def resolved(host: str, addresses: Sequence[str], error: str) -> Finding:
    """Whether the hub's name has an address. `error`: what the resolver said where it has none."""
    if list(addresses) == [host]:
        return Finding("name", "ok", f"{host} is an address already")
    if addresses:
        return Finding("name", "ok", f"{host} is {', '.join(addresses)}")
    return failed(
        "name",
        f"{host} has no address ({error})",
        "see that DILOCO_NATS_URL has the hub's name, and that this machine's resolver knows it",
    )


def reached(host: str, port: int, refusals: Mapping[str, str], seconds: float | None) -> Finding:
    """`refusals`: by address, why it took no connection; `seconds`: how long the one that did."""
    if seconds is not None:
        rest = f"; not at {_tried(refusals)}" if refusals else ""
        text = f"{host}:{port} takes connections, in {1e3 * seconds:.3g} ms{rest}"
        return Finding("port", "warn" if refusals else "ok", text, _one_address(refusals))
    silent = all("timed out" in why for why in refusals.values())
    remedy = (
        "nothing comes back: have the firewalls between let this machine connect to that port"
        if silent
        else "see that the message server runs, and that DILOCO_NATS_URL has its port"
    )
    return failed("port", f"{host}:{port} takes no connection: {_tried(refusals)}", remedy)


def _tried(refusals: Mapping[str, str]) -> str:
    return ", ".join(f"{address} ({why})" for address, why in refusals.items())


def _one_address(refusals: Mapping[str, str]) -> str:
    return "take the address out of the name, or make it answer: each try costs time" * bool(
        refusals
    )


def no_message_server(host: str, port: int, said: str) -> Finding:
    """It took the connection, and did not say what a message server says."""
    return failed(
        "port",
        f"{host}:{port} is no message server: it {said}",
        "see that DILOCO_NATS_URL has the port of the hub's nats-server, and that no proxy answers",
    )


@dataclass(frozen=True, slots=True)
class Encrypted:
    """A handshake that worked. Unix seconds; `own_ends` None: it is not known, or there is none."""

    version: str
    issuer: str
    ends: float
    own_ends: float | None = None


# Of OpenSSL, what is wrong with a certificate: X509_V_ERR_...
EXPIRED, NOT_YET, OTHER_NAME, OTHER_ADDRESS = 10, 9, 62, 64


def encrypted(found: Encrypted, now: float) -> Finding:
    """For how many days the certificates of this handshake are good. `now`: Unix seconds."""
    days = (found.ends - now) / 86400
    text = f"{found.version}, certified by {found.issuer} for {days:.0f} more days"
    figures = {"days_left": days}
    soon = ["the hub's certificate ends soon: have it renewed"] if days < ENDS_SOON_DAYS else []
    if found.own_ends is not None:
        own = (found.own_ends - now) / 86400
        figures["own_days_left"] = own
        text += f"; this site's certificate is good for {own:.0f}"
        if own < ENDS_SOON_DAYS:
            soon.append("this site's ends soon: 'diloco site rotate' at the hub makes another")
    return Finding("TLS", "warn" if soon else "ok", text, "; ".join(soon), figures)


def plain(host: str, near: bool) -> Finding:
    """Neither side wants encryption. `near`: the hub is on this machine."""
    if near:
        return Finding("TLS", "ok", "none, and none is needed on one machine")
    return Finding(
        "TLS",
        "warn",
        f"{host} offers none: whoever is on the way can read and change everything",
        "give the hub a certificate ('diloco hub init --host NAME'), and begin DILOCO_NATS_URL "
        "with tls://",
    )


def not_offered(host: str) -> Finding:
    return failed(
        "TLS",
        f"{host} offers none, and the settings demand it",
        "give the hub a certificate; if it has one, somebody on the way is taking it out",
    )


def unbelieved(host: str, code: int, said: str) -> Finding:
    """The hub's certificate was refused by this machine, as OpenSSL says."""
    what = f"the certificate of {host}"
    if code in (EXPIRED, NOT_YET):
        return failed(
            "TLS",
            f"{what} is not valid now ({said})",
            "renew it at the hub ('diloco hub renew' if the hub made it), or set this machine's "
            "clock",
        )
    if code in (OTHER_NAME, OTHER_ADDRESS):
        return failed(
            "TLS",
            f"{what} is for another name ({said.rstrip('.')})",
            "use the name that it is for in DILOCO_NATS_URL, or have one made for this name",
        )
    return failed(
        "TLS",
        f"{what} is not trusted ({said})",
        "name the file of the hub's authority in DILOCO_NATS_CA (or SSL_CERT_FILE); if you have "
        "named it, somebody else may be answering",
    )


def handshake_failed(host: str, said: str, demanded: bool, own_certificate: bool) -> Finding:
    """Without a word about the hub's certificate: so it is about ours, or about the protocol.

    `demanded`: the hub said that it wants ours; some servers hang up then without another word.
    """
    if demanded or "certificate" in said.lower():
        text = f"{host} does not take this site's certificate ({said})"
        if not own_certificate:
            text = f"{host} demands a certificate of this site, and there is none ({said})"
        return failed(
            "TLS",
            text,
            "name the file that the hub gave to this site in DILOCO_NATS_CLIENT_CERT; 'diloco site "
            "rotate' at the hub makes another",
        )
    return failed(
        "TLS",
        f"the handshake with {host} failed ({said})",
        "see that nothing between this machine and the hub breaks connections open",
    )


# --------------------------------------------------------------------------------------------------
# Being let in.


def let_in(identity: str, said: str, kind: str) -> Finding:
    """`said`: the server's words, "" if it let us in. `kind`: of what was shown to it."""
    if not said:
        if identity:
            return Finding("credentials", "ok", f"the hub knows this site as {identity}")
        return Finding(
            "credentials",
            "warn",
            f"let in with {kind}: whoever has the same may do everything at the hub",
            "give this site an identity of its own: 'diloco site add' at the hub, and "
            "DILOCO_NATS_CREDENTIALS here",
        )
    if "authorization" in said.lower() or "authentication" in said.lower():
        who = f"{identity} with this key" if identity else kind
        return failed(
            "credentials",
            f"the hub does not let in {who} ({said})",
            "it was revoked, replaced by a newer key, or never added: see 'diloco site list --hub "
            "FOLDER' at the hub; a file from 'diloco site add' or 'diloco site rotate' lets it in",
        )
    return failed(
        "credentials",
        f"the hub did not let this site in ({said})",
        "look at the log of the message server: it says why",
    )


def nodes(named: Sequence[str], closed: Mapping[str, str], several: bool, ails: str) -> Finding:
    """Of a hub of several servers. `closed`: those that did not let us in, and why not.

    `several`: whether the one that did is a node of such a hub. `ails`: why it keeps nothing.
    """
    left = [f"{place} ({why})" for place, why in closed.items()]
    open_ = len(named) - len(closed)
    text = f"{open_} of {len(named)} let this machine in"
    text += f", not {', '.join(left)}" if left else ""
    if ails:
        remedy = "bring the nodes back at the hub: docs/how-to/three-nodes.md says how"
        return failed("nodes", f"{ails}; {text}", remedy)
    if several and len(named) == 1:
        remedy = "name all nodes in DILOCO_NATS_URL, separated by commas: this one may go away"
        return Finding("nodes", "warn", f"of several nodes one is named, {named[0]}", remedy)
    if not several and len(named) > 1:
        remedy = "name servers of one hub only: what one of these keeps, the others do not know"
        return failed("nodes", f"{named[0]} is a hub of its own, and not a node of one", remedy)
    if closed:
        remedy = "see that it runs, and that its port is open for this machine"
        return Finding("nodes", "warn", text, remedy)
    return Finding("nodes", "ok", text if several else "the hub is one message server")


def versions(ours: str, info: Mapping[str, Any], others: Mapping[str, Sequence[str]]) -> Finding:
    """`info`: what the server says of itself. `others`: members that live, by the release they say.

    Releases before members said theirs are under "".
    """
    server = str(info.get("version", "?"))
    known = [f"{release} ({', '.join(who)})" for release, who in sorted(others.items()) if release]
    unknown = f"{counted(len(others['']), 'member')} without one" if "" in others else ""
    told = "; ".join(part for part in (", ".join(known), unknown) if part) or "no members yet"
    text = f"this is {ours}, nats-server {server}; at the hub: {told}"
    number = tuple(int(part) for part in re.findall(r"\d+", server)[:2])
    if number < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        return failed("versions", text, f"nats-server must be {wanted} or newer: replace it")
    if not info.get("jetstream"):
        return failed("versions", text, "the message server has no streams: it needs 'jetstream'")
    if (longest := int(info.get("max_payload", 0))) < PAYLOAD_BYTES_ADVISED:
        verdict: Verdict = "FAIL" if longest < PAYLOAD_BYTES_MIN else "warn"
        remedy = f"set max_payload: {PAYLOAD_BYTES_ADVISED} in the message server's configuration"
        text += f"; it takes messages of {longest} bytes at most"
        return Finding("versions", verdict, text, remedy)
    if number < ADVISED:
        wanted = ".".join(map(str, ADVISED))
        remedy = f"from {wanted} on nats-server keeps fragments faster: replace it when you can"
        return Finding("versions", "warn", text, remedy)
    if any(release and release != ours for release in others):
        remedy = "bring all to one release, as docs/how-to/upgrade.md says"
        return Finding("versions", "warn", text, remedy)
    return Finding("versions", "ok", text)


# --------------------------------------------------------------------------------------------------
# The link.


def clock(samples: "Sequence[ClockSample]") -> Finding:
    """The offset by the quickest answer: the hub's moment lies between question and answer."""
    best = min(samples, key=lambda sample: sample.received - sample.sent)
    offset = best.theirs - (best.sent + best.received) / 2
    precision = max((best.received - best.sent) / 2, 0.0)
    way = "behind" if offset > 0 else "ahead of"
    text = f"{abs(offset):.3f} s {way} the hub's, give or take {precision:.3f} s"
    figures = {"offset_s": offset, "precision_s": precision}
    # What may be due to the measurement alone is not held against the machine.
    certain = abs(offset) - precision
    remedy = "have a time service (chrony, systemd-timesyncd) keep the clock, here and at the hub"
    if certain > CLOCK_FAIL_S:
        text += ": certificates and signed requests are refused at such a distance"
        return Finding("clock", "FAIL", text, remedy, figures)
    if certain > CLOCK_WARN_S:
        return Finding("clock", "warn", text, remedy, figures)
    return Finding("clock", "ok", text, "", figures)


def round_trip(samples_s: Sequence[float], connections: int) -> Finding:
    """`connections`: that carry one payload together, as this site's settings say."""
    ordered = sorted(samples_s)
    middle, worst = ordered[len(ordered) // 2], ordered[-1]
    text = f"{1e3 * middle:.3g} ms, {1e3 * worst:.3g} ms at worst of {len(ordered)}"
    figures = {"round_trip_s": middle, "worst_s": worst}
    if worst > SLOW_S:
        remedy = "see what fills the link; raise membership.lease_s in the run's file"
        return Finding("round trip", "warn", text, remedy, figures)
    if middle > FAR_S and connections == 1:
        remedy = "set DILOCO_CONNECTIONS=4: one connection does not fill a link of this length"
        return Finding("round trip", "warn", text, remedy, figures)
    return Finding("round trip", "ok", text, "", figures)


def bandwidth(way: Literal["up", "down"], rate: "Rate", limit_s: float, job: Job | None) -> Finding:
    """Over one connection. `job`: a run to compare with."""
    name = f"bandwidth {way}"
    if not rate.bytes:
        return failed(
            name,
            f"less than one portion passed within {limit_s:g} s",
            "the link is too thin, or something on the way holds large messages up",
        )
    per_s = rate.bytes / rate.seconds
    text = f"{shown(per_s)}/s over one connection ({shown(rate.moved)} tried)"
    figures = {"bytes_per_s": per_s, "bytes": float(rate.moved)}
    if job is not None:
        kind = "a contribution" if way == "up" else "a publication"
        size = next(t.bytes for t in transfers(job) if t.name == kind)
        text += f": {kind} of the run ({shown(size)}) takes {size / per_s:.3g} s"
        figures["transfer_s"] = size / per_s
    if per_s < THIN_BYTES_PER_S:
        remedy = "take codecs of four bits (docs/how-to/tuning.md), or a better link"
        return Finding(name, "warn", text, remedy, figures)
    return Finding(name, "ok", text, "", figures)


def nothing_to_fetch() -> Finding:
    return Finding("bandwidth down", "skipped", "the hub holds nothing yet that could be fetched")


def publishes_nothing() -> Finding:
    return Finding("bandwidth up", "skipped", "this identity publishes nothing large")


# --------------------------------------------------------------------------------------------------
# The machine.


def devices(found: Sequence[str] | None, error: str, gpus: Sequence[str] = ()) -> Finding:
    """`found`: what jax calls each device; None: jax is not installed. `gpus`: of this machine."""
    if found is None:
        return Finding("devices", "ok", "jax is not installed: this machine trains nothing")
    if error or not found:
        return failed(
            "devices",
            f"jax finds no device ({error or 'it names none'})",
            "see that the driver and the libraries of the devices fit the installed jax",
        )
    kinds = ", ".join(f"{found.count(kind)} x {kind}" for kind in dict.fromkeys(found))
    said, _, remedy = unused(gpus, "cpu" if set(found) == {"cpu"} else "other").partition(": ")
    if said:
        return Finding(
            "devices", "warn", f"{kinds}; {said}", remedy, {"devices": float(len(found))}
        )
    return Finding("devices", "ok", kinds, "", {"devices": float(len(found))})


def disk(folder: str, free: int | None, error: str, need: Need | None) -> Finding:
    """`need`: what a learner of the run keeps there."""
    if error or free is None:
        return failed(
            "disk",
            f"{folder} cannot be written ({error or 'it does not tell its room'})",
            "let the user of this process write there, or name another folder in DILOCO_DATA",
        )
    figures = {"free_bytes": float(free)}
    if need is not None:
        text = f"{shown(free)} free in {folder}; the run needs {shown(need.bytes)}"
        figures["needed_bytes"] = float(need.bytes)
        if free < need.bytes:
            remedy = f"free room there, name another folder in DILOCO_DATA, or change {need.lower}"
            return Finding("disk", "FAIL", text, remedy, figures)
        return Finding("disk", "ok", text, "", figures)
    text = f"{shown(free)} free in {folder}"
    if free < FREE_BYTES_WARN:
        remedy = "that is little: give this command the run's file to hear what it needs"
        return Finding("disk", "warn", text, remedy, figures)
    return Finding("disk", "ok", text, "", figures)


def bucket(place: str) -> Finding:
    """A place for checkpoints of all hosts that is no folder."""
    return Finding(
        "hosts' checkpoints",
        "warn",
        f"{place} is a bucket: nothing was tried there",
        "look at the events when a run begins: checkpoint-failed says what is wrong with it",
    )


def hosts_place(
    folder: str, there: bool, free: int | None, error: str, need: Need | None
) -> Finding:
    """The folder in which all hosts of an island keep its checkpoints. `there`: it is.

    `need`: what a learner of the run keeps there.
    """
    name = "hosts' checkpoints"
    if error:
        return failed(
            name,
            f"{folder} cannot be written ({error})",
            "let the user of this process write there, or name another folder in "
            "DILOCO_HOSTS_CHECKPOINTS: training would go on without checkpoints",
        )
    room = "how much is free it does not tell" if free is None else f"{shown(free)} free"
    text, figures = f"{room} in {folder}", {} if free is None else {"free_bytes": float(free)}
    if need is not None:
        text += f"; the run needs {shown(need.bytes)}"
        figures["needed_bytes"] = float(need.bytes)
    if need is not None and free is not None and free < need.bytes:
        remedy = (
            "free room there, name another folder in DILOCO_HOSTS_CHECKPOINTS, or change "
            f"{need.lower}"
        )
        return Finding(name, "FAIL", text, remedy, figures)
    remedies = []
    if not there:
        text += ", which is not there yet: a learner makes it"
        remedies.append("see that the file system that all hosts reach is mounted here")
    if not folder.startswith("/"):
        remedies.append("write its whole path: this one begins where each process was started")
    verdict: Verdict = "warn" if remedies else "ok"
    return Finding(name, verdict, text, "; and ".join(remedies), figures)
