"""Commands about who may do what, and who did what."""

import os
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.api import connect
from diloco_cli.cluster import Where
from diloco_cli.commands.options import Json, anywhere, show
from diloco_cli.lines import columns
from diloco_cli.words import CONFLICT, INVALID, CliError, why

app = typer.Typer()
tokens = typer.Typer(
    no_args_is_help=True, help="Tokens for other people and machines: what each may do."
)
app.add_typer(tokens, name="token")

# Of a length of time such as 90d.
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LENGTH = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd])")


class Scope(StrEnum):
    """What a token is good for; none includes another."""

    read = "read"
    operate = "operate"
    fault = "fault"
    administer = "administer"


Name = Annotated[str, typer.Argument(help="Name of the token.")]
To = Annotated[
    Path | None,
    typer.Option(help="Write it to this new file, for its owner only, instead of printing it."),
]


def seconds_of(text: str, option: str) -> float:
    """30s, 10m, 12h or 90d in seconds; CliError for anything else."""
    match = _LENGTH.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(
            f"{option} {text}: give a number and a unit, as 30s, 10m, 12h, 90d"
        )
    return float(match[1]) * _UNITS[match[2]]


def expiry_of(text: str) -> dict[str, Any]:
    """What the server is to be told: a length of time, the end of a day in UTC, or never."""
    if text == "never":
        return {"never": True}
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        return {"expires_in_s": seconds_of(text, "--expires")}
    try:
        return {"expires_at": (day + timedelta(days=1)).timestamp()}
    except OverflowError:  # of the last day that there is
        text = f"--expires {text}: no day comes after it; name an earlier one, or never"
        raise CliError(text, INVALID) from None


@tokens.command("make")
@anywhere
def make_token(
    where: Where,
    name: Name,
    scopes: Annotated[list[Scope], typer.Argument(help="What it is good for, one or more.")],
    run: Annotated[
        list[str] | None,
        typer.Option(help="Limit it to this run; a * ends a beginning. May be repeated."),
    ] = None,
    site: Annotated[
        list[str] | None,
        typer.Option(help="Limit it to this member, likewise: drain, forget, faults."),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="When it ends: 12h, 90d, a day such as 2027-01-31, or never.")
    ] = "90d",
    to: To = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once."""
    ends, named = expiry_of(expires), [scope.value for scope in scopes]
    _free(to)
    with connect(where) as client:
        made = client.make_token(name, named, runs=run or (), sites=site or (), **ends)
    _hand_over(made, {"name": name, "scopes": named}, to, as_json)


@tokens.command("rotate")
@anywhere
def rotate_token(
    where: Where,
    name: Annotated[str, typer.Argument(help="Name of the token; admin is the administrator's.")],
    overlap: Annotated[
        str, typer.Option(help="How long the old one stays good: 0s to 7d.")
    ] = "10m",
    to: To = None,
    as_json: Json = False,
) -> None:
    """Replace a token by a new one of the same name, without a gap for those who use it."""
    overlap_s = seconds_of(overlap, "--overlap")
    _free(to)
    with connect(where) as client:
        made = client.rotate_token(name, overlap_s=overlap_s)
    _hand_over(made, {"name": name}, to, as_json)


def _free(to: Path | None) -> None:
    """Before there is a token that could not be kept."""
    try:
        taken = to is not None and to.exists()
    except OSError as error:
        raise CliError(f"--to {to} cannot be written: {why(error)}") from None
    if taken:
        raise CliError(f"--to {to}: the file exists; name a new one", CONFLICT)


def _hand_over(token: str, about: dict[str, Any], to: Path | None, as_json: bool) -> None:
    if to is None:
        return show({**about, "token": token}, as_json, lambda: [token])
    try:
        handle = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(token + "\n")
    except OSError as error:
        # It is shown only once: rather on the screen than nowhere.
        print(token)
        raise CliError(f"--to {to} cannot be written: {why(error)}; the token is above") from None
    written = f"the token {about['name']} is in {to}"
    return show({**about, "token_file": str(to)}, as_json, lambda: [written])


@tokens.command("list")
@anywhere
def list_tokens(where: Where, as_json: Json = False) -> None:
    """All tokens but the administrator's: what each may do, until when, and when it was used."""
    with connect(where) as client:
        found = client.tokens()
    lines = [token_line(t, time.time()) for t in found]
    show(found, as_json, lambda: lines or ["none but the administrator's"])


def token_line(t: dict[str, Any], now: float) -> str:
    """One token in words."""
    line = f"{t['name']}: {', '.join(t['scopes'])}"
    if t["runs"]:
        line += f"; only runs {' '.join(t['runs'])}"
    if t["sites"]:
        line += f"; only members {' '.join(t['sites'])}"
    ends = t["expires_at"]
    if ends is None:
        line += "; never expires"
    else:
        line += f"; {'expired' if ends <= now else 'expires'} {_day(ends)}"
    line += f"; used {_minute(t['used_at'])}" if t["used_at"] else "; not used yet"
    if t["previous_until"] > now:
        line += f"; the one it replaces is good until {_minute(t['previous_until'])}"
    return line + (f"; made by {t['created_by']}" if t["created_by"] else "")


@tokens.command("revoke")
@anywhere
def revoke_token(where: Where, name: Name, as_json: Json = False) -> None:
    """Make a token useless, at once."""
    with connect(where) as client:
        client.revoke_token(name)
    done = {"name": name, "revoked": True}
    show(done, as_json, lambda: [f"the token {name} is revoked"])


# --- who did what -----------------------------------------------------------------------------


@app.command()
@anywhere
def audit(
    where: Where,
    actor: Annotated[str, typer.Option(help="Only what was done with this token.")] = "",
    newest: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 50,
    as_json: Json = False,
) -> None:
    """Who changed what and when, and who was refused; for administrators."""
    with connect(where) as client:
        rows = client.audit(newest, actor=actor)
    width = columns(sys.stdout)
    show(rows, as_json, lambda: list(audit_lines(rows, width)) or ["nothing was changed yet"])


def audit_lines(rows: list[dict[str, Any]], width: int | None) -> Iterator[str]:
    """Rows as text of at most `width` columns, and what needs more goes on further in; a line each
    where there is no terminal (None), for `grep` and its like."""
    actors = max((len(_actor(row)) for row in rows), default=0)
    for row in rows:
        head = f"{_second(row['at'])}  {_actor(row):<{actors}}  "
        route, left = row["route"], {**row["target"]}
        for name in row["target"]:
            if f"{{{name}}}" in route:
                route = route.replace(f"{{{name}}}", left.pop(name))
        about = "".join(f" {name}={value}" for name, value in left.items())
        became = row["outcome"] + (f": {row['why']} ({row['status']})" if row["why"] else "")
        text = f"{row['method']} {route}{about}  {became}, from {row['address'] or 'nowhere'}"
        if row["left_out"]:
            text += f"; {row['left_out']} refused before it are not listed"
        if width is None:
            yield head + text
            continue
        inner = " " * (len(head) if len(head) < width // 2 else 2)
        yield from textwrap.wrap(head + text, width, subsequent_indent=inner) or [head]


def _actor(row: dict[str, Any]) -> str:
    return str(row["actor"] or "(unknown)")


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _minute(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def _second(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
