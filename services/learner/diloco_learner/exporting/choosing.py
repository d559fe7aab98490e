"""Which publications make one consistent view of a run's parameters. Pure.

A fragment's version is a keyframe, or a keyframe and every delta since: a *chain*. DN keeps of each
fragment the newest keyframe and what follows it, so the versions since then can be had.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco_shared.protocol.messages import PublicationManifest, TensorSpec
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import shape_of, tensors

Chain = tuple[PublicationManifest, ...]  # a keyframe first

# Fragments that a message names one by one; a run may have hundreds.
NAMED_MAX = 8


class NotPublished(Exception):
    """What is wanted is not among the publications; the text says what is."""


class NotYetPublished(NotPublished):
    """It may be there in a moment, without anybody's doing."""


@dataclass(frozen=True, slots=True)
class View:
    """For every fragment, what its parameters are made of; all of one epoch."""

    epoch: int
    chains: tuple[Chain, ...]

    @property
    def newest(self) -> tuple[PublicationManifest, ...]:
        """The publication of every fragment that the view ends with."""
        return tuple(chain[-1] for chain in self.chains)


def choose(
    run: str,
    manifests: Iterable[PublicationManifest],
    fragments: int,
    config_hash: str,
    version: int | None = None,
) -> View:
    """The view of the newest epoch: of each fragment its newest version, or the one given.

    Raises NotPublished. Publications of another configuration are nobody's of this run.
    """
    ours = [m for m in manifests if m.config_hash == config_hash and m.fragment < fragments]
    if not ours:
        text = f"run {run!r} has published nothing yet: try again once it trains"
        raise NotYetPublished(text)
    epoch = max(m.epoch for m in ours)
    found = [
        chains([m for m in ours if (m.epoch, m.fragment) == (epoch, p)]) for p in range(fragments)
    ]
    absent = [p for p, of_p in enumerate(found) if not of_p]
    if absent:
        text = (
            f"of run {run!r}, {_named(absent)} not published in epoch {epoch} yet: try again in a "
            "minute"
        )
        raise NotYetPublished(text)
    if version is None:
        return View(epoch, tuple(of_p[max(of_p)] for of_p in found))
    if any(version not in of_p for of_p in found):
        raise NotPublished(_not_kept(run, version, found))
    return View(epoch, tuple(of_p[version] for of_p in found))


def chains(manifests: Sequence[PublicationManifest]) -> dict[int, Chain]:
    """By version, what makes it: of one fragment and epoch, where nothing in between is gone.

    Several terms may have published a version: they are the same bytes, so a keyframe is best, and
    the newest term among equals.
    """
    best: dict[int, PublicationManifest] = {}
    for m in sorted(manifests, key=lambda m: (m.prev_version < 0, m.term)):
        best[m.version] = m
    found: dict[int, Chain] = {}
    for version in sorted(best):
        m = best[version]
        if m.prev_version < 0:
            found[version] = (m,)
        elif m.prev_version in found:
            found[version] = (*found[m.prev_version], m)
    return found


def _not_kept(run: str, version: int, found: Sequence[Mapping[int, Chain]]) -> str:
    """What there is instead of a version."""
    common = set.intersection(*(set(of_p) for of_p in found))
    if common:
        what = f"what can be had now is {_span(common)} of every fragment"
    else:
        each = ", ".join(f"{p}: {_span(of_p)}" for p, of_p in enumerate(found[:NAMED_MAX]))
        more = ", …" if len(found) > NAMED_MAX else ""
        what = f"no version can be had of every fragment ({each}{more})"
    return (
        f"version {version} of run {run!r} is not kept, or not there yet; {what}. Leave the "
        "version out to take the newest of each"
    )


def _span(versions: Iterable[int]) -> str:
    listed = sorted(versions)
    least, most = listed[0], listed[-1]
    if len(listed) == 1:
        return f"version {least}"
    if len(listed) == most - least + 1:
        return f"versions {least} to {most}"
    return f"versions {', '.join(map(str, listed[-NAMED_MAX:]))}"


def _named(fragments: Sequence[int]) -> str:
    listed = ", ".join(map(str, fragments[:NAMED_MAX]))
    listed += ", …" if len(fragments) > NAMED_MAX else ""
    return f"fragment {listed} is" if len(fragments) == 1 else f"fragments {listed} are"


# --------------------------------------------------------------------------------------------------
# Whose values these are.


def layout_of(spec: RunSpec, view: View) -> Layout:
    """How the tensors are cut into the view's fragments: as its keyframes say.

    Raises ValueError when this program would cut them otherwise.
    """
    layout = Layout.build(_tensors(spec, view), len(view.chains))
    for p, (m, size) in enumerate(zip(view.newest, layout.sizes, strict=True)):
        if m.values != size:
            raise ValueError(
                f"fragment {p} was published with {m.values} values and this program cuts {size}: "
                "export with the release that the run was begun with"
            )
    return layout


def _tensors(spec: RunSpec, view: View) -> tuple[TensorSpec, ...]:
    told = next((m.layout for chain in view.chains for m in chain if m.layout), ())
    if told:
        return told
    if spec.model.factory is not None:
        raise ValueError("no publication tells the tensors of this model: it cannot be exported")
    return tensors(shape_of(spec.model))
