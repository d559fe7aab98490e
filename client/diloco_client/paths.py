"""Names as parts of a path."""

from urllib.parse import quote

from diloco_client.answers import ApiError


def part(name: str) -> str:
    """A name as one part of a path, whatever it contains.

    ApiError for `.` and `..`: whoever reads a path takes them for "here" and "one up", however they
    are written. So the request would reach something else, such as the run instead of its export.
    """
    if name in (".", ".."):
        raise ApiError(404, "No such name", f"nothing is called {name!r}")
    # Bytes of a terminal that are no UTF-8 come as halves of characters, which no name has.
    return quote(name, safe="", errors="backslashreplace") or "-"
