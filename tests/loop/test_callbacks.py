"""Lightning's own callbacks beside the loop: what they see, save and monitor is the federation's, in any order."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from logging_module import Logs, logged
from torch import Tensor, nn
from toys import CLASSES, FEATURES, Plain, fit, sgd, toy_data, trainer_for, vector

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import CumulativeShapley
from flsv.seeding import generator_for

SEED = 5


def in_order(first: bool, callback: Callback, loop: FederatedLoop) -> list[Callback]:
    return [callback, loop] if first else [loop, callback]


def test_the_round_is_the_x_axis_and_no_value_is_named_step(tmp_path: Path) -> None:
    module = Logs()
    fit(FederatedLoop(seed=1), tmp_path, module, logger=CSVLogger(tmp_path))
    rows = logged(tmp_path)
    assert [int(row["step"]) for row in rows if row["train_loss_epoch"]] == [0, 1, 2]
    assert [int(row["step"]) for row in rows if row["val_acc"]] == [0, 1, 2]
    assert [int(row["step"]) for row in rows if row["train_loss_step"]] == list(range(39))
    assert "step" not in module.trainer.callback_metrics
    assert "log_metrics" not in vars(module.trainer._logger_connector)


@pytest.mark.parametrize("validation", [True, False])
def test_checkpoints_are_named_by_the_global_step(tmp_path: Path, validation: bool) -> None:
    saving = [
        ModelCheckpoint(tmp_path / "rounds", save_top_k=-1),
        ModelCheckpoint(tmp_path / "steps", "{epoch}-{step}", every_n_train_steps=5, save_top_k=-1),
    ]
    module = fit(
        FederatedLoop(seed=1),
        tmp_path,
        enable_checkpointing=True,
        callbacks=saving,
        limit_val_batches=1.0 if validation else 0,
    )
    assert {path.stem for path in (tmp_path / "rounds").iterdir()} == {
        f"epoch={r}-step={13 * r + 13}" for r in range(3)
    }
    steps = {path.stem for path in (tmp_path / "steps").iterdir()}
    assert steps == {f"epoch={(n - 1) // 13}-step={n}" for n in range(5, 39, 5)}
    # What is saved within a round is the global model of its start.
    half = torch.load(tmp_path / "steps" / "epoch=1-step=20.ckpt", weights_only=False)
    start = torch.load(tmp_path / "rounds" / "epoch=0-step=13.ckpt", weights_only=False)
    assert all(torch.equal(half["state_dict"][name], value) for name, value in start["state_dict"].items())
    resumed = fit(FederatedLoop(seed=1), tmp_path, ckpt_path=tmp_path / "steps" / "epoch=1-step=20.ckpt")
    assert torch.equal(vector(resumed), vector(module))


# ---- stopping


@pytest.mark.parametrize("first", [True, False])
def test_where_training_stops_within_a_round_nobody_validates_a_client(tmp_path: Path, first: bool) -> None:
    class TimeIsUp(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            trainer.should_stop = trainer.global_step == 18

    seen: list[Tensor] = []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            seen.append(vector(module))

    best = ModelCheckpoint(tmp_path / "c", "{epoch}-{step}", monitor="val_acc", mode="max", save_top_k=-1)
    loop = FederatedLoop(seed=1)
    trainer = trainer_for(
        None, tmp_path, callbacks=[*in_order(first, TimeIsUp(), loop), Watch(), best], enable_checkpointing=True
    )
    module = Plain()
    with pytest.warns(UserWarning, match="round 2 is discarded") as caught:
        trainer.fit(module, toy_data())
    assert len([w for w in caught if "discarded" in str(w.message)]) == 1
    assert loop.round_index == 1
    assert all(torch.equal(model, vector(module)) for model in seen)
    for path in (tmp_path / "c").iterdir():
        saved = Plain()
        saved.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        assert torch.equal(vector(saved), vector(module))


def test_on_exception_checkpoint(tmp_path: Path) -> None:
    class Keeps(OnExceptionCheckpoint):
        def teardown(self, *_: Any, **__: Any) -> None:
            pass

    def fails(trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 20:
            raise ArithmeticError

    callbacks = [LambdaCallback(on_train_batch_end=fails), Keeps(tmp_path, "failed")]
    with pytest.warns(UserWarning, match="round 2 is discarded"), pytest.raises(ArithmeticError):
        fit(FederatedLoop(seed=1), tmp_path, callbacks=callbacks, enable_checkpointing=True)
    resumed = fit(FederatedLoop(seed=1), tmp_path, ckpt_path=tmp_path / "failed.ckpt")
    assert torch.equal(vector(resumed), vector(fit(FederatedLoop(seed=1), tmp_path)))


# ---- callbacks that change how a model is trained


@pytest.mark.parametrize("first", [True, False])
def test_an_accumulation_schedule(tmp_path: Path, first: bool) -> None:
    """Windows of 1, 3 and 2 batches in the rounds, each beginning with its client; against a loop by hand."""
    data = toy_data()
    data.setup("fit")
    server = copy.deepcopy(Plain().net).double()
    for r, window in enumerate((1, 3, 2)):
        states = []
        for client in range(3):
            model = copy.deepcopy(server).train()
            optimizer = sgd(model.parameters())
            batches = list(data.client_loader(client, generator=generator_for(SEED, "shuffle", r, client, 0)))
            for i, (x, y) in enumerate(batches):
                (nn.functional.cross_entropy(model(x.double()), y) / window).backward()
                if (i + 1) % window == 0 or i + 1 == len(batches):
                    optimizer.step()
                    optimizer.zero_grad()
            states.append(model.state_dict())
        sizes = data.num_samples.double()
        for name, value in server.state_dict().items():
            if value.is_floating_point():
                value.copy_(sum(w * s[name] for w, s in zip(sizes, states)) / sizes.sum())
    loop, module = FederatedLoop(seed=SEED), Plain().double()
    schedule = GradientAccumulationScheduler({1: 3, 2: 2})
    trainer_for(None, tmp_path, callbacks=in_order(first, schedule, loop), precision="64-true").fit(module, toy_data())
    for name, value in module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, server.state_dict()[name], rtol=1e-10, atol=1e-10)


class Backbone(Plain):
    def __init__(self) -> None:
        torch.manual_seed(2)
        backbone, head = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        super().__init__(nn.Sequential(backbone, nn.Tanh(), head))
        self.backbone, self.head = backbone, head

    def configure_optimizers(self) -> Any:
        return sgd([p for p in self.parameters() if p.requires_grad])


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_finetuning_thaws_by_rounds(tmp_path: Path, first: bool) -> None:
    """Against a loop by hand; a run that is resumed before or after the thaw ends alike."""

    def run(rounds: int = 4, **kwargs: Any) -> Backbone:
        thaw = BackboneFinetuning(2, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.5)
        module = Backbone()
        saving: list[Callback] = []
        if not kwargs:
            saving = [ModelCheckpoint(tmp_path / "c", "{step}", every_n_train_steps=10, save_top_k=-1)]
        callbacks = [*in_order(first, thaw, FederatedLoop(seed=SEED)), *saving]
        trainer = trainer_for(None, tmp_path, rounds, callbacks=callbacks, enable_checkpointing=bool(saving))
        trainer.fit(module, toy_data(), **kwargs)
        return module

    data = toy_data()
    data.setup("fit")
    server, rate = Backbone(), 0.05
    for r in range(4):
        states = []
        if r > 2:
            rate = min(0.1, rate * 1.5)
        for client in range(3):
            model = copy.deepcopy(server)
            groups = [{"params": model.head.parameters(), "lr": 0.1}]
            if r >= 2:
                groups.append({"params": model.backbone.parameters(), "lr": rate})
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
            # Lightning adds the backbone with the optimizer's own defaults.
            for x, y in data.client_loader(client, generator=generator_for(SEED, "shuffle", r, client, 0)):
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            states.append(model.state_dict())
        sizes = data.num_samples.double()
        for name, value in server.state_dict().items():
            value.copy_(sum(w * s[name].double() for w, s in zip(sizes, states)) / sizes.sum())
    module = run()
    torch.testing.assert_close(vector(module), vector(server), rtol=1e-4, atol=1e-5)
    for path in sorted((tmp_path / "c").iterdir()):
        assert torch.equal(vector(run(ckpt_path=path)), vector(module)), path


# ---- callbacks that only look

OBSERVERS: dict[str, Callable[[], Callback]] = {
    "LearningRateMonitor": lambda: LearningRateMonitor("step"),
    "ThroughputMonitor": lambda: ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
    "ModelSummary": ModelSummary,
    "RichProgressBar": RichProgressBar,
    "TQDMProgressBar": TQDMProgressBar,
    "LambdaCallback": lambda: LambdaCallback(on_train_batch_end=lambda *args: None),
}


if importlib.util.find_spec("psutil"):
    OBSERVERS["DeviceStatsMonitor"] = DeviceStatsMonitor


def scheduled() -> Plain:
    return Plain(scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return vector(fit(FederatedLoop(seed=1), tmp_path_factory.mktemp("alone"), scheduled()))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", OBSERVERS)
def test_callbacks_that_only_look_change_nothing(
    tmp_path: Path, alone: Tensor, name: str, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    module, loop = scheduled(), FederatedLoop(seed=1)
    callbacks = in_order(first, OBSERVERS[name](), loop)
    shown = {"enable_progress_bar": "ProgressBar" in name, "enable_model_summary": name == "ModelSummary"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*flops_per_batch")
        trainer = trainer_for(None, tmp_path, callbacks=callbacks, logger=CSVLogger(tmp_path), **shown)
        trainer.fit(module, toy_data())
    assert torch.equal(vector(module), alone)
    if name == "LearningRateMonitor":
        rates = [float(row["lr-SGD"]) for row in logged(tmp_path) if row["lr-SGD"]]
        assert rates == pytest.approx([0.1 * 0.9 ** (i // 13) for i in range(39)])


class AddsHead(Callback):
    """As Lightning's fine-tuners for self-supervised networks."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.head = nn.Linear(CLASSES, CLASSES)


