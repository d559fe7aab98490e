"""What each route of the REST interface answers, and the fields of what it shows.

The OpenAPI description says of an answer that it is a JSON object. Which fields that has is taken
from the program itself: from what it shows of a run or a member, and from the records it keeps.
"""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from wire_fields import meanings

from diloco_coordinator import access, audit
from diloco_coordinator.api import checkpoints_io, exports_io, tokens_io, views
from diloco_coordinator.exports import exports
from diloco_coordinator.runs.membership import MemberNote
from diloco_coordinator.runs.reasons import ReasonCode
from diloco_shared.protocol import checkpoints, records
from diloco_shared.protocol.records import MemberRecord, RunRecord

RUN, MEMBER, CHECKPOINT = (
    "a [run](#a-run)",
    "a [member](#a-member)",
    "a [checkpoint](#a-checkpoint)",
)
EXPORT, TOKEN, EVENT = "an [export](#an-export)", "a [token](#a-token)", "an [event](#an-event)"
FAULT = "`id` and `kind` of the fault, its `target`, and `when` it strikes, in words"
LISTED = (
    "`checkpoints`: a list, each of them {}; `damaged`: a list of those that cannot be read, each "
    "with `ref`, `run` and `reason`; `tapes`: a list of what is left of the tapes of deleted runs, "
    "each with `ref` and `run`"
)
NEXT = "`next`: where the next page begins, or null"
STREAM = "server-sent events: each is {}"

ANSWERS = {
    "POST /v1/runs": RUN,
    "GET /v1/runs": f"`runs`: a list, each of them {RUN}; {NEXT}",
    "GET /v1/runs/{run}": RUN,
    "PATCH /v1/runs/{run}": f"{RUN}, and `consequence`: what the new quorum means for it, in words",
    "POST /v1/runs/{run}/pause": RUN,
    "POST /v1/runs/{run}/resume": RUN,
    "POST /v1/runs/{run}/stop": RUN,
    "POST /v1/runs/{run}/begin-again": RUN,
    "GET /v1/runs/{run}/rounds": f"`rounds`: a list, each of them a [round](#a-round); {NEXT}",
    "GET /v1/runs/{run}/metrics": "`evaluations`: a list, each with `at` and what its event tells; "
    "`history`: samples of the training loss; `status`: as in a [run](#a-run)",
    "GET /v1/runs/{run}/recoveries": "`recoveries`: a list, each of them a [recovery](#a-recovery)",
    "GET /v1/runs/{run}/stream": STREAM.format(RUN),
    "GET /v1/checkpoints": LISTED.format(CHECKPOINT),
    "GET /v1/runs/{run}/checkpoints": LISTED.format(CHECKPOINT),
    "POST /v1/runs/{run}/checkpoints": "`run`, and `number` and `ref` of the checkpoint",
    "GET /v1/runs/{run}/checkpoints/{number}": f"{CHECKPOINT}, and the `spec` "
    "that it was made under",
    "POST /v1/runs/{run}/checkpoints/{number}/restore": "`run` that goes back, `number` of the "
    "checkpoint, and `serial` of this wish",
    "POST /v1/checkpoints/submit": RUN,
    "POST /v1/runs/{run}/exports": EXPORT,
    "GET /v1/runs/{run}/exports": f"`exports`: a list, each of them {EXPORT}",
    "GET /v1/runs/{run}/exports/{export}": EXPORT,
    "GET /v1/runs/{run}/exports/{export}/files/{file}": "the bytes of the file",
    "POST /v1/runs/{run}/samples": STREAM.format("`begun`, `text`, `done` or `failed`"),
    "GET /v1/members": f"`members`: a list, each of them {MEMBER}; `cut_off`: why that may be "
    "old by now, else empty; `now`: the time by the coordinator's clock, in seconds since 1970",
    "GET /v1/members/{member}": MEMBER,
    "POST /v1/members/{member}/drain": MEMBER,
    "DELETE /v1/members/{member}/drain": MEMBER,
    "GET /v1/events": f"`events`: a list, each of them {EVENT}; `next`: the cursor to go on with; "
    "`mark`: goes with it, and tells the event there from others that may get its number; `again`: "
    "events up to the cursor were lost, so begin anew",
    "GET /v1/events/stream": STREAM.format(EVENT),
    "GET /v1/access": "`name`, `scopes`, `runs`, `sites` and `expires_at` as of a "
    "[token](#a-token); `chaos`: whether faults may be inflicted",
    "GET /v1/tokens": f"`tokens`: a list, each of them {TOKEN}",
    "POST /v1/tokens": f"{TOKEN}, and `token`: its secret, which is shown only here",
    "POST /v1/tokens/{name}/rotate": f"{TOKEN}, and `token`: its new secret",
    "GET /v1/audit": "`rows`: a list, each of them "
    "a [row of the audit log](#a-row-of-the-audit-log)",
    "POST /v1/chaos": FAULT,
    "GET /v1/chaos": "`faults`: a list, each with the fields of its request, `id`, `when`, and "
    "`planned_at`, `applied_at` and `healed_at` where that is known",
    "GET /v1/plan": "the JSON schema of what can be asked for",
    "POST /v1/plan": "`settings` with their `reasons`, what is `predicted`, the `hub`, `notes`, "
    "`budget_gb`, `algorithm` for the run's file, and `sensitivity`",
    "GET /healthz": "`alive`: true",
    "GET /readyz": "`ready` as a line of text, or what ails it, with status 503",
}

