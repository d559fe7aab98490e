"""Who may do what at a hub, as a table; and what the table must keep whatever it says."""

import json
from typing import Any

import pytest

from diloco_shared.bus.nats.access import CONSUMER_NEWS
from diloco_shared.bus.nats.hub_config import HUB, accounts_conf, check_together, hub_conf
from diloco_shared.bus.nats.keys import Credentials
from diloco_shared.bus.nats.rights import (
    IDENTITIES_MAX,
    LEADING_NOWHERE,
    ROLES,
    Identity,
    Role,
    of_any_site,
    rights_of,
)
from diloco_shared.protocol import subjects as s

API = "$JS.hub.API"


def identity(name: str, role: Role, *members: str) -> Identity:
    return Identity(name, role, (Credentials.new(name).public_key,), members)


ROME = identity("rome", "learner", "rome-1", "rome-2")
OSLO = identity("oslo", "learner", "oslo")
SYNCER, READER = identity("sync", "syncer"), identity("reader", "reader")
COORDINATOR, SUPERVISOR = identity("coord", "coordinator"), identity("sup", "supervisor")
ALL = (ROME, OSLO, SYNCER, READER, COORDINATOR, SUPERVISOR)

# (subject, who of ALL may publish it)
PUBLISHED: tuple[tuple[str, tuple[Identity, ...]], ...] = (
    (s.progress("r", "rome-1"), (ROME,)),
    (s.progress("r", "rome-2"), (ROME,)),
    (s.progress("r", "oslo"), (OSLO,)),
    (s.speed("r", "oslo"), (OSLO,)),
    (s.join("r", "oslo"), (OSLO,)),
    (s.join("r", "rome-2"), (ROME,)),
    (s.unsigned_join("r"), (ROME, OSLO)),  # in its own account, which it does not leave
    (s.forget_state("r", "oslo"), (OSLO,)),
    (s.contribution("r", "rome-1", 0, 1, 2, 3), (ROME,)),
    (s.contribution("r", "oslo", 0, 1, 2, 3) + ".m", (OSLO,)),
    (s.initial("r", "oslo", 0, 1) + ".m", (OSLO,)),
    (s.state("r", "oslo", "rome-1", "x") + ".a", (OSLO,)),
    (s.state("r", "sync", "sync-2", "x"), (SYNCER,)),
    (s.beat("r"), (SYNCER,)),
    (s.lapsed_beat("r"), (SYNCER,)),
    (s.pull("r"), (SYNCER,)),
    (s.grant("r", "oslo"), (SYNCER,)),
    (s.donate("r", "oslo"), (SYNCER,)),
    (s.snapshot_wish("r", 1), (SYNCER,)),
    (s.snapshot_wish_to("r", 1, "sync-2"), (SYNCER,)),
    (s.publication("r", 0, 1, 2, 3), (SYNCER,)),
    (s.tape("r", 0), (SYNCER,)),
    (s.lease("r", "oslo"), (OSLO,)),
    (s.event("r", "join"), (SYNCER, COORDINATOR, SUPERVISOR)),
    (s.event_by("oslo"), (OSLO, SYNCER, COORDINATOR, SUPERVISOR)),
    (s.event_by("rome-2"), (ROME, SYNCER, COORDINATOR, SUPERVISOR)),
    (s.chaos("oslo"), (COORDINATOR,)),
    (s.chaos("nats"), (COORDINATOR,)),
    ("KV.members.LEARNER.oslo", (OSLO, COORDINATOR)),
    ("KV.members.LEARNER.rome-2", (ROME, COORDINATOR)),
    ("KV.members.oslo", (COORDINATOR,)),  # where syncers and supervisors stand
    ("KV.members.sync", (SYNCER, COORDINATOR)),
    ("KV.members.sup", (SUPERVISOR, COORDINATOR)),
    ("KV.incarnations.ANY.oslo", (OSLO, COORDINATOR)),
    ("KV.incarnations.r.oslo", (COORDINATOR,)),
    ("KV.shards.r.7", (SYNCER, COORDINATOR)),
    ("KV.places.r.7.0", (SYNCER, COORDINATOR)),
    ("KV.leases.r.0", (SYNCER, COORDINATOR)),
    ("KV.status.r", (SYNCER, COORDINATOR)),
    ("KV.status.r.1", (SYNCER, COORDINATOR)),
    ("KV.runs.r", (COORDINATOR,)),
    ("KV.assignments.oslo", (COORDINATOR,)),
    ("KV.deleted.abc", (COORDINATOR,)),
    ("KV.tokens.mine", (COORDINATOR,)),
    ("KV.notes.oslo", (COORDINATOR,)),
    ("KV.repeats.abc", (COORDINATOR,)),
    *((f"{API}.{call}", ALL) for call in (
        "STREAM.INFO.UP-r",
        "STREAM.MSG.GET.KV_members",
        "DIRECT.GET.DN-r",
        "CONSUMER.CREATE.DN-r.b1",
        "CONSUMER.MSG.NEXT.DN-r.b1",
        "CONSUMER.DELETE.DN-r.b1",
    )),
    ("$JS.SNAPSHOT.ACK.TAPE-r.x", (COORDINATOR,)),
    *((f"{API}.{call}", (COORDINATOR,)) for call in (
        "INFO",
        "STREAM.LIST",
        "STREAM.SNAPSHOT.TAPE-r",
        "STREAM.RESTORE.TAPE-r",
        "STREAM.DELETE.DN-r",
        "STREAM.INFO.KV_tokens",
        "STREAM.MSG.GET.KV_tokens",
        "STREAM.UPDATE.KV_tokens",
        "STREAM.PURGE.KV_tokens",
        "STREAM.PURGE.KV_runs",
        "STREAM.PURGE.EVENTS",
        "DIRECT.GET.KV_notes",
        "CONSUMER.CREATE.KV_tokens.b1",
        "CONSUMER.MSG.NEXT.KV_tokens.b1",
    )),
    *((f"{API}.{call}", (COORDINATOR, SYNCER)) for call in (
        "STREAM.CREATE.DN-r",
        "STREAM.UPDATE.DN-r",
        "STREAM.PURGE.STATE-r",
    )),
)  # fmt: skip
# (subject, who of ALL may hear it)
HEARD: tuple[tuple[str, tuple[Identity, ...]], ...] = (
    *((f"_INBOX_{i.name}.x.y", (i,)) for i in ALL),
    ("_INBOX.x", ()),
    (s.beat("r"), (ROME, OSLO, COORDINATOR)),
    (s.lapsed_beat("r"), (COORDINATOR,)),
    (s.pull("r"), (ROME, OSLO)),
    (s.grant("r", "oslo"), (OSLO,)),
    (s.donate("r", "rome-2"), (ROME,)),
    (s.progress("r", "oslo"), (SYNCER,)),
    (s.speed("r", "oslo"), (COORDINATOR,)),
    (s.join("r", "oslo"), (SYNCER,)),
    (s.unsigned_join("r"), (SYNCER,)),
    (s.forget_state("r", "oslo"), (SYNCER,)),
    (s.lease("r", "oslo"), (SYNCER,)),
    (s.snapshot_wish("r", 0), (SYNCER,)),
    (s.snapshot_wish_to("r", 0, "sync"), (SYNCER,)),
    (s.chaos("oslo"), (OSLO,)),
    (s.chaos("rome-1"), (ROME,)),
    (s.chaos("sync"), (SYNCER,)),
    (s.chaos("coord"), (COORDINATOR,)),
    (s.chaos("nats"), (SUPERVISOR,)),
    ("up.r.oslo.0.0.0.0", ()),
    ("KV.runs.r", ()),
    ("$KV.runs.r", ()),
    ("$JS.EVENT.ADVISORY.x", ()),
    ("$JS.EVENT.ADVISORY.CONSUMER.CREATED.UP-r.x", (COORDINATOR,)),
)


