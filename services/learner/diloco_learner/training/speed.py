"""How fast a learner trains: tokens per second, utilisation of its devices, wait for data.

    speed = Speed()
    speed.stepped(at, tokens, data_wait_s)    # of the thread that trains, at every step boundary
    speed.window.tokens_per_s                 # of any thread

A device computes a step while the host is already at the next one. So a step is timed from one
boundary to the next, with all that lies between: while steps follow each other, that is what a
step takes. Where something comes between them that is no training, as a pause or an evaluation,
the step that follows has no time of its own, since the device was done before; neither its time nor
its tokens count. The first step has none either: nothing precedes it, and it may be compiled in it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_shared.protocol.records import LearnerSpeed
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import estimated_flops_per_token, flops_per_token, shape_of

# The newest steps that are looked at: at least so many seconds of them, so that quick steps do not
# make figures jump; and at least so many, so that one odd step does not decide where they are slow.
WINDOW_S, WINDOW_STEPS = 10.0, 5
# And no more than these: of steps this quick, 4096 are a second or more.
WINDOW_STEPS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """What the newest steps took: so many of them, in seconds, with tokens and waits for data."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    data_wait_s: float = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None: no step is timed yet, or no time has passed."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def data_wait_ratio(self) -> float | None:
        """Share of the time, 0 to 1; None as above."""
        return self.data_wait_s / self.seconds if self.seconds > 0 else None


class Speed:
    """Written by the thread that trains, with a few operations and no system call a step.

    Any thread may read `window` and `data_wait_s`: each is replaced as a whole.
    """

    def __init__(self) -> None:
        self.window = Window()
        self.untimed = False  # set by any thread: while a fault stops the process
        self.data_wait_s = 0.0  # in all, of steps that are not timed too
        self._sums = Window()  # over all timed steps
        self._before: deque[Window] = deque([self._sums])  # sums before each step of the window
        self._since: float | None = None  # boundary that the next step is timed from; None: not

    def stepped(self, at: float, tokens: int, data_wait_s: float) -> None:
        """A step boundary. `at`: seconds by a clock that stands still while a fault delays."""
        self.data_wait_s += data_wait_s
        since, self._since = self._since, None if self.untimed else at
        if since is None or self.untimed:
            return
        s = self._sums
        took_s = max(at - since, 0.0)
        self._sums = Window(
            s.steps + 1, s.seconds + took_s, s.tokens + tokens, s.data_wait_s + data_wait_s
        )
        while self._spare():
            self._before.popleft()
        first, last = self._before[0], self._sums
        self.window = Window(
            last.steps - first.steps,
            last.seconds - first.seconds,
            last.tokens - first.tokens,
            last.data_wait_s - first.data_wait_s,
        )
        self._before.append(last)

    def _spare(self) -> bool:
        """Whether the window is long enough without its oldest step."""
        if len(self._before) < 2:
            return False
        second = self._before[1]
        steps = self._sums.steps - second.steps
        long = steps >= WINDOW_STEPS and self._sums.seconds - second.seconds >= WINDOW_S
        return long or steps >= WINDOW_STEPS_MAX

    def interrupted(self) -> None:
        """Something that is no training comes before the next step: that one is not timed."""
        self._since = None


# --------------------------------------------------------------------------------------------------
# What devices can do at most, and what a model's arithmetic takes of it.

