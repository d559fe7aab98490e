"""What travels, how long it takes at a given rate, and what links and disks take on average."""

from dataclasses import dataclass
from typing import Any

from diloco_shared.budget.job import Job
from diloco_shared.budget.memory import ONE_DEVICE, disks, processes, snapshots_per_step
from diloco_shared.budget.streams import SNAPSHOT_BYTES, limits, streams
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.mesh import MeshSizes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Something that travels as a whole."""

    name: str
    bytes: int
    how: str

    def seconds(self, bits_per_s: float) -> float:
        """How long it takes on a link that carries nothing else."""
        return 8 * self.bytes / bits_per_s


def transfers(job: Job) -> list[Transfer]:
    """Of a run, the largest of their kind; fragments are the largest one."""
    a, f = job.spec.algorithm, job.largest
    every = a.keyframe_every
    newest = 4 * job.parameters + (every - 1) * _all(job, a.codec_down)
    return [
        Transfer("initial parameters", 4 * job.parameters, "4 bytes x N, once"),
        Transfer("a contribution", bytes_of(a.codec_up, f), f"a fragment in {a.codec_up}"),
        Transfer("a publication", bytes_of(a.codec_down, f), f"a fragment in {a.codec_down}"),
        Transfer("a keyframe", bytes_of(a.keyframe_codec, f), f"a fragment in {a.keyframe_codec}"),
        Transfer("a newcomer's parameters", newest, "keyframes and every version since, at most"),
        Transfer("a newcomer's moments", job.state, f"inner state ({job.spec.inner.optimizer})"),
        Transfer(
            "a standby's snapshot",
            SNAPSHOT_BYTES * job.parameters // a.shards,
            f"{SNAPSHOT_BYTES} bytes x N of a shard",
        ),
    ]


def _all(job: Job, codec: str) -> int:
    return sum(bytes_of(codec, size) for size in job.sizes)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Bits per inner step, on average: over a step's seconds they are what the link must carry."""

    learner_up: float
    learner_down: float
    hub_in: float
    hub_out: float


def load(job: Job) -> LinkLoad:
    """Every fragment once in H steps, up from each learner and down to each; keyframes included."""
    a, m, h = job.spec.algorithm, job.learners, job.spec.algorithm.sync_every_steps
    up = 8 * _all(job, a.codec_up) / h
    deltas, whole = _all(job, a.codec_down), _all(job, a.keyframe_codec)
    down = 8 * (deltas * (a.keyframe_every - 1) + whole) / a.keyframe_every / h
    # The leader reads contributions, and so does every standby.
    readers = job.spec.membership.syncers
    return LinkLoad(up, down, m * up + down, m * up * readers + m * down)


def view(
    job: Job,
    *,
    bits_per_s: float | None = None,
    step_s: float | None = None,
    mesh: MeshSizes = ONE_DEVICE,
    hosts: int = 1,
) -> dict[str, Any]:
    """The whole budget, JSON-ready; bytes, seconds, bits. `mesh`: of a learner of `hosts` hosts."""
    needs = streams(job)
    average = load(job)
    per_step = {name: getattr(average, name) for name in LinkLoad.__slots__}
    written = {"syncer": snapshots_per_step(job)}
    return {
        "parameters": job.parameters,
        "assumed": job.assumed,
        "learners": job.learners,
        "fragments": len(job.sizes),
        "largest_fragment": job.largest,
        "mesh": str(mesh),
        "hosts": hosts,
        "streams": {k: need.view() for k, need in needs.items()},
        "limits": limits(job),
        "memory": {k: need.view() for k, need in processes(job, mesh, hosts).items()},
        "disk": {k: need.view() for k, need in disks(job).items()},
        "transfers": [
            {
                "name": t.name,
                "bytes": t.bytes,
                "how": t.how,
                "seconds": None if bits_per_s is None else t.seconds(bits_per_s),
            }
            for t in transfers(job)
        ],
        "bits_per_step": per_step,
        "bits_per_s": None if step_s is None else {k: v / step_s for k, v in per_step.items()},
        "disk_bytes_per_step": written,
        "disk_bytes_per_s": None if step_s is None else {k: v / step_s for k, v in written.items()},
    }