@pytest.mark.parametrize(("subject", "allowed"), PUBLISHED)
def test_who_may_publish(subject: str, allowed: tuple[Identity, ...]) -> None:
    may = {who.name for who in ALL if rights_of(who).may_publish(subject)}
    assert may == {who.name for who in allowed}


@pytest.mark.parametrize(("subject", "allowed"), HEARD)
def test_who_may_hear(subject: str, allowed: tuple[Identity, ...]) -> None:
    may = {who.name for who in ALL if rights_of(who).may_subscribe(subject)}
    assert may == {who.name for who in allowed}


def test_nobody_of_the_hub_listens_where_streams_or_questions_to_them_are() -> None:
    """A consumer of a site's making delivers only where somebody listens; streams do not count.

    So nobody may listen there: what a site had stored would be stored, or carried out, once more.
    But to news of readers, of which the subject tells all, and which is not what is stored.
    """
    captured = ("up.", "dn.", "tape.", "state.", "ev.", "KV.", "$KV.", "$JS.", "$SYS.", ">", "*")
    for who in ALL:
        heard = {*rights_of(who).subscribe} - {CONSUMER_NEWS}
        assert not [pattern for pattern in heard if pattern.startswith(captured)], who.name


@pytest.mark.parametrize("role", ROLES)
def test_whoever_reads_may_not_have_it_noted_for_answers(role: Role) -> None:
    """Else the server keeps a list of deliveries, and looks through it at each one."""
    rights = rights_of(identity("x", role, *(("x",) if role == "learner" else ())))
    assert rights.may_publish("$JS.ACK.DN-r.b1.1.2.3.4.5") == rights.answers


