"""A simulated learner's inner state on disks: its own checkpoint, and its parts of the run's."""

from typing import TYPE_CHECKING

from diloco_learner.edges.parts import read_part, write_part
from diloco_learner.events import KeepPart, LoadState, PartSettled, StateGone
from diloco_learner.moments import pack
from diloco_shared.edges.checkpoints import Checkpoints
from diloco_shared.protocol.messages import Restored

if TYPE_CHECKING:
    from diloco_simulator.learner_life import LearnerLife

# Steps that a copy of the inner state is on its way: others meet it there.
HANDED_STEPS = 1.5


def keep_part(life: "LearnerLife", e: KeepPart) -> None:
    """Moments as they are now; told once they are durable, or cannot be."""
    moments = life.trainer.inner_state()
    life.watch.parts.kept(life.life, life.name, e.number, e.epoch, e.versions, moments)
    options = life.world.options

    def written() -> None:
        if not life.world.chance(options.disk_full, "part not written"):
            whose = (life.name, life.incarnation)
            write_part(life.spec, life.hub.vault, *whose, e, moments)
        life.hear(PartSettled(e.number))

    seconds = life.world.rng.uniform(0.05, 1.0) * options.disk_s
    life.world.after(seconds, lambda: life.enter(written))


def hand_out(life: "LearnerLife") -> None:
    """A copy of the inner state is on its way; told once it has arrived wherever it goes."""
    life.handed += 1

    def arrived() -> None:
        life.handed -= 1
        if life.handed == 0:
            life.hear(StateGone())

    life.world.after(HANDED_STEPS * life.node.step_s, lambda: life.enter(arrived))


def load_state(life: "LearnerLife", effect: LoadState) -> None:
    """Of a donor, of the run-wide checkpoint that history began with, or of the own disk."""
    if effect.source == "donor":
        life.trainer.load_inner_state(life.states[effect.nonce])
        life.world.after(life.world.options.delay_s, lambda: _forget_state(life))
    elif effect.source == "checkpoint":
        gone_back, own = _go_back(life, effect.restored), life.node.checkpoint
        if not gone_back and own is not None:
            life.trainer.load_inner_state(own[1])
    life.watch.recovered(life.name, effect.source)
    restored = effect.restored
    life.watch.parts.began(life.life, -1 if restored is None else restored.epoch)


def _forget_state(life: "LearnerLife") -> None:
    """What was sent to this learner is in use, and takes no more room."""
    life.hub.state.purge(lambda item: bool(item.message.newcomer == life.name))


def _go_back(life: "LearnerLife", restored: Restored | None) -> bool:
    """Moments of the checkpoint, unless its own are newer; whether there were any."""
    own = life.node.checkpoint
    if restored is None or (own is not None and own[0] >= restored.epoch):
        return False
    root, source = life.hub.vault, restored.source
    found, _ = read_part(root, source, life.name, lambda data: None)
    if found is None:
        return False
    life.trainer.load_inner_state(bytes(pack(found)))
    there, ref = Checkpoints.at(source, root)
    mine = life.name in there.manifest(ref)[0].learners
    life.watch.reached("moments of a checkpoint" if mine else "moments of somebody else's part")
    life.watch.parts.went_back(life.life, life.name, source, mine, life.trainer.inner_state())
    return True
