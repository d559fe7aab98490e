"""Run-wide checkpoints, and the way back to one."""
