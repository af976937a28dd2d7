"""A model of a few weights that trains for some steps in this process, and its checkpoints."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from slipstream.pipeline.train.checkpoint.home import Retention
from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.checkpoint.state import AppState

IDENTITY = {"training": {"seed": 0}, "data": "abc"}


class Run:
    """A small model that trains, and its checkpoints."""

    def __init__(
        self,
        home: Path | str,
        width: int = 8,
        identity: dict[str, Any] = IDENTITY,
        fused: bool | None = None,
        retention: Retention | None = None,
        **policy: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.3), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=fused)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.checkpoints = Checkpoints(
            str(home),
            AppState(self.model, self.optimizer, parts={"scheduler": self.scheduler}),
            ResumePolicy(identity, **policy),
            retention=retention,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            noise = random.random() + np.random.rand()
            self.model(torch.randn(16, 4) + noise).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def save(self, step: int, **kwargs: Any) -> None:
        self.checkpoints.save(step, {"step": step}, **kwargs)
        self.checkpoints.finish()

    def everything(self) -> dict[str, torch.Tensor]:
        state = self.optimizer.state_dict()["state"]
        moments = {f"{index}.{name}": tensor for index, of in state.items() for name, tensor in of.items()}
        return {**self.model.state_dict(), **moments}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.glob("step-*"))
