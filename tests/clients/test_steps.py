"""Which optimizer steps are a client's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from toys import Plain, fit, network, vector

from flsv.clients.algorithms import FedProx
from flsv.loop import FederatedLoop


class StepsBetweenRounds(Plain):
    """Manual optimization, and a step of the module's own on the global model when a round is complete."""

    def __init__(self, own_lr: float) -> None:
        super().__init__(network(batch_norm=False), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.automatic_optimization, self.own_lr = False, own_lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()

    def on_train_epoch_end(self) -> None:
        optimizer = self.optimizers()
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)
        (group,) = optimizer.param_groups
        group["lr"], before = self.own_lr, group["lr"]
        optimizer.step()
        group["lr"] = before


def test_a_step_between_two_rounds_is_nobodys(tmp_path: Path) -> None:
    """The client algorithm leaves its gradients alone: the global model moves by the module's own step."""
    still, moved = (
        vector(fit(FederatedLoop(client_algorithm=FedProx(0.5), seed=0), tmp_path, StepsBetweenRounds(lr), rounds=1))
        for lr in (0.0, 0.25)
    )
    torch.testing.assert_close(moved, still - 0.25)
