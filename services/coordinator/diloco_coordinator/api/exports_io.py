"""/v1/runs/RUN/exports: take the weights out of a run: make, list, show, download, remove."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from diloco_coordinator.api.auth_io import Guard, must_see
from diloco_coordinator.api.problems_io import Problem, invalid, spec_of
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.views import jsonable
from diloco_coordinator.exports.exporting_io import Exports, ExportsBusy
from diloco_coordinator.exports.exports import Asked, ExportRecord, why_unwritten
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.protocol.checkpoints import reference
from diloco_shared.protocol.exports import Dtype
from diloco_shared.protocol.messages import Count

# Of what is kept, what people do not need.
_HIDDEN = {"folder", "in_epoch", "serial"}


class ExportRequest(BaseModel):
    """What to take out; nothing: the newest parameters that are published."""

    model_config = ConfigDict(extra="forbid")
    version: Count | None = Field(None, description="Of every fragment; null: each one's newest.")
    checkpoint: str | None = Field(
        None,
        min_length=1,
        max_length=500,
        description="Number of a run-wide checkpoint of the run, FOLDER/NUMBER, or an address.",
    )
    dtype: Dtype = Field("fp32", description="fp32 as published, or bf16 with half the bytes.")


class ExportRoutes:
    """The routes, over one registry."""

    def __init__(self, registry: Registry, guard: Guard, runs: Runs, exports: Exports) -> None:
        self.registry = registry
        self.runs = runs
        self.vaults = runs.vaults
        self.exports = exports
        self.router = APIRouter(prefix="/v1/runs/{run}/exports", tags=["exports"])
        add = self.router.add_api_route
        add("", self.begin, methods=["POST"], status_code=202, **guard.act)
        add("", self.index, methods=["GET"], **guard.look)
        add("/{export}", self.show, methods=["GET"], **guard.look)
        add("/{export}", self.remove, methods=["DELETE"], status_code=204, **guard.act)
        shown: dict[str, Any] = {"response_class": FileResponse, "responses": {206: {}, 416: {}}}
        add("/{export}/files/{file}", self.file, methods=["GET"], **shown, **guard.look)

    async def begin(
        self,
        run: str,
        response: Response,
        body: Annotated[ExportRequest | None, Body()] = None,
    ) -> dict[str, Any]:
        """Begin an export; its state and progress are at the address in `Location`."""
        record, wanted = self.runs.record(run), body or ExportRequest.model_validate({})
        spec_of(record)  # what cannot be read cannot be exported: 409 says so
        if wanted.version is not None and wanted.checkpoint is not None:
            text = "give a version or a checkpoint, not both"
            raise invalid("export", [{"path": "version", "message": text}])
        checkpoint = ""
        if wanted.checkpoint is not None:
            named = wanted.checkpoint
            checkpoint = await self.vaults.ask(lambda: self._checkpoint(run, named))
        else:
            self._published(run, wanted.version)
        asked = Asked(version=wanted.version, checkpoint=checkpoint, dtype=wanted.dtype)
        with _problems():
            begun = await self.exports.begin(record, asked)
        response.headers["Location"] = f"/v1/runs/{run}/exports/{begun.id}"
        return self.view(begun)

    def _published(self, run: str, version: int | None) -> None:
        """409 for what is known not to be there; the rest is for whoever reads it to find out."""
        status = self.registry.statuses.get(run)
        newest = min(status.versions, default=-1) if status else -1
        if newest < 0:
            text = f"{run!r} has published no parameters yet: try again once it trains"
            raise Problem(409, "Nothing to export yet", text)
        if version is not None and version > newest:
            text = f"version {version} is not there yet: the newest of every fragment is {newest}"
            raise Problem(409, "No such version", text)

    def _checkpoint(self, run: str, text: str) -> str:
        """The reference of a checkpoint that is there: 404 names those that are."""
        spec = spec_of(self.runs.record(run))
        source = reference(spec.folder, int(text)) if text.isdecimal() else text
        if source is text:
            must_see(text)
        with _problems():
            root = self.runs.checkpoints_of(spec)
            there, ref = RunCheckpoints.at(source, root, self.runs.places)
            there.manifest(ref)
        return ref if there.root == self.runs.checkpoints else f"{there.root.rstrip('/')}/{ref}"

    async def index(self, run: str) -> dict[str, Any]:
        """Exports of a run, oldest first: complete ones, the one being made, those that failed."""
        found = self.exports.of(run_id_of(self.runs.record(run)))
        return {"exports": [self.view(record) for record in found]}

    async def show(self, run: str, export: str) -> dict[str, Any]:
        """One export: its state, its progress, and its files once it is complete."""
        return self.view(self._record(run, export))

    async def remove(self, run: str, export: str) -> None:
        """Remove one for good; one that is being made is ended."""
        await self.exports.remove(self._record(run, export))

    async def file(self, run: str, export: str, file: str) -> FileResponse:
        """One file, whole or from where a download was cut off (`Range`)."""
        record = self._record(run, export)
        names = [f.name for f in record.files]
        # Only what the export lists: no name leads out of its folder.
        if file not in names:
            listed = ", ".join(names) or f"none, it is {record.state}"
            text = f"export {export} has no file {file[:200]!r}; its files: {listed}"
            raise Problem(404, "No such file", text)
        path = self.exports.shelf.files(record) / file
        if not await asyncio.to_thread(path.is_file):
            raise Problem(404, "No such file", f"{file!r} was removed: export the run again")
        return FileResponse(path, media_type="application/octet-stream", filename=file)

    def _record(self, run: str, export: str) -> ExportRecord:
        found = self.exports.of(run_id_of(self.runs.record(run)))
        record = next((r for r in found if r.id == export), None)
        if record is None:
            known = ", ".join(r.id for r in found) or "none"
            text = f"{run!r} has no export {export[:63]!r}; known: {known}"
            raise Problem(404, "No such export", text + self._elsewhere())
        return record

    def _elsewhere(self) -> str:
        """Where else an export may be: a balancer may have asked another coordinator for it."""
        living = self.registry.roll.living.items()
        there = sorted(name for name, record in living if record.role == "coordinator")
        if len(there) < 2:
            return ""
        return (
            f". It may be another coordinator's: {', '.join(there)} keep their own each "
            "(docs/how-to/deploy.md, Several coordinators)"
        )

    def view(self, record: ExportRecord) -> dict[str, Any]:
        """For people, progress included."""
        view = jsonable(record.model_dump(mode="json", exclude=_HIDDEN))
        pace = self.exports.pace(record)
        view["bytes"] = sum(f.bytes for f in record.files)
        view["progress"] = pace.view() if pace is not None else None
        return view


@contextmanager
def _problems() -> Iterator[None]:
    try:
        yield
    except ExportsBusy as error:
        raise Problem(409, "No export can begin now", str(error)) from None
    except CheckpointError as error:
        raise Problem(404, "No such checkpoint", str(error)) from None
    except OSError as error:
        raise Problem(503, "The export cannot begin", why_unwritten(error)) from None