@pytest.mark.parametrize("performance", ["accuracy", "val_acc"])
def test_a_callback_that_adds_a_module_goes_before_the_loop(tmp_path: Path, performance: str) -> None:
    mode = "max" if performance == "val_acc" else None

    def train(first: bool) -> None:
        loop = FederatedLoop(metrics={"game": CumulativeShapley(performance=performance, mode=mode)}, seed=1)
        callbacks = in_order(first, AddsHead(), loop)
        trainer_for(None, tmp_path / str(first), 1, callbacks=callbacks).fit(Logs(), toy_data())

    train(first=True)
    with pytest.raises(ConfigurationError, match=r"\['head.bias', 'head.weight'\] have come.* before FederatedLoop"):
        train(first=False)


class Batchwise(Callback):
    """Does something to the client's model, optimizer or batch at the start or the end of a batch."""

    def __init__(self, start: Any = None, end: Any = None) -> None:
        self.start, self.end = start, end

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.start is not None:
            self.start(trainer, module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.end is not None:
            with torch.no_grad():
                self.end(trainer, module, batch, batch_idx)


def set_option(trainer: Any, name: str, value: float) -> None:
    trainer.optimizers[0].param_groups[0][name] = value


def scale(module: Any, factor: float) -> None:
    for parameter in module.parameters():
        parameter.mul_(factor)


BATCHWISE: dict[str, Callable[[], Batchwise]] = {
    "rate at the first batch": lambda: Batchwise(lambda t, m, b, i: set_option(t, "lr", 0.3) if i == 0 else None),
    "rate by batch": lambda: Batchwise(lambda t, m, b, i: set_option(t, "lr", 0.2 / (1 + i))),
    "rate at the last batch": lambda: Batchwise(
        lambda t, m, b, i: set_option(t, "lr", 0.5) if t.is_last_batch else None
    ),
    "momentum from the second": lambda: Batchwise(lambda t, m, b, i: set_option(t, "momentum", 0.9) if i else None),
    "inputs by batch": lambda: Batchwise(lambda t, m, b, i: b[0].mul_(1 + i)),
    "weight clipping": lambda: Batchwise(end=lambda t, m, b, i: [p.clamp_(-0.1, 0.1) for p in m.parameters()]),
    "decay at every second": lambda: Batchwise(end=lambda t, m, b, i: scale(m, 0.9) if i % 2 else None),
    "decay at the last": lambda: Batchwise(end=lambda t, m, b, i: scale(m, 0.5) if t.is_last_batch else None),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", BATCHWISE)
def test_callbacks_of_batches_act_on_the_client_that_trains_as_by_hand(tmp_path: Path, name: str, first: bool) -> None:
    callback, data = BATCHWISE[name](), toy_data()
    data.setup("fit")
    server, rates = Plain(), dict[int, float]()
    start = copy.deepcopy(server)
    for r in range(2):
        states = []
        for client in range(data.num_clients):
            model = copy.deepcopy(server).train()
            optimizer = model.configure_optimizers()
            optimizer.param_groups[0]["lr"] = rates.get(client, optimizer.param_groups[0]["lr"])
            batches = list(data.client_loader(client, "train", generator=generator_for(SEED, "shuffle", r, client, 0)))
            for i, batch in enumerate(batches):
                trainer = SimpleNamespace(optimizers=[optimizer], is_last_batch=i + 1 == len(batches))
                callback.on_train_batch_start(trainer, model, batch, i)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
                optimizer.step()
                callback.on_train_batch_end(trainer, model, None, batch, i)
            rates[client] = optimizer.param_groups[0]["lr"]  # a rate that changes while a client trains goes on with it
            states.append(model.state_dict())
        sizes = data.num_samples.double() / data.num_samples.sum()
        for key, value in server.state_dict().items():
            if value.is_floating_point():
                value.copy_(sum(weight * state[key] for weight, state in zip(sizes, states)))
    loop = FederatedLoop(seed=SEED)
    trainer_for(None, tmp_path, 2, callbacks=in_order(first, callback, loop)).fit(start, toy_data())
    for key, value in start.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, server.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert not {"on_train_batch_start", "on_train_batch_end"} & vars(callback).keys()  # given back


def test_what_a_callback_counts_for_itself_is_the_runs(tmp_path: Path) -> None:
    places: list[int] = []
    count = Batchwise(end=lambda trainer, module, batch, batch_idx: places.append(batch_idx))
    data = toy_data()
    fit(FederatedLoop(seed=1), tmp_path, data=data, callbacks=[count], rounds=1)
    lengths = [len(data.client_loader(client, generator=torch.Generator())) for client in range(data.num_clients)]
    assert places == [i for length in lengths for i in range(length)]


class AddsLate(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.late = nn.Linear(1, 1)


@pytest.mark.parametrize("first", [True, False])
def test_a_callback_that_adds_a_module_in_a_round_is_refused_by_its_name(tmp_path: Path, first: bool) -> None:
    loop = FederatedLoop(seed=SEED)
    with pytest.raises(ConfigurationError, match=r"\['late.bias', 'late.weight'\] have come"):
        trainer_for(None, tmp_path, callbacks=in_order(first, AddsLate(), loop)).fit(Plain(), toy_data())