# Parameters that mean the same on every route.
PARAMETERS = {
    "actor": "only what this token did",
    "after": "go on behind this one",
    "brief": "leave out what is long",
    "checkpoint": "the one to begin with",
    "export": "id of the export",
    "file": "name of the file",
    "folder": "of the run that the checkpoint is of",
    "idempotency-key": "a request that comes again under the same key does nothing more",
    "if-match": "ETag that the run must still have, else 412",
    "last-event-id": "as `after`, where a connection is made again",
    "limit": "so many at most",
    "mark": "of the event at `after`, as an answer told it",
    "member": "name of the member",
    "name": "of the token",
    "newest": "of those the newest so many alone; 0: all",
    "number": "of the checkpoint",
    "run": "name of the run",
}

# Of fields that no record has: what a view adds.
ADDED = {
    "a run": {
        "state": "what it is doing; `queued` before it begins, `leaderless` while nobody leads it",
        "reason": "why it is in that state, and what is amiss",
        "reason_codes": "a word for each sentence of `reason`, in their order: "
        f"{', '.join(f'`{code}`' for code in get_args(ReasonCode))}, or the run's state where its "
        "leader says why",
        "waiting": "what it waits for before it can begin; null: nothing",
        "created_at": "when it was submitted, in seconds since 1970",
        "members": "names of those that work for it",
        "syncers": "what each of its syncers does, and how many records it is behind",
        "status": "[RunStatus](messages.md#runstatus); null before it begins",
    },
    "a member": {
        "version": "release that the process is of",
        "assigned": "run that it is given to; empty: none",
        "alive": "whether it was heard of lately",
        "gone_since": "wall clock, in seconds since 1970; null while it lives",
        "draining": "it gets no more work",
        "stays": "of a syncer that drains: why it still works for its run; else empty",
        "lag_records": "of a syncer: how many records it is behind the one that leads",
        "learner": "what its run's syncer sees of it; null if nothing",
        "speed": "[LearnerSpeed](messages.md#learnerspeed); null if it said nothing lately",
    },
    "a checkpoint": {
        "ref": "its name: FOLDER/NUMBER",
        "number": "of the checkpoint in its run",
        "parameters": "of the model",
        "learners": "names of those that gave their part",
    },
    "an export": {
        "id": "its name",
        "asked": "version, checkpoint and dtype that were asked for",
        "state": "running, complete or failed",
        "begun_at": "wall clock, in seconds since 1970",
        "ended_at": "wall clock, in seconds since 1970; 0: not yet",
        "steps": "of the run: inner steps per learner",
        "versions": "of each fragment",
        "files": "each with `name`, `bytes` and `sha256`",
        "bytes": "of all files",
        "progress": "stage, bytes so far and in all, and pace while it is made; null otherwise",
    },
    "a token": {
        "name": "of the token",
        "scopes": "what it may do",
        "runs": "patterns of the runs that it is limited to; empty: none",
        "sites": "patterns of the members that it is limited to; empty: none",
        "expires_at": "in seconds since 1970; null: never",
        "used_at": "when it was used last, to some minutes; null: never",
        "created_at": "in seconds since 1970",
        "created_by": "name of the token that made it",
        "rotated_at": "when its secret was replaced last",
        "previous_until": "until when the secret before is good",
    },
    "a row of the audit log": {
        "seq": "number of the row",
        "address": "where the request came from",
        "method": "of the request",
        "route": "of the request, without names",
        "target": "names in the route",
        "status": "of the answer",
        "outcome": "what became of it",
        "actor": "name of the token; empty: nobody knows it",
    },
}


