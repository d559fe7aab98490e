"""Settings of a learner process, from the environment (prefix DILOCO_)."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator

from diloco_learner.hosts.place import checkpoints_at
from diloco_learner.training.compilation_cache import KEPT_BYTES_MAX, OFF
from diloco_shared.process.settings import WorkerSettings
from diloco_shared.reach.local import DataRoots, Factories, Reach
from diloco_shared.spec.mesh import AXES, mesh_of

# In which a process stops when nothing else is said, in seconds: Docker kills after 10, and to take
# leave may take CLOSES_S more (`stopping`). 'diloco up' and the files for deployment say more.
STOP_S = 6.0


class Settings(WorkerSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    threads: int = Field(
        0, ge=0, description="CPU threads for computation, 0 for all; 1 when learners share cores."
    )
    duty_cycle: float = Field(
        1.0,
        # Nothing is answered in a rest, which takes nine times as long as the step at most.
        ge=0.1,
        le=1,
        description="The share of its time in which this learner computes, 0.1 to 1; it rests "
        "after each step. Less than 1 leaves a machine, or its GPU, to others who use it too.",
    )
    stop_s: float = Field(
        STOP_S,
        ge=2.0,
        le=3600.0,
        description="Told to stop, this process ends after so many seconds at the latest, with its "
        "optimizer's state saved if its step and the saving take less. Whoever stops it must wait "
        "some seconds longer before it kills. Raise both for a large model.",
    )
    mesh: str = Field(
        "auto",
        description="How the devices of this process share the work, as 'fsdp=8' or "
        f"'data=2,fsdp=4'; axes are {', '.join(AXES[:-1])} and {AXES[-1]}. 'auto': fsdp over the "
        "devices there are, as many of them as a step's sequences can be spread over evenly. "
        "'fsdp=1': one device.",
    )
    hosts: str = Field(
        "1",
        description="How many processes, of as many hosts, make this one learner; 'slurm': as many "
        "as srun started. Each is told the same, and DILOCO_HOST_INDEX.",
    )
    host_index: int | None = Field(
        None,
        description="Which of them this one is, from 0 on. The first one speaks for all. Not "
        "needed with 'slurm', nor in a Job of Kubernetes that counts its pods.",
    )
    host_address: str = Field(
        "",
        description="Where the first one is, as node0:8470; the same for all. Not needed with "
        "'slurm'.",
    )
    host_silence_s: float = Field(
        4.0,
        ge=1.0,
        description="A process of them without a sign of life for so long counts as dead, and the "
        "island ends and begins again; less than a run's membership.lease_s.",
    )
    hosts_carry: Literal["all", "first"] = Field(
        "all",
        description="Which of them carry payloads to and from the bus: 'all', each a share over a "
        "connection of its own, and the first one for those that cannot connect; or the 'first' "
        "one alone. The same for all.",
    )
    hosts_checkpoints: str = Field(
        "",
        description="A folder, or gs:// or s3://, that all of them reach: each writes its part of "
        "the learner's own checkpoints there, beside training. The same place for all. Empty: the "
        "first one writes all of it to its own data folder, and training stands still while the "
        "others send it their parts.",
    )
    data_root: str = Field(
        ".",
        description="Folders, separated by commas, that hold all that runs may read here: corpora, "
        "tokenizers and weights. Relative paths begin in the first one; the working directory "
        "unless it is given.",
    )
    factories: str = Field(
        "",
        description="Whose modules a run's model.factory may name: modules, or folders with them "
        "('.' or with a slash), separated by commas; '*' allows any, and so the execution of what "
        "is installed. Empty: only the built-in models. 'diloco up' sets its folder and "
        "PYTHONPATH.",
    )
    corpora: Path | None = Field(
        None,
        description="Folder of corpora that learners have prepared of text, shared by those of "
        "this machine; <data>/corpora unless it is given.",
    )
    corpora_bytes_max: int = Field(
        64 << 30,
        ge=1 << 20,
        description="Above so many bytes, those that nobody uses are removed, the least recently "
        "used first.",
    )
    cache: str = Field(
        "",
        description="Folder of compiled programs, shared by learners of this machine, so that a "
        "restart is quicker; <data>/compiled if empty, and 'off' keeps none. Where several hosts "
        "make one learner (DILOCO_HOSTS), none are kept, whatever this says.",
    )
    cache_bytes_max: int = Field(
        KEPT_BYTES_MAX,
        ge=1 << 20,
        description="The least recently used of them are removed above so many bytes.",
    )

    @field_validator("factories")
    @classmethod
    def _readable(cls, text: str) -> str:
        Factories.of(text)
        return text

    @field_validator("hosts_checkpoints")
    @classmethod
    def _writable(cls, text: str) -> str:
        return checkpoints_at(text)

    @field_validator("mesh")
    @classmethod
    def _arrangeable(cls, text: str) -> str:
        mesh_of(text)
        return text

    def of_host(self, hosts: int) -> Self:
        """For one of so many processes: where all carry, each has its share of the limits."""
        if self.hosts_carry == "first":
            return self
        limits = {
            "uplink_bytes_per_s": self.uplink_bytes_per_s / hosts,
            "downlink_bytes_per_s": self.downlink_bytes_per_s / hosts,
        }
        return self.model_copy(update=limits)

    @property
    def reach(self) -> Reach:
        """What runs may open here."""
        return Reach(
            DataRoots.of(self.data_root), Factories.of(self.factories), self.checkpoint_places
        )

    @property
    def corpus_cache(self) -> Path:
        """Where prepared corpora are kept."""
        return self.corpora or self.data / "corpora"

    @property
    def compiled(self) -> Path | None:
        """Where compiled programs are kept, if they are."""
        if self.cache == OFF:
            return None
        return Path(self.cache) if self.cache else self.data / "compiled"