# --------------------------------------------------------------------------------------------------


def accounts(*identities: Identity) -> dict[str, Any]:
    text = accounts_conf(identities)
    assert text.startswith("accounts: ")
    found: dict[str, Any] = json.loads(text.removeprefix("accounts: "))
    return found


def test_each_site_has_an_account_and_the_hub_one() -> None:
    found = accounts(*ALL)
    assert set(found) == {HUB, "SITE-rome", "SITE-oslo", "SITE-reader"}
    keys = {name: [user["nkey"] for user in account["users"]] for name, account in found.items()}
    assert keys["SITE-rome"] == [*ROME.keys]
    assert keys[HUB] == [*SYNCER.keys, *COORDINATOR.keys, *SUPERVISOR.keys]
    assert [name for name, account in found.items() if "jetstream" in account] == [HUB]


def test_what_leads_into_the_hub_is_what_the_site_may_publish() -> None:
    found = accounts(ROME)["SITE-rome"]["imports"]
    led = {i.get("to", i["service"]["subject"]) for i in found if "service" in i}
    assert led == {*rights_of(ROME).publish} - {*LEADING_NOWHERE}
    assert s.unsigned_join("*") in LEADING_NOWHERE, "anybody could join there in anybody's name"
    assert all(i["service"]["account"] == HUB for i in found if "service" in i)
    out = {i["stream"]["subject"] for i in found if "stream" in i}
    own = {"_INBOX_rome.>", s.chaos("rome-1"), s.chaos("rome-2")}
    assert out == {*rights_of(ROME).subscribe} - own


def test_the_hub_exports_all_that_any_site_imports_and_does_not_change_with_sites() -> None:
    one, two = accounts(ROME)[HUB]["exports"], accounts(ROME, OSLO, READER)[HUB]["exports"]
    assert one == two
    services = {e["service"] for e in one if "service" in e}
    for site in (ROME, OSLO, READER):
        for pattern in {*rights_of(site).publish} - {*LEADING_NOWHERE}:
            asked = pattern.replace("$JS.hub.API", "$JS.API")
            asked = f"${asked}" if asked.startswith("KV.") else asked
            general = [".".join("*" if t in site.members else t for t in asked.split("."))]
            assert {asked, *general} & services, pattern
    assert "ctl.chaos.*" not in services
    assert of_any_site().subscribe


@pytest.mark.parametrize(
    ("identities", "text"),
    [
        ((ROME, ROME), "name rome is of both"),
        ((ROME, Identity("x", "reader", ROME.keys)), r"key U.* is of both rome and x"),
        ((ROME, identity("x", "learner", "rome-2")), "member rome-2 is of both rome and x"),
        ((SYNCER, identity("x", "learner", "sync")), "member sync is of both sync and x"),
        ((ROME,) * (IDENTITIES_MAX + 1), "a hub takes 1000"),
    ],
)
def test_identities_that_do_not_go_together(identities: tuple[Identity, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_together(identities)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("Rome", "learner", (), ("a",)), "not a valid id"),
        (("rome", "king", (), ()), "none of"),
        (("rome", "learner", ("SU",), ("a",)), "no public key"),
        (("rome", "learner", (), ()), "names its learners"),
        (("rome", "syncer", (), ("a",)), "names its learners"),
        (("rome", "learner", (), ("a.b",)), "not a valid id"),
        (("rome", "learner", (), ("*",)), "not a valid id"),
        (("rome", "learner", (), ("join",)), "cannot be called 'join'"),
        (("beat", "syncer", (), ()), "cannot be called 'beat'"),
        (("rome", "learner", ROME.keys * 6, ("a",)), "6 keys; 5 at most"),
        (("rome", "learner", (), tuple(f"a{n}" for n in range(65))), "more than 64"),
    ],
)
def test_what_cannot_be_an_identity(given: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Identity(*given)


def test_the_servers_own_configuration() -> None:
    text = hub_conf(
        listen="0.0.0.0:4222",
        store='/a "b"',
        pid_file="/p",
        certificate="c",
        key="k",
        file_bytes_max=7,
    )
    lines = text.splitlines()
    assert 'tls { cert_file: "c", key_file: "k", timeout: 10 }' in lines
    assert '  store_dir: "/a \\"b\\""' in lines
    assert "  max_file_store: 7" in lines
    assert lines[-1] == "include 'accounts.conf'"
    mutual = hub_conf(
        listen="h:1", store="s", pid_file="p", certificate="c", key="k", clients_authority="a"
    )
    demanded = 'tls { cert_file: "c", key_file: "k", ca_file: "a", verify: true, timeout: 10 }'
    assert demanded in mutual
    plain = hub_conf(listen="h:1", store="s", pid_file="p")
    assert "tls" not in plain and "max_file_store" not in plain
