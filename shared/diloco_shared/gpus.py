"""Which GPUs of this machine a process may use, and which of them each learner gets.

Asked of the driver's own tool, so that nobody need load the libraries of devices for it.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

# What NVIDIA's libraries take as the devices that a process may see.
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Of `nvidia-smi -L`: a driver that is not loaded yet takes seconds, one that hangs is left alone.
ASK_S = 20.0


def gpus_here(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """NVIDIA GPUs by their numbers, or as CUDA_VISIBLE_DEVICES names them; () if there are none.

    A machine without the driver's tool counts as one without such GPUs.
    """
    given = environment.get(VISIBLE)
    if given is not None:
        return visible(given)
    try:
        said = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASK_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(str(n) for n in range(sum(line.startswith("GPU ") for line in said.splitlines())))


def visible(given: str) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names: as NVIDIA's libraries do, up to the first that is none."""
    found: list[str] = []
    for name in (part.strip() for part in given.split(",")):
        if not name or name.startswith("-"):
            break
        found.append(name)
    return tuple(found)


def shared_out(gpus: Sequence[str], learners: int, each: int = 0) -> list[tuple[str, ...]]:
    """GPUs of each learner: `each` of its own, or by 0 as many as there are for all alike.

    Where there are more learners than GPUs, several share one if `each` is 0. Raises ValueError
    where there are too few for `each`; the text says what to do.
    """
    if each:
        if each * learners > len(gpus):
            raise ValueError(
                f"{learners} learners of {each} need {each * learners} GPUs, and this machine has "
                f"{len(gpus)}: start fewer learners, or give each fewer"
            )
        return [tuple(gpus[n * each : (n + 1) * each]) for n in range(learners)]
    if not gpus:
        return [()] * learners
    if learners > len(gpus):
        return [(gpus[n % len(gpus)],) for n in range(learners)]
    alike = len(gpus) // max(learners, 1)
    return [tuple(gpus[n * alike : (n + 1) * alike]) for n in range(learners)]


def unused(gpus: Sequence[str], platform: str) -> str:
    """What to say where there are GPUs and JAX computes on the CPU; "" where all is well."""
    if not gpus or platform != "cpu":
        return ""
    count = f"{len(gpus)} GPUs" if len(gpus) > 1 else "a GPU"
    return (
        f"this machine has {count}, and JAX uses none: install it with '.[gpu]', and see that "
        "JAX_PLATFORMS does not say cpu"
    )
