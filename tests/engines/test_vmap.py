"""FederatedLoop(engine="vmap") against the sequential engine: equal to 1e-5, or refused with the reason."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from batched_pairs import SIZES, Plainest, loop, pair
from lightning.pytorch.callbacks import Callback
from resume_run import checkpoints
from torch import Tensor, nn
from toys import Plain, adam, fit, toy_data, toy_sets, trainer_for, vector

from flsv import ClientEvaluation, FederatedDataModule
from flsv.aggregation import ShapFedWA
from flsv.data import SizePartitioner
from flsv.engines.vmap import VmapProcess
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, SurrogateFederatedShapley
from flsv.personalization import ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import TopK

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": adam,
    "adamw": partial(torch.optim.AdamW, lr=0.001),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_with_unequal_clients_and_several_epochs(tmp_path: Path, name: str) -> None:
    pair(tmp_path, partial(Plainest, OPTIMIZERS[name]), local_epochs=2, evaluation=ClientEvaluation(keep_trained=True))


FEDERATIONS: dict[str, dict[str, Any]] = {
    "two of five clients": {"sampler": partial(UniformSampler, 2)},
    "ShapFed": {
        "aggregator": partial(ShapFedWA, "cssv"),
        "metrics": partial(lambda: {"cssv": ClassSpecificShapley(), "ssv": SurrogateFederatedShapley()}),
        "personalizer": partial(ShapFedPersonalizer),
        "sampler": partial(UniformSampler, 3),
        "evaluation": ClientEvaluation(every=2),
    },
    "privacy": {
        "uploads": partial(lambda: [GaussianPrivacy(1.0, 0.1)]),
        "metrics": partial(lambda: {"c": CosineGradientShapley()}),
    },
    "top-k": {"uploads": partial(lambda: [TopK(0.3)])},
    "head kept": {"share": ["!net.4.*"], "evaluation": ClientEvaluation(every=1)},
}


@pytest.mark.filterwarnings("ignore:.*(tensors stay at their clients|noise).*")
@pytest.mark.parametrize("name", FEDERATIONS)
def test_federations(tmp_path: Path, name: str) -> None:
    pair(tmp_path, **FEDERATIONS[name])


@pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
@pytest.mark.parametrize("share", ["all", ["!net.1.*"]])
def test_batch_norm(tmp_path: Path, share: Any) -> None:
    """In double precision: kept apart, the norms of small batches blow rounding up, to 3e-5 in single precision."""
    pair(tmp_path, Plain, partial(toy_data, (4, 2, 1)), share=share, trainer={"precision": "64-true"}, tolerance=1e-10)


def test_a_schedule_of_rounds_and_clipped_norms(tmp_path: Path) -> None:
    decay = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.3)
    pair(tmp_path, partial(Plainest, scheduler=decay), trainer={"gradient_clip_val": 0.2})


def test_mixed_precision(tmp_path: Path) -> None:
    pair(tmp_path, trainer={"precision": "bf16-mixed"}, tolerance=5e-3)


class Augmented(Plainest):
    """Draws when batches are transferred."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x + torch.randn_like(x) if self.trainer.training else x), y


def test_what_transfers_draw_is_the_same(tmp_path: Path) -> None:
    pair(tmp_path, Augmented, local_epochs=2)


class Samples(torch.utils.data.Dataset):
    """Data that are no tensors."""

    def __init__(self) -> None:
        self.x, self.targets = toy_sets()[0].tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.targets[index]


def test_data_of_any_kind(tmp_path: Path) -> None:
    pair(tmp_path, data=lambda: FederatedDataModule(Samples(), SizePartitioner([3, 1, 2]), batch_size=8))


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_more_clients_than_train_at_once(tmp_path: Path, chunk: int) -> None:
    pair(tmp_path, engine=partial(VmapProcess, chunk=chunk), rounds=2)