TERA = 1e12
# Dense bf16 operations per second of one device, by jax's `device_kind`. Vendors often print twice
# as much, for matrices of which half is zero: not these. A slice of a device has a name of its own
# and is not here.
PEAKS: dict[str, float] = {
    # NVIDIA H100 Tensor Core GPU datasheet: SXM, PCIe, NVL.
    "NVIDIA H100 80GB HBM3": 989.4 * TERA,
    "NVIDIA H100 PCIe": 756.0 * TERA,
    "NVIDIA H100 NVL": 835.5 * TERA,
    # NVIDIA H200 Tensor Core GPU datasheet: SXM, NVL.
    "NVIDIA H200": 989.4 * TERA,
    "NVIDIA H200 NVL": 835.5 * TERA,
    # NVIDIA HGX B200 datasheet: 36 PFLOP/s sparse of eight.
    "NVIDIA B200": 2250.0 * TERA,
    # NVIDIA A100 Tensor Core GPU datasheet.
    "NVIDIA A100-SXM4-40GB": 312.0 * TERA,
    "NVIDIA A100-SXM4-80GB": 312.0 * TERA,
    "NVIDIA A100-PCIE-40GB": 312.0 * TERA,
    "NVIDIA A100 80GB PCIe": 312.0 * TERA,
    # NVIDIA L4 and L40S datasheets.
    "NVIDIA L4": 121.0 * TERA,
    "NVIDIA L40S": 362.05 * TERA,
    # NVIDIA T4 and V100 datasheets: of fp16, the only 16-bit numbers their tensor cores know.
    "Tesla T4": 65.0 * TERA,
    "Tesla V100-SXM2-16GB": 125.0 * TERA,
    "Tesla V100-SXM2-32GB": 125.0 * TERA,
    "Tesla V100-PCIE-16GB": 112.0 * TERA,
    "Tesla V100-PCIE-32GB": 112.0 * TERA,
    # AMD Instinct MI300X accelerator data sheet.
    "AMD Instinct MI300X": 1307.4 * TERA,
    "AMD Instinct MI300X OAM": 1307.4 * TERA,
    # Google Cloud TPU documentation, system architecture of each: v4, v5e, v5p, v6e.
    "TPU v4": 275.0 * TERA,
    "TPU v5 lite": 197.0 * TERA,
    "TPU v5e": 197.0 * TERA,
    "TPU v5": 459.0 * TERA,
    "TPU v5p": 459.0 * TERA,
    "TPU v6 lite": 918.0 * TERA,
    "TPU v6e": 918.0 * TERA,
}


@dataclass(frozen=True, slots=True)
class Island:
    """The devices of a learner's process, and their memory in bytes as it is now.

    `kind`: jax's `device_kind`; of devices of several kinds all names. Memory is that of all
    devices together; where they share the host's or tell nothing, what is resident of the process.
    """

    platform: str
    kind: str
    devices: int
    memory_of_process: bool
    memory_bytes: int
    memory_peak_bytes: int
    memory_limit_bytes: int | None = None
    hosts: Mapping[str, float] = field(default_factory=dict)  # by host: how late it takes up steps

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 operations per second of all devices; None: not in the table."""
        peak = PEAKS.get(self.kind)
        return None if peak is None else peak * self.devices


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Operations of training on one token; `estimated` from the number of parameters alone."""

    flops_per_token: float
    estimated: bool

    @classmethod
    def of(cls, model: Model, parameters: int) -> "Arithmetic":
        """As `diloco model describe` counts them. A model of one's own has no shape to count by."""
        if model.factory is not None:
            return cls(estimated_flops_per_token(parameters), True)
        return cls(flops_per_token(shape_of(model), model.context_tokens), False)


def utilisation(
    tokens_per_s: float | None, arithmetic: Arithmetic, peak_flops: float | None
) -> float | None:
    """MFU: operations that the model needs per second, over the peak; None if either is unknown."""
    if tokens_per_s is None or peak_flops is None:
        return None
    return tokens_per_s * arithmetic.flops_per_token / peak_flops


def report(
    speed: Speed, island: Island, arithmetic: Arithmetic, run: str, learner: str, incarnation: int
) -> LearnerSpeed:
    """All that a learner says of its speed, as of now."""
    window, peak = speed.window, island.peak_flops
    return LearnerSpeed(
        run=run,
        learner=learner,
        incarnation=incarnation,
        platform=island.platform[:40],
        device=island.kind[:200],
        devices=island.devices,
        steps=window.steps,
        seconds=window.seconds,
        tokens_per_s=window.tokens_per_s,
        data_wait_ratio=window.data_wait_ratio,
        data_wait_s=speed.data_wait_s,
        mfu=utilisation(window.tokens_per_s, arithmetic, peak),
        flops_per_token=arithmetic.flops_per_token,
        flops_estimated=arithmetic.estimated,
        peak_flops=peak,
        memory_of="process" if island.memory_of_process else "device",
        memory_bytes=island.memory_bytes,
        memory_peak_bytes=island.memory_peak_bytes,
        memory_limit_bytes=island.memory_limit_bytes,
        hosts=dict(island.hosts),
    )
