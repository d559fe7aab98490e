"""Errors as RFC 9457 problem details, each saying what is wrong and what to do."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from diloco_shared.edges.bus import BusError


class Problem(Exception):
    """Raised by routes; becomes the response."""

    def __init__(
        self, status: int, title: str, detail: str, errors: list[dict[str, str]] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = errors


def faults(error: ValidationError | RequestValidationError) -> list[dict[str, str]]:
    """Every fault of a document, by the path of the value."""
    return [
        {"path": ".".join(str(part) for part in e["loc"]) or "(whole)", "message": e["msg"]}
        for e in error.errors()
    ]


def invalid(what: str, error: ValidationError) -> Problem:
    """422 naming every fault."""
    found = faults(error)
    paths = ", ".join(f["path"] for f in found)
    return Problem(422, f"Invalid {what}", f"{len(found)} faults: {paths}", found)


def response(
    status: int, title: str, detail: str, errors: list[dict[str, str]] | None = None
) -> JSONResponse:
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": detail,
    }
    if errors:
        body["errors"] = errors
    return JSONResponse(body, status, media_type="application/problem+json")


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem detail."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> JSONResponse:
        return response(error.status, error.title, error.detail, error.errors)

    @app.exception_handler(RequestValidationError)
    async def _request(_: Request, error: RequestValidationError) -> JSONResponse:
        found = faults(error)
        return response(422, "Invalid request", f"{len(found)} faults in the request", found)

    @app.exception_handler(BusError)
    async def _bus(_: Request, error: BusError) -> JSONResponse:
        return response(
            503,
            "The bus does not answer",
            f"{error}; training goes on meanwhile, try again in a few seconds",
        )

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return response(error.status_code, str(error.detail), str(error.detail))
