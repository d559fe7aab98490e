"""One process of an island of several hosts, without a run: what it computes, and gives, and keeps.

    python on_hosts.py PORT HOSTS INDEX MESH DEVICES    # process 0 prints a line of JSON

DEVICES, of each process, are told before jax is imported.
"""

import gc
import json
import os
import sys
import traceback
from typing import Any

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[5]} " + os.environ.get(
    "XLA_FLAGS", ""
)

import jax
import numpy as np

from diloco_learner.exchange.anchors import AnchorBook
from diloco_learner.hosts import hand, plan
from diloco_learner.hosts.computing_io import followed, gathered
from diloco_learner.hosts.held_anchors import HeldAnchor
from diloco_learner.hosts.leading_io import Hosts
from diloco_learner.hosts.place import HostPlace
from diloco_learner.hosts.trainer import HostsTrainer
from diloco_learner.settings import Settings
from diloco_learner.training.evaluate import HeldOut
from diloco_learner.training.mesh import mesh_over
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.numerics import codec
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.process.logs import configure
from diloco_shared.protocol.chunks import Headed, describe
from diloco_shared.protocol.messages import PublicationManifest, Stamp
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import RunSpec

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
PORT, HOSTS, INDEX, MESH = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
SHAPE = {
    "width": 16,
    "layers": 1,
    "heads": 4,
    "kv_heads": 2,
    "head_width": 8,
    "hidden": 64,
    "vocabulary": 640,
    "tied": True,
}
SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "seed": 3,
        "algorithm": {"fragments": 3, "sync_every_steps": 6, "codec_up": "int4"},
        "model": {"context_tokens": 16, "overrides": SHAPE},
        "inner": {"batch_sequences": 8, "warmup_steps": 0},
        "budget": {"steps": 10},
    }
)
STEPS = 10


def tokens(seed: int, sequences: int = 8) -> Any:
    return np.random.default_rng(seed).integers(0, 640, (sequences, 17)).astype(np.int32)


def steps(trained: Trainer, first: int, many: int) -> list[float]:
    return [float(trained.step(tokens(n), 0.01)) for n in range(first, first + many)]


def anchors(program: Program) -> list[Any]:
    rng = np.random.default_rng(7)
    return [0.02 * rng.standard_normal(n).astype(np.float32) for n in program.layout.sizes]


def adopt(trained: Trainer) -> None:
    for p, anchor_F in enumerate(anchors(trained.program)):
        trained.adopt(p, anchor_F, 0.0)


def taken_in(trained: HostsTrainer) -> dict[str, Any]:
    """A keyframe and a delta taken in by the learner's book, here and as one host does."""
    sizes = trained.program.layout.sizes
    books = AnchorBook(sizes), AnchorBook(sizes, trained.hold)
    same, whole = [], 0
    for p, anchor_F in enumerate(anchors(trained.program)):
        for made in publications(p, anchor_F):
            taken = [book.offer(*made) for book in books]
            one, many = (book.take(0, p, made[0].version) for book in books)
            same.append(taken[0] == taken[1] and np.asarray(many).tobytes() == one.tobytes())
        trained.adopt(p, many, 0.0)
        same.append(trained.fragment(p).tobytes() == one.tobytes())
        whole += one.nbytes
    own = sum(anchor.own_bytes for anchor in trained.anchors)
    known = {id(anchor) for anchor in trained.anchors}
    alive = [one for one in gc.get_objects() if isinstance(one, HeldAnchor)]
    return {
        "same": all(same),
        "bytes": whole,
        "own": own,
        "others": sum(one.own_bytes for one in alive if id(one) not in known),
    }


def publications(p: int, anchor_F: Any) -> list[tuple[PublicationManifest, bytes]]:
    found, before_F = [], None
    for version, (name, values_F) in enumerate((("fp32", anchor_F), ("int4", anchor_F[::-1]))):
        payload = bytes(codec.encode(name, np.ascontiguousarray(values_F)))
        made_F = codec.decode(name, payload, len(anchor_F))
        before_F = made_F if before_F is None else before_F + made_F
        manifest = PublicationManifest(
            run="r",
            epoch=0,
            term=1,
            round=version,
            fragment=p,
            version=version,
            prev_version=version - 1,
            codec=name,
            values=len(anchor_F),
            anchor_digest=digest_array(before_F),
            config_hash="0" * 32,
            participants=("a",),
            last_merged={},
            stamp=Stamp(round=version, steps=0, fraction=0.0, fraction_per_step=0.0),
            blob=describe("dn.r", payload),
        )
        found.append((manifest, payload))
    return found


