"""Errors as RFC 9457 problem details, each with what to do; specifications of other releases."""

from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from diloco_shared.bus.port import BusError
from diloco_shared.protocol.records import RunRecord
from diloco_shared.spec.run import RunSpec

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
_TITLES = {404: "No such address", 405: "Not done to this", 413: "Too large"}
# Where a request's value was: no part of the path that its sender wrote.
_SOURCES = {"body", "query", "path", "header"}


class Problem(Exception):
    """Raised by routes; becomes the response."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str,
        errors: list[dict[str, str]] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = errors
        self.headers = headers


def invalid(what: str, errors: list[dict[str, str]]) -> Problem:
    """422 naming every fault: `errors` of path and message."""
    return Problem(422, f"Invalid {what}", _listed(errors), errors)


def _listed(errors: list[dict[str, str]]) -> str:
    faults = "1 fault" if len(errors) == 1 else f"{len(errors)} faults"
    return f"{faults}: " + ", ".join(e["path"] for e in errors)


def body_of(
    status: int, title: str, detail: str, errors: list[dict[str, str]] | None = None
) -> dict[str, Any]:
    """The members of RFC 9457; `errors` is ours."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
    }
    if errors:
        body["errors"] = errors
    return body


def _told(request: Request, error: Problem) -> JSONResponse:
    asking = getattr(request.state, "asking", None)
    if asking is not None:
        asking.problem = error.title  # for the audit log
    body = body_of(error.status, error.title, error.detail, error.errors)
    return JSONResponse(body, error.status, error.headers, media_type=MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem detail."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, error: Problem) -> JSONResponse:
        return _told(request, error)

    @app.exception_handler(RequestValidationError)
    async def _request(request: Request, error: RequestValidationError) -> JSONResponse:
        found = []
        for e in error.errors():
            loc = [str(p) for p in e["loc"]]
            path = ".".join(loc[1:] if loc and loc[0] in _SOURCES else loc) or "(whole)"
            # Of a body that is no JSON at all, the location is an offset in it.
            path = "(whole)" if e["type"] == "json_invalid" else path
            found.append({"path": path, "message": str(e["msg"])})
        return _told(request, invalid("request", found))

    @app.exception_handler(BusError)
    async def _bus(request: Request, error: BusError) -> JSONResponse:
        text = f"{error}; training goes on meanwhile, try again in a few seconds"
        problem = Problem(503, "The bus does not answer", text, headers={"Retry-After": "3"})
        return _told(request, problem)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = str(error.detail)
        if error.status_code in (404, 405):
            detail = f"{request.method} {request.url.path}: the API is described at /openapi.json"
        title = _TITLES.get(error.status_code, detail)
        return _told(request, Problem(error.status_code, title, detail, headers=error.headers))

    @app.exception_handler(Exception)
    async def _fault(request: Request, error: Exception) -> JSONResponse:
        log.error("request failed", path=request.url.path, error=repr(error))
        text = "the coordinator made a mistake; its log says which. Training is not affected"
        return _told(request, Problem(500, "An error in the coordinator", text))


# --------------------------------------------------------------------------------------------------
# Specifications as they were written down, perhaps by another release than this one.


def spec_of(record: RunRecord) -> RunSpec:
    """What a run was submitted with; 409 where this release cannot read it."""
    return readable(record.spec, f"run {record.name!r}")


def readable(spec: dict[str, Any], whose: str) -> RunSpec:
    """409 where this release cannot read it."""
    try:
        return RunSpec.model_validate(spec)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Problem(
            409,
            "Written by another release",
            f"the specification of {whose} was written by another release, and this one cannot "
            f"read it ({where}: {first['msg']}): ask a coordinator of that release; here it can "
            "be shown, stopped and deleted",
        ) from None
