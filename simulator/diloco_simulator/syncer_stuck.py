"""A simulated standby that cannot execute the tape: where it looks, as the product's edge does."""

from typing import TYPE_CHECKING

from diloco_shared.edges.checkpoints import CheckpointError
from diloco_shared.protocol.messages import TapeRebirth, TapeRestore
from diloco_simulator.hub import Hub
from diloco_syncer.edges.finding import Finder
from diloco_syncer.edges.parts import load_recorded
from diloco_syncer.edges.published import Unpublished
from diloco_syncer.edges.snapshots import SnapshotStore
from diloco_syncer.history import History, is_of
from diloco_syncer.rebirth import LastResort, Reborn, chains, decoded, reborn, reborn_store
from diloco_syncer.store import FragmentStore, Values

if TYPE_CHECKING:
    from diloco_simulator.syncer_node import SyncerNode

Begun = tuple[History, FragmentStore | None, Reborn | None]


class Stuck:
    """Of one process."""

    def __init__(self, node: "SyncerNode") -> None:
        self.node = node
        self.hub = node.hub
        self.last_resort = LastResort(node.hub.spec)

    def way_on(self, known: History, now: float, elsewhere: str) -> Begun | None:
        """Where to go on from; None: not yet. `elsewhere`: who else has the lease."""
        node = self.node
        found = self._checkpoint(known.seq)
        if found is not None:
            node.watch.reached("goes on from a checkpoint's part")
            return found
        giver = node.giver(known.seq)
        if giver is not None:
            node.world.counts["snapshots fetched"] += 1
            giver.disk.give(node.disk)
            return *node.newest(), None
        why_not = self.last_resort.look(
            now, leader=elsewhere, fit=node.peers("fit"), coming=node.peers("coming"), asked=False
        )
        if why_not:
            return None
        try:
            return self._begin_again(History.restore(self.hub.spec, known.meta()))
        except (Unpublished, CheckpointError):
            return None

    def _checkpoint(self, after: int) -> Begun | None:
        """Its part is as good as a snapshot, wherever it was written."""
        spec, nowhere = self.hub.spec, self.node.folder
        finder = Finder(
            spec, self.node.shard.number, nowhere, SnapshotStore(nowhere), self.hub.vault
        )
        found = finder.checkpoint(after)
        tape = self.node.shard.tape
        if found is None or found.seq > len(tape) or not is_of(found.history, tape[found.seq - 1]):
            return None  # of records that were lost
        return History.restore(spec, found.history), found.store, None

    def _begin_again(self, history: History) -> Begun:
        for record in self.node.shard.tape[history.seq :]:
            if isinstance(record, TapeRestore):
                spec, shard = history.spec, history.shard
                back = load_recorded(spec, shard, record, self.hub.vault)
                history.resume(back.history, record, history.seq + 1)
            else:
                history.apply(record, history.seq + 1)
        if not history.initialised:
            raise Unpublished("nothing has been published yet")
        store, born = read_newest(self.hub, history)
        published = born.versions, born.anchor_digests
        if history.outcome and published != (
            tuple(history.versions),
            tuple(history.anchor_digests),
        ):
            raise Unpublished("the run is over, and its last versions are not published")
        return history, store, born


def read_newest(hub: Hub, history: History) -> tuple[FragmentStore, Reborn]:
    """As the product's edge reads DN; Unpublished when a fragment cannot be had."""
    manifests = [i.message for i in hub.dn.items]
    found, anchors = {}, dict[int, Values]()
    for p in history.owned:
        options = chains(history, p, manifests)
        if not options:
            raise Unpublished(f"nothing that makes a version of fragment {p} is published")
        found[p], anchors[p] = options[0][-1], _anchor(hub, options[0])
    epoch = max((m.epoch for m in manifests if m.fragment in history.owned), default=0)
    born = reborn(history, found, epoch, "every disk is lost")
    return reborn_store(history, born.versions, anchors), born


def read_recorded(hub: Hub, history: History, record: TapeRebirth) -> FragmentStore:
    """What a rebirth on the tape began with, as long as DN has it."""
    manifests, anchors = [i.message for i in hub.dn.items], dict[int, Values]()
    for p in history.owned:
        wanted = record.anchor_digests[p]
        options = [c for c in chains(history, p, manifests) if c[-1].anchor_digest == wanted]
        if not options:
            raise Unpublished(f"fragment {p} has moved on")
        anchors[p] = _anchor(hub, options[0])
    return reborn_store(history, record.versions, anchors)


def _anchor(hub: Hub, chain: tuple) -> Values:  # type: ignore[type-arg]
    anchor_F: Values | None = None
    for m in chain:
        anchor_F = decoded(m, hub.dn.by_subject[m.blob.subject].payload, anchor_F)
    assert anchor_F is not None
    return anchor_F
