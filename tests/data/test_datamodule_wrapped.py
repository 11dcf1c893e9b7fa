"""The data module around another one."""

import torch
from small_sets import Linear, Somebodys, Y, ready, trainer
from torch.utils.data import DataLoader

from flsv.data import FederatedDataModule, IIDPartitioner, TensorBatches


def test_a_wrapped_module_is_read_as_it_reads_itself():
    wrapped, model = Somebodys(), Linear()
    data = FederatedDataModule(wrapped, IIDPartitioner(4))
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    assert wrapped.trainer is fit
    assert {len(y) for y in model.seen["train"]} == {7, 120 % 7}
    assert torch.equal(torch.cat(model.seen["val"]), Y[120:150])
    assert [len(y) for y in model.seen["val"]] == [11, 11, 8]
    assert len(data.server_val_indices) == 0
    assert isinstance(data.val_dataloader(), TensorBatches)
    fit.test(model, data, verbose=False)
    assert [len(y) for y in model.seen["test"]] == [13, 13, 13, 11]
    assert wrapped.calls == ["prepare_data", "setup fit", "prepare_data", "setup test"]


def test_test_and_predict_loaders_of_a_wrapped_module():
    class Predicting(Somebodys):
        def predict_dataloader(self):
            return "its own"

    data = ready(Predicting())
    data.setup("test")
    assert data.predict_dataloader() == "its own"
    data = ready(Somebodys())
    data.setup("predict")
    data.setup("test")
    assert isinstance(data.predict_dataloader(), DataLoader)


def test_batch_hooks_are_delegated_only_where_the_module_has_them():
    class Hooked(Somebodys):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer is not None
            self.calls.append("after")
            x, y = batch
            return x, torch.zeros_like(y)

    class Model(Linear):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.before = True
            return batch

    wrapped, model = Hooked(), Model()
    trainer(max_epochs=1).fit(model, FederatedDataModule(wrapped))
    assert "after" in wrapped.calls
    assert not torch.cat(model.seen["train"]).any()
    assert model.before


def test_teardown_of_a_wrapped_module_makes_the_next_setup_start_anew():
    class Tidy(Somebodys):
        def teardown(self, stage):
            self.calls.append("teardown")
            self.train = self.val = None

    wrapped, model = Tidy(), Linear()
    data = FederatedDataModule(wrapped)
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    indices = data.client_indices(1)
    assert "teardown" in wrapped.calls
    fit.test(model, data, verbose=False)
    assert torch.equal(data.client_indices(1), indices)
    assert wrapped.calls.count("setup fit") == 2


def test_state_of_a_wrapped_module_goes_into_the_checkpoint(tmp_path):
    class Stateful(Somebodys):
        loaded = None

        def state_dict(self):
            return {"cursor": 42}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    fit = trainer(max_epochs=1)
    fit.fit(Linear(), FederatedDataModule(Stateful()))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    wrapped = Stateful()
    trainer(max_epochs=2).fit(Linear(), FederatedDataModule(wrapped), ckpt_path=tmp_path / "last.ckpt")
    assert wrapped.loaded == {"cursor": 42}
    assert FederatedDataModule("digits").state_dict() == {}
