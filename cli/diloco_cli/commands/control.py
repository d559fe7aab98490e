"""Commands about members, events and faults."""

import math
import time
from enum import StrEnum
from typing import Annotated, Any

import typer

from diloco_cli.api import connect
from diloco_cli.cluster import Where, token_of
from diloco_cli.commands.options import Json, anywhere, show
from diloco_cli.view import speed_lines
from diloco_cli.words import INVALID, CliError, counted

app = typer.Typer()


class FaultKind(StrEnum):
    """The faults there are."""

    kill = "kill"
    hang = "hang"
    slow = "slow"
    nan = "nan"


@app.command()
@anywhere
def members(where: Where, as_json: Json = False) -> None:
    """Every process of the cluster."""
    with connect(where) as client:
        told = client.all_members()
    found, heard = told["members"], [told["cut_off"]] if told["cut_off"] else []
    show(found, as_json, lambda: heard + [line for m in found for line in _member_lines(m)])


def _member_lines(m: dict[str, Any]) -> list[str]:
    """What it is and does; of a learner that trains, how fast."""
    speed = m.get("speed")
    return [_member_line(m), *(f"  {line}" for line in (speed_lines(speed) if speed else ()))]


def _member_line(m: dict[str, Any]) -> str:
    line = f"{m['id']}: " + ("alive" if m["alive"] else "gone")
    if m.get("draining"):
        line += ", draining"
    if m["assigned"]:
        can = "cannot work for" if m["alive"] and m.get("state") == "unfit" else "works for"
        line += f", {can} {m['assigned']}"
    elif m["role"] in ("learner", "syncer"):
        line += ", has no run"
    learner = m.get("learner")
    if learner:
        line += f", {learner['state']} at step {learner.get('step', 0)}"
    elif m["role"] == "syncer" and m["assigned"] and m["alive"]:
        behind = f", {counted(m['lag_records'], 'record')} behind" if m.get("lag_records") else ""
        line += f", {m['state']}{behind}"
    release = f", release {m['version']}" if m.get("version") else ""
    line += f" ({m['role']}, process {m['pid']} on {m['host']}{release})"
    full = f"its disk is full: {m['full']}" if m.get("full") else ""
    why = "; ".join(text for text in (m.get("stays"), m.get("reason"), full) if text)
    return f"{line}: {why}" if m["alive"] and why else line


@app.command()
@anywhere
def drain(
    where: Where,
    member: Annotated[str, typer.Argument(help="A member.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    as_json: Json = False,
) -> None:
    """Take a member's work away and give it no more."""
    with connect(where) as client:
        changed = client.undrain(member) if undo else client.drain(member)
    show(changed, as_json, lambda: [_member_line(changed)])


@app.command()
@anywhere
def forget(
    where: Where,
    member: Annotated[str, typer.Argument(help="A member that is gone.")],
    as_json: Json = False,
) -> None:
    """Give up the place of a member that will not come back."""
    with connect(where) as client:
        client.forget(member)
    done = {"member": member, "forgotten": True}
    show(done, as_json, lambda: [f"{member} is forgotten: its place is free"])


@app.command()
@anywhere
def page(where: Where, as_json: Json = False) -> None:
    """The address of the live page with the token in it, for a browser of this machine.

    The part after # is never sent to a server. Whoever sees it can use the token.
    """
    with connect(where) as client:
        address = f"{client.url}/#token={token_of(where)}"
    show({"page": address}, as_json, lambda: [address])


@app.command()
@anywhere
def events(
    where: Where,
    run: Annotated[str, typer.Argument(help="Name of the run; all if left out.")] = "",
    newest: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    as_json: Json = False,
) -> None:
    """What happened."""
    with connect(where) as client:
        found = client.events(run)[-newest:]
        if run and not found:
            client.run(run)  # the usual error where there is none; of a deleted one events may stay

    def line(e: dict[str, Any]) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(e["at"]))
        by = f" (by {who})" if (who := (e.get("data") or {}).get("actor")) else ""
        return f"{at} {e['source']} {e['kind']}: {e['text']}{by}"

    show(found, as_json, lambda: [line(e) for e in found] or ["nothing happened yet"])


@app.command()
@anywhere
def chaos(
    where: Where,
    kind: Annotated[FaultKind, typer.Argument(help="What to do to it.")],
    target: Annotated[str, typer.Argument(help="A member, or nats.")],
    at_step: Annotated[
        int | None, typer.Option(min=0, help="At this inner step of a learner's present life.")
    ] = None,
    after: Annotated[float, typer.Option(min=0, help="After so many seconds.")] = 0.0,
    for_s: Annotated[
        float | None, typer.Option("--for", min=0, help="Seconds of hang or slow; else 10.")
    ] = None,
    factor: Annotated[
        float | None, typer.Option(min=1, help="How many times slower; else 2.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Inflict a fault, where the deployment allows it."""
    if at_step is not None and after:
        raise typer.BadParameter("give --at-step or --after, not both")
    if for_s is not None and kind not in (FaultKind.hang, FaultKind.slow):
        raise typer.BadParameter(f"--for is for hang and slow: {kind.value} has no end")
    if factor is not None and kind is not FaultKind.slow:
        raise typer.BadParameter(f"--factor is for slow, not for {kind.value}")
    for option, given in (("--after", after), ("--for", for_s), ("--factor", factor)):
        if given is not None and not math.isfinite(given):
            raise CliError(f"{option} {given}: give a number that is finite", INVALID)
    settings: dict[str, Any] = {"after_s": after}
    if kind in (FaultKind.hang, FaultKind.slow):
        settings["duration_s"] = 10.0 if for_s is None else for_s
    if kind is FaultKind.slow:
        settings["factor"] = 2.0 if factor is None else factor
    if at_step is not None:
        settings["at_step"] = at_step
    with connect(where) as client:
        fault = client.chaos(kind.value, target, **settings)
    show(fault, as_json, lambda: [f"{fault['id']}: {kind.value} on {target} {fault['when']}"])


@app.command()
@anywhere
def faults(where: Where, as_json: Json = False) -> None:
    """Faults that were planned, and what became of them."""
    with connect(where) as client:
        found = client.faults()

    def line(f: dict[str, Any]) -> str:
        became = [
            f"{what} {time.strftime('%H:%M:%S', time.localtime(f[f'{what}_at']))}"
            for what in ("planned", "applied", "healed")
            if f"{what}_at" in f
        ]
        return f"{f['id']}: {f['kind']} on {f['target']}, {', '.join(became)}"

    show(found, as_json, lambda: [line(f) for f in found] or ["no faults"])
