"""What the batched engine cannot train is refused with the reason."""

from functools import partial

import pytest
import torch

from flsv.training.algorithms import FedProx
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit, make_engine_loop
from helpers.models import Plainest


class Steps(Plainest):
    """Its step is a function of itself, the plain step's loss and what the plain step is given."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def training_step(self, batch, batch_idx):
        return self.function(
            self,
            super().training_step(batch, batch_idx),
            batch,
            batch_idx,
        )


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


REFUSED = [
    (
        steps(lambda module, loss, batch, idx: loss * (2 if idx <= 0 else 1)),
        {},
        "reads batch_idx",
    ),
    (steps(lambda *_: None), {}, "must return a loss, .*returned NoneType"),
    # Not what it is under torch.func: the trial's own work.
    (
        steps(lambda module, loss, batch, idx: loss if type(idx) is int else 1.01 * loss),
        {},
        "differs by .* The tolerance is 1e-05",
    ),
    (Manual, {}, "steps its optimizers itself"),
    (partial(Plainest, torch.optim.LBFGS), {}, "LBFGS is not known to"),
    (by_step, {}, "StepLR steps after every batch"),
    (Hooked, {}, "Hooked defines on_before_optimizer_step"),
    (Plainest, {"optimizer_state": "persist"}, "gives every client the moments"),
    (Plainest, {"client_algorithm": FedProx(0.1)}, "client_algorithm=.*changes the gradients"),
]


@pytest.mark.filterwarnings("ignore:.*round 1 is discarded.*")
@pytest.mark.parametrize(
    (
        "make",
        "federation",
        "reason",
    ),
    REFUSED,
    ids=[reason for *_, reason in REFUSED],
)
def test_vmap_with_an_unsupported_setting_is_refused(tmp_path, make, federation, reason):
    loop = make_engine_loop("vmap", **federation)
    with refused(f'(?s)engine="vmap".*{reason}.*engine="sequential"'):
        fit(loop, tmp_path, make(), toy_data((4, 2, 1)), 1)


def test_vmap_with_weights_of_half_precision_is_refused(tmp_path):
    with refused("precision='bf16-true'"):
        fit(make_engine_loop("vmap"), tmp_path, Plainest(), rounds=1, precision="bf16-true")
