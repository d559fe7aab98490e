"""Attacks on a learner's machine, by whoever may submit runs: paths and modules of a run."""

from typing import Any

from live.attacks import cases as c
from live.attacks.cases import attack
from live.attacks.rest import audited
from live.attacks.scene import Scene, small_run
from waiting import NotYet, until

# The learner that is idle, and so gets every run that is submitted.
IDLE = "a-3"


async def unfit(scene: Scene, name: str, words: str, **changes: Any) -> None:
    """A run is given to the idle learner, which says why it may not work for it."""
    token = scene.tokens["operator"]
    given = small_run(scene, name, membership={"learners_min": 1}, **changes)
    made = await scene.ask("POST", "/v1/runs", token, json=given)
    assert made.status_code == 201, made.text
    try:

        async def said() -> bool:
            scene.running.check()
            run = (await scene.ask("GET", f"/v1/runs/{name}")).json()
            member = (await scene.ask("GET", f"/v1/members/{IDLE}")).json()
            if words not in member["reason"] or "learners-unfit" not in run["reason_codes"]:
                raise NotYet(f"{member['reason']} | {run['reason']}")
            assert run["status"] is None or not run["status"]["learners"]
            return True

        await until(said, "the learner's reason", every_s=0.1, patience_s=60)
        await audited(scene, actor="operator", method="POST", status=201)
    finally:
        await scene.ask("POST", f"/v1/runs/{name}/stop", token)

        async def deleted() -> bool:
            answer = await scene.ask("DELETE", f"/v1/runs/{name}", token)
            if answer.status_code != 204:
                raise NotYet(answer.text)
            return True

        await until(deleted, "the end of the run", every_s=0.2, patience_s=60)
    c.UNFIT.seen(scene)


@attack("files", "has a learner read a file of its machine as corpus", c.OPERATOR, c.UNFIT)
async def corpus(scene: Scene) -> None:
    await unfit(scene, "corpus", "outside the folders", data={"source": "/etc"})


@attack("files", "has a learner follow a link out of its data root", c.OPERATOR, c.UNFIT)
async def link(scene: Scene) -> None:
    (scene.folder / "corpora" / "link").symlink_to(scene.folder / "outside")
    await unfit(scene, "link", "outside the folders", data={"source": "link"})


@attack("files", "leads a path up with '..', and names a home", c.OPERATOR, c.UNFIT)
async def upwards(scene: Scene) -> None:
    await unfit(scene, "upwards", "has '..' in it", data={"source": "../outside"})


@attack("files", "has a learner import a module of its own choice", c.OPERATOR, c.UNFIT)
async def module(scene: Scene) -> None:
    await unfit(scene, "module", "is not allowed on this machine", model={"factory": "os:system"})


@attack("files", "writes a file into the data root and imports it as a module", c.OPERATOR, c.UNFIT)
async def written(scene: Scene) -> None:
    mark = scene.folder / "imported"
    text = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    (scene.folder / "corpora" / "evil.py").write_text(text)
    try:
        factory = {"factory": "evil:make"}
        await unfit(scene, "written", "is not allowed on this machine", model=factory)
        assert not mark.exists(), "the module was executed"
    finally:
        (scene.folder / "corpora" / "evil.py").unlink()
