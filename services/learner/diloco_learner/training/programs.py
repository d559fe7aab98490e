"""Programs compiled ahead: from the shapes of their arguments, before any of those exist."""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax

from diloco_learner.training.compiling import compiled

# XLA's scheduler for CPUs spends memory on concurrency: twice the gradients for AdamW, seven times
# for Muon. The other one computes the same bits with about one gradient's worth, and is no slower.
_ON_CPU = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@cache
def compiler_options() -> dict[str, Any] | None:
    """What every program is compiled with: as little memory as the compiler can do with."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x + 1, compiler_options=dict(_ON_CPU)).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:  # a compiler that does not know the option
        return None
    return dict(_ON_CPU)


class Ahead:
    """A function of device arrays that is compiled once for every key of its arguments.

    `key` tells apart the arguments that need programs of their own. The first argument is static
    where `static` says so: part of the program, hashable. Donated arguments must not be used again.
    On several devices, `scope` is what the function is traced in, `turn` what it is handed to them
    in, and `lying` how arguments and results lie on them: (those of the arguments that are not
    static, those of the results).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        key: Callable[..., Hashable],
        *,
        static: bool = False,
        donate: tuple[int, ...] = (),
        scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
        lying: tuple[Any, Any] | None = None,
    ) -> None:
        self.key = key
        self.scope = scope
        self.turn = turn
        self.first = 1 if static else 0
        self.jitted = jax.jit(
            function,
            static_argnums=(0,) if static else (),
            donate_argnums=donate,
            compiler_options=compiler_options(),
            **({} if lying is None else {"in_shardings": lying[0], "out_shardings": lying[1]}),
        )
        self.programs: dict[Hashable, Any] = {}

    def compile(self, *args: Any) -> Any:
        """The program for these arguments, or for their shapes: nothing is computed."""
        key = self.key(*args)
        if key not in self.programs:
            with self.scope():
                self.programs[key] = compiled(self.jitted.lower(*args))
        return self.programs[key]

    def __call__(self, *args: Any) -> Any:
        program = self.compile(*args)
        with self.turn():
            return program(*args[self.first :])
