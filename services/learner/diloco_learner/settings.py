"""Settings of a learner process, from the environment (prefix DILOCO_)."""

from pathlib import Path

from pydantic import Field

from diloco_learner.training.kept import KEPT_BYTES_MAX, OFF
from diloco_shared.process.settings import WorkerSettings


class Settings(WorkerSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    threads: int = Field(
        0, ge=0, description="CPU threads for computation, 0 for all; 1 when learners share cores."
    )
    data_root: Path = Field(
        Path("."),
        description="Where relative paths of a run's corpora and tokenizers are looked for; the "
        "working directory unless it is given.",
    )
    corpora: Path | None = Field(
        None,
        description="Folder of corpora that learners have prepared of text, shared by those of "
        "this machine; <data>/corpora unless it is given.",
    )
    corpora_bytes_max: int = Field(
        64 << 30,
        ge=1 << 20,
        description="The least recently used of them are removed above so many bytes.",
    )
    cache: str = Field(
        "",
        description="Folder of compiled programs, shared by learners of this machine, so that a "
        "restart is quicker; <data>/compiled if empty, and 'off' keeps none.",
    )
    cache_bytes_max: int = Field(
        KEPT_BYTES_MAX,
        ge=1 << 20,
        description="The least recently used of them are removed above so many bytes.",
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
