"""What XLA is told where a learner computes with a few threads of its machine's processor."""


def xla_flags(threads: int) -> str:
    """For `XLA_FLAGS`, before jax is imported."""
    return (
        # What a single operation uses of XLA's pool.
        f"--xla_cpu_multi_thread_eigen={'false' if threads == 1 else 'true'} "
        f"intra_op_parallelism_threads={threads} "
        # A program is cut into as many pieces for the compiler, and not into 32: each piece costs
        # time, and more pieces than threads save none.
        f"--xla_cpu_parallel_codegen_split_count={threads}"
    )
