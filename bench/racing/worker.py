"""What all torch peers share: the model, AdamW, one inner step, the diary."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoder import Decoder, Shape
from job import Diary, Job, final
from torch import nn


class Worker:
    """One worker of a job, on one thread."""

    def __init__(self, what: str) -> None:
        parser = argparse.ArgumentParser(description=what)
        parser.add_argument("--job", type=Path, required=True)
        parser.add_argument("--worker", type=int, required=True)
        args = parser.parse_args()
        torch.set_num_threads(1)
        self.number: int = args.worker
        self.job = Job(args.job)
        self.settings = s = self.job.settings
        self.diary = Diary(args.job, self.number)
        self.model = Decoder(Shape(*s.shape))
        self.model.fill(self.job.initial)
        parameters = list(self.model.parameters())
        # As the project does: norms have no scale to lose.
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": s.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.inner = torch.optim.AdamW(groups, 1.0, (s.b1, s.b2), eps=1e-8)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def outer(self, parameters: list[Any]) -> torch.optim.SGD:
        """Nesterov SGD over the global parameters."""
        s = self.settings
        nesterov = s.outer_momentum > 0
        return torch.optim.SGD(parameters, s.outer_rate, s.outer_momentum, nesterov=nesterov)

    def step(self, step: int, model: Any = None) -> None:
        """One inner step on the batch of `step`, at its rate; told when it is done."""
        loss = (model or self.model)(torch.from_numpy(self.job.batch(self.number, step)))
        self.inner.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        for group in self.inner.param_groups:
            group["lr"] = self.job.rate(step)
        self.inner.step()
        self.diary.tell("step", step=step, loss=float(loss.detach()))

    def finish(self) -> None:
        """Leave the parameters for whoever evaluates them."""
        values = {name: p.detach().numpy() for name, p in self.model.named().items()}
        np.savez(final(self.job.folder, self.number), **values)
        self.diary.tell("finished")
