"""A module's own hooks count the client's batches, and are its own again."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torchmetrics import PearsonCorrCoef

from flsv._lightning.several_processes import _merge_states, _state
from flsv.federation import FederatedLoop
from helpers.data import toy_data
from helpers.fits import fit
from helpers.models import Plain

LOCAL_EPOCHS = 2


class Counts(Plain):
    """Notes what its hooks are told."""

    def __init__(self):
        super().__init__()
        self.shared = SimpleNamespace(told={})

    def _note(self, hook, batch_idx):
        self.shared.told.setdefault(hook, []).append(batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self._note("start", batch_idx)

    def training_step(self, batch, batch_idx):
        self._note("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self._note("optimizer", batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["loss"].isfinite()
        self._note("end", batch_idx)


def test_batch_idx_in_module_hooks_restarts_with_each_local_epoch(tmp_path):
    module = Counts()
    data = toy_data()
    loop = FederatedLoop(seed=1, local_epochs=LOCAL_EPOCHS)
    fit(loop, tmp_path, module, data, rounds=2)
    indices_of_round = []
    for client in range(3):
        stream = torch.Generator()
        length = len(data.client_loader(client, generator=stream))
        indices_of_round += LOCAL_EPOCHS * list(range(length))

    assert module.shared.told == {
        "start": 2 * indices_of_round,
        "step": 2 * indices_of_round,
        "optimizer": 2 * indices_of_round,
        "end": 2 * indices_of_round,
    }


class NotesLastBatches(Plain):
    """Notes in every batch, by hook, whether the Trainer calls it the last."""

    def __init__(self):
        super().__init__()
        self.shared = SimpleNamespace(is_last={})

    def note(self, hook):
        if self.trainer.training:  # not in a validation
            self.shared.is_last.setdefault(hook, []).append(self.trainer.is_last_batch)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.note("transfer")
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        self.note("start")

    def on_before_zero_grad(self, optimizer):
        self.note("step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("end")


class FetchesItsBatches(NotesLastBatches):
    """Lightning transfers no batch for it."""

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize(
    ("make_module", "hooks"),
    [
        (NotesLastBatches, ["transfer", "start", "step", "end"]),
        (FetchesItsBatches, ["start", "step", "end"]),
    ],
)
def test_last_batch_in_every_hook_is_that_of_a_clients_last_local_epoch(
    tmp_path, make_module, hooks
):
    module = make_module()
    data = toy_data()
    fit(FederatedLoop(seed=1, local_epochs=LOCAL_EPOCHS), tmp_path, module, data, rounds=2)

    expected = []
    for client in range(data.num_clients):
        length = len(data.client_loader(client, generator=torch.Generator()))
        expected += [False] * (LOCAL_EPOCHS * length - 1) + [True]
    assert module.shared.is_last == dict.fromkeys(hooks, 2 * expected)


class FailsInItsFirstStep(Counts):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        raise ZeroDivisionError("mine")


def test_module_has_its_own_hooks_again_after_a_failed_fit(tmp_path):
    module = FailsInItsFirstStep()
    own_hook = Mock(return_value=None)  # -1 would end the epoch
    module.on_train_batch_start = own_hook

    with pytest.raises(ZeroDivisionError):
        fit(FederatedLoop(seed=1), tmp_path, module, rounds=1)

    hooks_of_loop = {"on_train_batch_end", "optimizer_step"}
    assert vars(module)["on_train_batch_start"] is own_hook
    assert hooks_of_loop.isdisjoint(vars(module))

    fit_loop = module.trainer.fit_loop
    assert "on_advance_end" not in vars(fit_loop.epoch_loop)
    assert type(fit_loop).__name__ == "_FitLoop"  # Lightning's own class


def test_torchmetrics_state_without_a_reduction_is_refused_when_merged():
    metric = PearsonCorrCoef()
    with pytest.raises(RuntimeError, match="PearsonCorrCoef .* has no reduction,"):
        _merge_states(metric, [_state(metric), _state(metric)])
