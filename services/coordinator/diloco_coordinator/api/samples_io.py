"""/v1/runs/RUN/samples: let an exported model of a run write, and stream what it writes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Receive, Scope, Send

from diloco_coordinator.api.auth_io import Guard
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.api.runs_io import Runs
from diloco_coordinator.api.sse_io import EventStreams
from diloco_coordinator.exports.exporting_io import Exports, ExportsBusy
from diloco_coordinator.exports.exports import ExportRecord
from diloco_coordinator.exports.sampling_io import Sample, Samples
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared.protocol.samples import (
    PROMPT_CHARS_MAX,
    TEMPERATURE_MAX,
    TOKENS_MAX,
    SampleAsked,
    SampleDone,
    SampleFailed,
    SampleLine,
    SampleText,
)

# In every export of a model that others know, and in no other.
CONFIG = "config.json"
# A sample takes seconds: whoever finds another one going on may ask again so soon.
RETRY_S = 5


class SampleRequest(BaseModel):
    """What to write."""

    model_config = ConfigDict(extra="forbid")
    prompt: str = Field(
        "",
        max_length=PROMPT_CHARS_MAX,
        description="What the text begins with; empty: a new document.",
    )
    tokens: int = Field(128, ge=1, le=TOKENS_MAX, description="Tokens at most.")
    temperature: float = Field(
        0.8,
        ge=0,
        le=TEMPERATURE_MAX,
        description="How freely tokens are drawn; 0: always the likeliest.",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Another one, another text.")
    chat: bool = Field(False, description="The prompt is a user's message, and is answered.")
    export: str | None = Field(
        None, max_length=63, description="Id of a complete export; null: the run's newest."
    )


class SampleRoutes:
    """The routes, over the exports that the coordinator keeps."""

    def __init__(
        self, guard: Guard, runs: Runs, exports: Exports, streams: EventStreams, samples: Samples
    ) -> None:
        self.runs = runs
        self.exports = exports
        self.streams = streams
        self.samples = samples
        self.router = APIRouter(prefix="/v1/runs/{run}/samples", tags=["samples"])
        # As for an export: it takes the coordinator's processor.
        shown: dict[str, Any] = {"response_class": StreamingResponse}
        self.router.add_api_route("", self.begin, methods=["POST"], **shown, **guard.act)

    async def begin(
        self,
        run: str,
        request: Request,
        body: Annotated[SampleRequest | None, Body()] = None,
    ) -> StreamingResponse:
        """Text as it is written: server-sent events whose data is JSON.

        The first one names the export and its step ("begun"); each further one has a piece of text
        ("text"), and the last one says that this was all ("done") or why no more comes ("failed").
        409 where none of the run is there, 429 while
        another sample is written, 501 where the coordinator's machine lacks what models need.
        """
        wanted = body or SampleRequest.model_validate({})
        record = self._export(run, wanted.export)
        if missing := self.samples.sampler.hindrance():
            raise Problem(501, "Nothing can be sampled here", missing)
        asked = SampleAsked.model_validate(wanted.model_dump(exclude={"export"}))
        try:
            sample = self.samples.begin(self.exports.shelf.files(record), asked)
        except ExportsBusy as error:
            headers = {"Retry-After": str(RETRY_S)}
            raise Problem(429, "Another sample goes on", str(error), headers=headers) from None
        try:
            first = await _first(sample, request)
            if isinstance(first, SampleFailed):
                raise Problem(422, "The model cannot write this", first.reason)
            return _Ending(self.streams.opened(_told(record, sample)), sample)
        except BaseException:
            await sample.end()
            raise

    def _export(self, run: str, wanted: str | None) -> ExportRecord:
        """The export in question: 409, or 404 for one that was named, where it is not there."""
        there = self.exports.of(run_id_of(self.runs.record(run)))
        complete = [r for r in there if r.state == "complete"]
        if wanted is not None:
            found = next((r for r in complete if r.id == wanted), None)
            if found is None:
                known = ", ".join(r.id for r in complete) or "none"
                text = f"{run!r} has no complete export {wanted!r}; known: {known}"
                raise Problem(404, "No such export", text)
        elif complete:
            found = complete[-1]
        else:
            going = any(r.state == "running" for r in there)
            what = "one is being made: wait for it" if going else "export the run first"
            text = (
                f"a sample is of an export, and {run!r} has none here yet: {what} (POST "
                f"/v1/runs/{run}/exports, or 'diloco export {run} --to FOLDER')"
            )
            raise Problem(409, "Nothing to sample from", text)
        if all(file.name != CONFIG for file in found.files):
            text = (
                f"{run!r} trains a model of its own kind: 'diloco export' writes its weights, and "
                "its own code must sample from them"
            )
            raise Problem(409, "Nothing to sample from", text)
        return found


async def _first(sample: Sample, request: Request) -> SampleLine:
    """Its first line. 499 where nobody waits for it any more: a model may take minutes to read."""
    line = asyncio.create_task(sample.next())
    # The body has been read: all that comes behind it is that the client has left.
    left = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({line, left}, return_when=asyncio.FIRST_COMPLETED)
        if not line.done():
            raise Problem(499, "Nobody waits for it", "the client left before the first word")
        return await line
    finally:
        line.cancel()
        left.cancel()


class _Ending(StreamingResponse):
    """A stream that ends its sample, also where it was never begun: whoever leaves while its
    beginning is being sent keeps its chunks from ever being asked for."""

    def __init__(self, stream: StreamingResponse, sample: Sample) -> None:
        super().__init__(stream.body_iterator, stream.status_code, stream.headers)
        self.sample = sample

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of any stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.sample.end()


async def _told(record: ExportRecord, sample: Sample) -> AsyncIterator[str]:
    yield _event({"begun": True, "export": record.id, "steps": record.steps})
    async for line in sample.lines():
        match line:
            case SampleText():
                yield _event({"text": line.text})
            case SampleDone():
                yield _event({"done": True, "pieces": line.pieces})
            case SampleFailed():
                yield _event({"failed": line.reason})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