class Overflows(Plainest):
    """Of a sample with large numbers, the gradient is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step(batch, batch_idx) + (x[:, 0] / 1e20).exp().mean() * self.net[0].bias.sum()


def _with_a_broken_client() -> FederatedDataModule:
    data = toy_data(SIZES)
    data.setup("fit")
    data._data.train.tensors[0][data.client_indices(2)[5], 0] = 1e30
    return data


@pytest.mark.parametrize("chunk", [2, None])
def test_a_client_whose_model_is_not_finite(tmp_path: Path, chunk: int | None) -> None:
    with pytest.warns(UserWarning, match="client"):
        one, many = pair(tmp_path, Overflows, _with_a_broken_client, rounds=2, engine=partial(VmapProcess, chunk=chunk))
    assert many.participations.tolist() == [2, 2, 0, 2, 2]


def test_training_step_may_log_and_give_a_dictionary(tmp_path: Path) -> None:
    class Logs(Plainest):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("train_loss", loss, on_epoch=True)
            self.log_dict({"twice": 2 * loss})
            return {"loss": loss, "of": self.current_epoch}

    made = loop("vmap")
    trainer = trainer_for(made, tmp_path, 1)
    trainer.fit(module := Logs(), toy_data(SIZES))
    assert "train_loss_epoch" not in trainer.callback_metrics
    assert not {"log", "log_dict"} & vars(module).keys()
    expected = fit(loop("sequential"), tmp_path, Logs(), toy_data(SIZES), 1)
    torch.testing.assert_close(vector(module), vector(expected), rtol=1e-5, atol=1e-5)


def test_a_parameter_without_a_gradient_does_not_decay(tmp_path: Path) -> None:
    class Spare(Plainest):
        def __init__(self) -> None:
            super().__init__(OPTIMIZERS["momentum"])
            self.spare = nn.Parameter(torch.ones(2))

    pair(tmp_path, Spare)


def make_resumable() -> FederatedLoop:
    return loop(
        partial(VmapProcess, chunk=2),
        aggregator=ShapFedWA("cssv"),
        metrics={"cssv": ClassSpecificShapley(momentum=0.7)},
        personalizer=ShapFedPersonalizer(),
        sampler=UniformSampler(3),
        share=["!net.1.*"],
        evaluation=ClientEvaluation(every=2),
        local_epochs=2,
    )


def bits(folder: Path) -> Any:
    saved = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    return {name: saved[name] for name in ("state_dict", "global_step", "optimizer_states", "epoch")}, {
        key: value
        for name, each in saved["callbacks"].items()
        if "FederatedLoop" in name
        for key, value in each.items()
    }


class Stops(Callback):
    """Within a round, after its clients have trained."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == 2:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:.*(tensors stay at their clients|is discarded|KeyboardInterrupt).*")
def test_resumes_to_the_bit(tmp_path: Path) -> None:
    def run(folder: Path, *more: Callback, rounds: int = 4, **kwargs: Any) -> FederatedLoop:
        made = make_resumable()
        saving = {"enable_checkpointing": True, "callbacks": [*more, checkpoints(folder)]}
        fit(made, folder, Plain(), toy_data((4, 2, 1, 3)), rounds, **saving, **kwargs)
        return made

    run(tmp_path / "whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(tmp_path / "killed", Stops())
    run(tmp_path / "rest", ckpt_path=tmp_path / "killed/checkpoints/last.ckpt")
    whole, rest = bits(tmp_path / "whole"), bits(tmp_path / "rest")
    _assert_bits(whole, rest)


def _assert_bits(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a.nan_to_num(9), b.nan_to_num(9)), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            _assert_bits(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            _assert_bits(x, y, f"{where}[{i}]")
    elif "csv" not in where:  # its offset depends on the folder
        assert a == b or (a != a and b != b), where


def test_the_trial_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flsv.engines import vmap

    attempt = vmap.try_batched

    def watched(trainer: L.Trainer, *rest: Any) -> set[str]:
        before, drawn = vector(trainer.lightning_module), torch.get_rng_state()
        unused = attempt(trainer, *rest)
        assert torch.equal(vector(trainer.lightning_module), before)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert not trainer.optimizers[0].state
        assert all(parameter.grad is None for parameter in trainer.lightning_module.parameters())
        return unused

    monkeypatch.setattr(vmap, "try_batched", watched)
    with_trial = fit(loop("vmap"), tmp_path / "1", Plainest(), toy_data(SIZES), 2)
    monkeypatch.setattr("flsv.engines.vmap.try_batched", lambda *_: set())
    without = fit(loop("vmap"), tmp_path / "2", Plainest(), toy_data(SIZES), 2)
    assert torch.equal(vector(with_trial), vector(without))
