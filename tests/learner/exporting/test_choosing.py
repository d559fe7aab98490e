"""Which publications make a view: whole chains, one epoch, and errors that name what there is."""

import asyncio
from typing import Any

import numpy as np
import pytest
from learner.exporting.publishing import Publisher, spec

from diloco_learner.exporting.choosing import (
    NotPublished,
    NotYetPublished,
    chains,
    choose,
    layout_of,
)
from diloco_shared.bus.stored_records import messages_of
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import PublicationManifest
from diloco_shared.spec.run import config_hash
from diloco_simulator.hub.broker import MemoryBroker

SPEC = spec()
HASH = config_hash(SPEC)


def published(*fragments: str) -> list[PublicationManifest]:
    """Manifests by fragment: `K` a keyframe, `d` a delta, `.` one that is gone."""

    async def make() -> list[PublicationManifest]:
        syncer = Publisher(MemoryBroker(), SPEC)
        await syncer.prepare()
        for p, letters in enumerate(fragments):
            for n, letter in enumerate(letters):
                if letter == "K":
                    size = syncer.layout.sizes[p]
                    await syncer.keyframe(p, np.full(size, float(n), np.float32))
                else:
                    syncer.anchors.setdefault(p, np.zeros(syncer.layout.sizes[p], np.float32))
                    await syncer.delta(p, n)
        stream = subjects.dn_stream("r")
        stored = await syncer.bus.fetch(stream, "dn.r.*.*.*.*.m")
        found = messages_of(stored, PublicationManifest)
        return [m for m in found if fragments[m.fragment][m.version] != "."]

    return asyncio.run(make())


def test_the_newest_of_each_fragment_is_taken() -> None:
    view = choose("r", published("Kdd", "KdK", "K"), 3, HASH)
    assert [m.version for m in view.newest] == [2, 2, 0]
    assert [len(chain) for chain in view.chains] == [3, 1, 1], "a keyframe needs nothing before it"
    assert layout_of(SPEC, view).sizes == tuple(m.values for m in view.newest)


def test_what_builds_on_something_that_is_gone_is_not_taken() -> None:
    found = chains([m for m in published("Kd.dKd", "K", "K") if m.fragment == 0])
    assert {v: len(chain) for v, chain in found.items()} == {0: 1, 1: 2, 4: 1, 5: 2}


def test_a_given_version_is_taken_of_every_fragment() -> None:
    view = choose("r", published("Kddd", "Kdd", "KdKd"), 3, HASH, 2)
    assert [m.version for m in view.newest] == [2, 2, 2]


@pytest.mark.parametrize(
    ("fragments", "version", "says"),
    [
        (("Kddd", "Kdd", "Kd"), 3, "what can be had now is versions 0 to 1 of every fragment"),
        (("..Kd", "..Kd", "...K"), 1, "what can be had now is version 3 of every fragment"),
        (("K", ".K", "..K"), 9, r"no version can be had of every fragment \(0: version 0, 1: "),
        (("K.K", "K.K", "K.K"), 1, "what can be had now is versions 0, 2 of every fragment"),
    ],
)
def test_a_version_that_is_not_kept_names_what_is(
    fragments: tuple[str, ...], version: int, says: str
) -> None:
    with pytest.raises(
        NotPublished, match=f"version {version} of run 'r' is not kept.*{says}"
    ) as e:
        choose("r", published(*fragments), 3, HASH, version)
    assert not isinstance(e.value, NotYetPublished)


def test_a_run_that_published_nothing_may_soon() -> None:
    with pytest.raises(NotYetPublished, match="has published nothing yet: try again"):
        choose("r", [], 3, HASH)
    other = published("K", "K", "K")
    with pytest.raises(NotPublished, match="has published nothing yet"):
        choose("r", other, 3, "f" * 32)


def test_an_epoch_that_has_just_begun_is_waited_for() -> None:
    old = published("K", "K", "K")
    begun = [m.model_copy(update={"epoch": 1}) for m in old[:1]]
    with pytest.raises(NotYetPublished, match="fragments 1, 2 are not published in epoch 1"):
        choose("r", [*old, *begun], 3, HASH)
    whole = [m.model_copy(update={"epoch": 1}) for m in old]
    assert choose("r", [*old, *whole], 3, HASH).epoch == 1


def test_of_several_terms_a_keyframe_is_best_and_then_the_newest() -> None:
    (delta,) = [m for m in published("Kd", "K", "K") if m.version == 1]
    (first,) = [m for m in published("K", "K", "K") if m.fragment == 0]

    def term(m: Any, number: int, prev: int) -> PublicationManifest:
        return PublicationManifest.model_validate(
            {**m.model_dump(), "term": number, "prev_version": prev}
        )

    found = chains([term(first, 1, -1), term(delta, 1, 0), term(delta, 2, -1), term(delta, 3, 0)])
    assert [(m.term, m.prev_version) for m in found[1]] == [(2, -1)]
    found = chains([term(first, 1, -1), term(first, 2, -1), term(delta, 1, 0), term(delta, 3, 0)])
    assert [m.term for m in found[1]] == [2, 3]


def test_fragments_that_are_cut_otherwise_are_refused() -> None:
    view = choose("r", published("K", "K", "K"), 3, HASH)
    wrong = view.chains[0][0].model_copy(update={"values": 1})
    changed = type(view)(0, ((wrong,), *view.chains[1:]))
    with pytest.raises(ValueError, match="fragment 0 was published with 1 values"):
        layout_of(SPEC, changed)