def things() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """What answers are made of: a title, and rows of a field and its meaning."""
    asked = RunRecord(name="r", spec={}, desired="running", quorum=1, created_at=0.0)
    run = views.run_view(asked, None, views.brief_view(asked, None, (), []))
    record = MemberRecord(
        id="m", role="learner", boot="b", host="h", pid=1, lock="l", started_at=0.0
    )
    member = views.member_view(MemberNote(record=record), "", None)
    export = exports.ExportRecord.model_fields.keys() - exports_io._HIDDEN
    token = access.TokenRecord.model_fields.keys() - tokens_io._HIDDEN
    said = meanings(records), meanings(checkpoints), meanings(exports), meanings(access)
    of = {
        "a run": (run, said[0]["RunRecord"]),
        "a member": (member, said[0]["MemberRecord"]),
        "a checkpoint": (
            ["ref", *sorted(checkpoints_io._SHOWN | {"learners"})],
            said[1]["CheckpointManifest"],
        ),
        "an export": (
            [*(f for f in exports.ExportRecord.model_fields if f in export), "bytes", "progress"],
            said[2]["ExportRecord"],
        ),
        "a token": (
            [f for f in access.TokenRecord.model_fields if f in token],
            said[3]["TokenRecord"],
        ),
        "a row of the audit log": (audit.AuditRow.model_fields, meanings(audit)["AuditRow"]),
    }
    for title, (fields, kept) in of.items():
        yield title, list(_rows(fields, kept, ADDED[title]))


def _rows(
    fields: Iterable[str], kept: dict[str, str], added: dict[str, str]
) -> Iterator[tuple[str, str]]:
    for field in fields:
        yield f"`{field}`", added.get(field) or kept.get(field, "")


# What has the fields of a record that stands among the messages.
RECORDS: dict[str, str] = {
    "a round": "The fields of [TapeRound](messages.md#taperound), and `seq`: its place on the "
    "tape.",
    "an event": "The fields of [Event](messages.md#event), and `seq`: the cursor to go on from.",
    "a recovery": "The fields of [RecoveryRecord](messages.md#recoveryrecord), with `rounds` null "
    "until it was merged. `complete`: whether it was. `phases_s`: how long each phase took, in "
    "seconds; null where that is not known.",
}


def titled(name: str) -> str:
    """As a heading of the page; its anchor is the name with dashes."""
    return name[0].upper() + name[1:]


def unlike(described: dict[str, Any]) -> list[str]:
    """Routes that answer something of which nothing is said here, and those that are only here."""
    there = {
        f"{verb.upper()} {path}"
        for path, verbs in described["paths"].items()
        for verb, route in verbs.items()
        if "204" not in route["responses"]
    }
    return sorted(there ^ ANSWERS.keys())
