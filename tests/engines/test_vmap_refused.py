"""What the batched engine cannot train is refused with the reason."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flsv.training.algorithms import FedProx, MoreauSGD
from helpers import refused
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit, make_engine_loop
from helpers.models import Plain, Plainest


class Steps(Plainest):
    """Its step is a function of itself, the plain step's loss and what the plain step is given."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def training_step(self, batch, batch_idx):
        return self.function(self, super().training_step(batch, batch_idx), batch, batch_idx)


steps = partial(partial, Steps)
by_step = partial(
    Plainest, scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1), interval="step"
)


class Manual(Plainest):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Plainest):
    def on_before_optimizer_step(self, optimizer):
        pass


def bias_before_norm() -> Plain:
    net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
    return Plain(net, partial(torch.optim.RMSprop, lr=0.1, eps=1e-12))


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (
        steps(lambda module, loss, *_: loss / max(loss.item(), 1.0)),
        {},
        {},
        "does not allow it: vmap",
    ),
    (
        steps(lambda module, loss, batch, batch_idx: loss * (2 if batch_idx <= 0 else 1)),
        {},
        {},
        "looks at batch_idx",
    ),
    (steps(lambda *_: None), {}, {}, "gives NoneType, and a loss"),
    # Not what it is under torch.func: the trial's own work.
    (
        steps(lambda module, loss, batch, idx: loss if type(idx) is int else 1.01 * loss),
        {},
        {},
        "differs by .* where 1e-05 is allowed",
    ),
    (bias_before_norm, {}, {}, "differs by"),
    (Manual, {}, {}, "steps its optimizers itself"),
    (partial(Plainest, MoreauSGD), {}, {}, "MoreauSGD is not known to allow"),
    (partial(Plainest, torch.optim.LBFGS), {}, {}, "LBFGS is not known to allow"),
    (by_step, {}, {}, "StepLR steps after every batch"),
    (Hooked, {}, {}, "Hooked defines on_before_optimizer_step"),
    (Plainest, {"optimizer_state": "persist"}, {}, "gives every client the moments that it left"),
    (Plainest, {"client_algorithm": FedProx(0.1)}, {}, "client_algorithm=.*changes the gradients"),
    (Plainest, {}, {"precision": "bf16-true"}, "precision='bf16-true'"),
]


@pytest.mark.filterwarnings("ignore:.*round 1 is discarded.*")
@pytest.mark.parametrize(
    ("make", "federation", "trainer", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED]
)
def test_vmap_with_an_unsupported_setting_is_refused(tmp_path, make, federation, trainer, reason):
    with refused(f'(?s)engine="vmap".*{reason}.*engine="sequential"'):
        fit(
            make_engine_loop("vmap", **federation),
            tmp_path,
            make(),
            toy_data((4, 2, 1)),
            1,
            **trainer,
        )
