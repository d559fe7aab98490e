"""Which places of checkpoints a request or a specification may name: configured roots, and below.

    reach_of("s3://bucket/checkpoints/team", ("s3://bucket/checkpoints",))   "s3://bucket/…/team"
    reach_of("s3://bucket/checkpoints-evil", ("s3://bucket/checkpoints",))   OutOfReach

An address is taken apart, and compared part by part: names that only begin alike are others. What
comes back is put together anew, so that whoever opens it reads nothing into it that was not seen.
Nothing is opened or asked; of a folder the links in its path are followed.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote

from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.reach.local import OutOfReach, entries, shown

# The longest key that a bucket takes, and far above the longest address that anybody types.
ADDRESS_CHARS_MAX = 1024
# Stores that are reached by an address; anything else is a folder, or nothing.
BUCKETS = ("gs", "s3")
# In an address these would mean something else to whoever opens it: a query, an anchor, another
# way to write a slash, another host's user.
_STRANGE = re.compile(r"[\x00-\x20\x7f\\?#@]")
# In a name that was unescaped: a separator, or what another unescaping would change.
_LEADING = re.compile(r"[/\\\\]|%[0-9A-Fa-f]{2}")

Resolve = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Location:
    """A folder (`store` is ""), or a bucket ("s3://bucket"); and the way to it, name by name."""

    store: str
    names: tuple[str, ...]

    def holds(self, other: "Location") -> bool:
        """Whether `other` is this place or below it."""
        return self.store == other.store and other.names[: len(self.names)] == self.names

    @property
    def address(self) -> str:
        if not self.store:
            return "/" + "/".join(self.names)
        return "/".join([self.store, *(quote(name) for name in self.names)])


def roots_of(own: str, further: str) -> tuple[str, ...]:
    """The root that is used where nobody says another one, and those of DILOCO_CHECKPOINT_ROOTS."""
    return (own, *entries(further, "DILOCO_CHECKPOINT_ROOTS"))


def reach_of(address: str, roots: Sequence[str], resolve: Resolve = os.path.realpath) -> str:
    """Where checkpoints may be looked for by this address: as it is configured, or below that.

    `resolve` gives a folder's path with all links followed. Raises OutOfReach.
    """
    if address in roots:
        return address
    allowed = [place for root in roots if (place := location_of(root, resolve)) is not None]
    found = location_of(address, resolve)
    if found is None or not any(root.holds(found) for root in allowed):
        raise OutOfReach(
            f"{shown(address)} is not below a place where checkpoints may be on this machine: name "
            "one that is, or let whoever runs it add the place to DILOCO_CHECKPOINT_ROOTS (several "
            "are separated by commas)"
        )
    return found.address


def root_of_run(named: str, places: Sequence[str]) -> str:
    """Where the checkpoints of a run are: where it says, or in the first of the places.

    Raises OutOfReach for a place that is not below one of them.
    """
    return reach_of(named, places) if named else places[0]


def reference_in(
    text: str, root: str, further: Sequence[str] = (), resolve: Resolve = os.path.realpath
) -> tuple[str, str, int]:
    """(root, folder, number) of a reference: FOLDER/NUMBER in `root`, or an address that ends so.

    Raises ValueError for anything else, and OutOfReach for what is not in `root` or a further one.
    """
    own, folder, number = parse_reference(text[: ADDRESS_CHARS_MAX + 1])
    found = reach_of(own, (root, *further), resolve) if own else root
    place = location_of(found, resolve)
    # A run's folder may be a link, too.
    if place is not None and not place.store:
        led = _folder(f"{place.address.rstrip('/')}/{folder}", resolve)
        if led is None or not place.holds(led):
            raise OutOfReach(
                f"{shown(folder)} leads out of the place where checkpoints are: a folder that is a "
                "link is not followed"
            )
    return found, folder, number


def location_of(address: str, resolve: Resolve) -> Location | None:
    """None for what is no address of a place, or could be read in two ways."""
    scheme, separator, rest = address.partition("://")
    if not address or len(address) > ADDRESS_CHARS_MAX or "\0" in address:
        return None
    if not separator:
        return _folder(address, resolve)
    if _STRANGE.search(rest):
        return None
    host, _, path = rest.partition("/")
    names = _names(path)
    if names is None:
        return None
    if scheme == "file":
        return None if host else _folder("/" + "/".join(names), resolve)
    if scheme not in BUCKETS or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host):
        return None
    return Location(f"{scheme}://{host}", names)


def _names(path: str) -> tuple[str, ...] | None:
    """Of an address, unescaped once; None where a name is empty, leads up, or is escaped twice."""
    parts = path.removesuffix("/").split("/") if path.strip("/") else []
    try:
        names = tuple(unquote(part, errors="strict") for part in parts)
    except UnicodeDecodeError:
        return None
    return names if all(map(_is_plain, names)) else None


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and name.isprintable() and not _LEADING.search(name)


def _folder(path: str, resolve: Resolve) -> Location | None:
    if path.startswith("~") or ".." in path.split("/"):
        return None
    try:
        real = resolve(path)
    except (OSError, ValueError):
        return None
    return Location("", tuple(name for name in real.split("/") if name))
