"""Settings of a syncer process, from the environment (prefix DILOCO_)."""

from pydantic import Field

from diloco_shared.process.settings import WorkerSettings


class Settings(WorkerSettings):
    """One per process; every field may be set as DILOCO_<FIELD>."""

    payload_bytes_max: int | None = Field(
        None,
        ge=1 << 20,
        description="Encoded contributions held in memory at once; what the run needs if not set.",
    )
