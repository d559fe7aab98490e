"""Settings of a learner process, from the environment (prefix DILOCO_)."""

from pathlib import Path

from pydantic import Field

from diloco_shared.process.settings import WorkerSettings


class Settings(WorkerSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    threads: int = Field(
        0, ge=0, description="CPU threads for computation, 0 for all; 1 when learners share cores."
    )
    cache: Path | None = Field(
        None, description="Folder of compiled programs, shared by learners; a restart is quicker."
    )
