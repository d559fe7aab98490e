"""torch DistributedDataParallel over gloo: fp32 gradients are averaged at every step.

python bench/racing/run_ddp.py --job FOLDER --worker N
"""

import os
from datetime import timedelta

import torch
from torch import nn
from worker import Worker


def main() -> None:
    """Step through the job, all workers together."""
    worker = Worker("steps with everybody")
    s = worker.settings
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.port)}
    torch.distributed.init_process_group(
        "gloo",
        rank=worker.number,
        world_size=s.workers,
        timeout=timedelta(seconds=3 * s.patience_s),
    )
    worker.diary.tell("joined")
    model = nn.parallel.DistributedDataParallel(worker.model)
    for step in range(worker.job.steps):
        worker.step(step, model)
        worker.diary.tell("exchange", workers=s.workers)
    worker.finish()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
