"""What a plan may be asked for: hardware, links, failures and a deadline."""

from pydantic import Field

from diloco_planner.goodput_model import YEAR_S, Failures
from diloco_shared.spec.algorithm import MEMBERS_MAX, Spec


class PlanRequest(Spec):
    """What there is, and what is wanted of it. All chips are alike.

    Limits are far outside of what there is, and close enough that no quotient of two wishes, nor
    its rounding to whole steps, leaves the range of numbers.
    """

    params: float = Field(ge=1, le=1e14, description="Parameters of the model (N).")
    chips: int = Field(ge=1, le=100_000_000, description="Accelerators in all.")
    tokens: float | None = Field(
        None, ge=1, le=1e18, description="Tokens to train on; 20 per parameter if left out."
    )
    centers: int = Field(
        2, ge=1, le=MEMBERS_MAX, description="Data centers, each with a link to the hub."
    )
    link_gbit_per_s: float = Field(
        5.0,
        ge=1e-6,
        le=1e6,
        description="Gbit/s of each data center's link, each way. 2 to 5 are the paper's.",
    )
    round_trip_s: float = Field(
        0.06, ge=0, le=60, description="Seconds of a round trip between a data center and the hub."
    )
    hub_gbit_per_s: float = Field(
        25.0, ge=1e-6, le=1e6, description="Gbit/s of one syncer host's network, each way."
    )
    batch_tokens: float = Field(
        4e6, ge=1, le=1e12, description="Tokens per step of all learners together."
    )
    chip_flops: float = Field(4e14, ge=1e6, le=1e18, description="Peak of a chip, per second.")
    flops_share: float = Field(
        0.4, ge=1e-6, le=1, description="Share of the peak that training reaches."
    )
    step_s: float | None = Field(
        None, ge=1e-9, le=86_400, description="Seconds of an inner step, where it was measured."
    )
    mtbi_years: float = Field(
        1.0, ge=1e-6, le=1e6, description="Mean years between interruptions of a chip."
    )
    slice_chips: int = Field(256, ge=1, le=1_000_000, description="Chips that fail together.")
    goodput_min: float = Field(
        0.85,
        ge=1e-6,
        lt=1,
        description="Goodput, the share of the time that is useful: learners are added until it "
        "is reached.",
    )
    deadline_days: float | None = Field(
        None, ge=1e-6, le=1e6, description="Days after which the training must be over."
    )
    round_s_min: float = Field(
        0.25, ge=1e-6, le=3600, description="Least time between rounds: messages and commits."
    )
    syncer_cores: int = Field(
        2,
        ge=1,
        le=1024,
        description="Cores of one syncer host. What merging costs was measured on one and two "
        "cores "
        "(docs/results/scale.json), and is taken to spread over more.",
    )
    syncer_memory_gib: float = Field(
        256.0, ge=1e-3, le=1e6, description="GiB of memory of one syncer host."
    )
    syncer_disk_gb_per_s: float = Field(
        1.0,
        ge=1e-6,
        le=1e6,
        description="GB/s that one syncer host's disk writes without a pause: snapshots are made "
        "so seldom that they need no more. One NVMe disk of a server writes 1 or more for hours; "
        "many write faster only until their cache is full.",
    )

    @property
    def tokens_total(self) -> float:
        """Tokens of the whole run."""
        return 20 * self.params if self.tokens is None else self.tokens

    @property
    def seconds_per_step(self) -> float:
        """T: the same for any M, since learners share chips and batch alike."""
        if self.step_s is not None:
            return self.step_s
        return (
            6 * self.params * self.batch_tokens / (self.chips * self.chip_flops) / self.flops_share
        )

    @property
    def failures(self) -> Failures:
        """With the fitted times of goodput_model.py."""
        return Failures(mtbi_s=self.mtbi_years * YEAR_S, slice_chips=self.slice_chips)