def sent(trained: Trainer) -> dict[str, bool]:
    """Whether two contributions in a row are what the compiled encoder makes of the same values;
    the second one carries what the first one withheld."""
    found = {}
    for p in range(len(trained.anchors)):
        anchor_F, owed = trained.anchors[p], 0.0
        total = (anchor_F - trained.fragment(p)) + np.float32(owed)
        for round_ in range(2):
            wanted = codec.encode("int4", total)
            got = bytes(trained.contribution(p, round_).fetch())
            found[f"{p} in round {round_}"] = got == bytes(wanted)
            trained.decided(p, round_, merged=True)
            owed = total - codec.decode("int4", wanted, len(total))
            total = (anchor_F - trained.fragment(p)) + owed
    return found


def main() -> None:
    place = HostPlace(HOSTS, INDEX, "127.0.0.1", PORT)
    configure("info")
    jax.config.update("jax_enable_compilation_cache", False)  # as a learner's process of several
    if INDEX:
        if INDEX == 1:
            has_no_room_once()
        followed(place, Settings(hosts_carry="first"))
    hosts = gathered(place, 4.0)
    one = Trainer(Program.build(SPEC))
    found = lead(hosts, one)
    print(json.dumps(found), flush=True)
    hosts.close()
    os._exit(0)


def has_no_room_once() -> None:
    """The first evaluation finds no memory here."""
    begin, failures = hand.empty, [MemoryError("no room")]

    def begun(*given: Any) -> Any:
        if failures:
            raise failures.pop()
        return begin(*given)

    hand.empty = begun


def lead(hosts: Hosts, one: Trainer) -> dict[str, Any]:
    sizes = mesh_of(MESH)
    assert sizes is not None
    program = Program.build(SPEC, mesh=mesh_over(sizes, jax.devices()))
    answers = hosts.answers(hosts.tell(plan.Prepare(SPEC.model_dump_json(), MESH, -1)))
    assert not any(len(fault) for fault in answers.values()), answers
    trained = HostsTrainer(program, hosts)
    begins = [
        a.tobytes() == b.tobytes()
        for a, b in zip(trained.initial_fragments(), one.initial_fragments(), strict=True)
    ]
    losses = [steps(trained, 0, STEPS), steps(one, 0, STEPS)]
    # Moments of one device, as a donor gives them: the same bits on this mesh.
    moments = bytes(one.inner_state())
    trained.load_inner_state(moments)
    moved = bytes(trained.inner_state()) == moments
    pieces = b"".join(bytes(p) for p in trained.inner_state_pieces()) == moments
    # As a newcomer is given them, and as a run begins: shares of all processes, put together.
    given = [trained.given_state(), trained.initial_fragment(0)]
    payloads = [moments, bytes(Headed(*codec.frame(trained.fragment(0))))]
    made = [state.shared.compose("s").outgoing for state in given]
    shared = [bytes(o.payload[0 : o.blob.bytes]) == p for o, p in zip(made, payloads, strict=True)]
    adopt(trained)
    adopt(one)
    adopted = [
        a.tobytes() == b.tobytes()
        for a, b in zip(trained.initial_fragments(), anchors(program), strict=True)
    ]
    after = [steps(trained, 20, 3), steps(one, 20, 3)]
    held, failed = HeldOut(tokens(99, 5)), ""
    try:
        trained.evaluate(trained.published(), held)
    except RuntimeError as error:
        failed = str(error)  # and they go on in step
    after = [a + b for a, b in zip(after, [steps(trained, 23, 1), steps(one, 23, 1)], strict=True)]
    evaluated = [t.evaluate(t.published(), held).overall for t in (trained, one)]
    return {
        "devices": len(jax.devices()),
        "begins": all(begins),
        "losses": losses,
        "moved": moved,
        "pieces": pieces,
        "shared": all(shared),
        "adopted": all(adopted),
        "after": after,
        "sent": sent(trained),
        "evaluated": evaluated,
        "failed": failed,
        "held": taken_in(trained),
        "shown": hosts.shown(),
    }


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # at the end of a process jax would wait for the others
