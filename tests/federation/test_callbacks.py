"""Lightning's own callbacks beside the loop: what they see, save and monitor is the federation's, in any order."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    LambdaCallback,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CumulativeShapley
from flsv.server.checks import check_callbacks
from flsv.utilities.errors import ConfigurationError
from helpers.data import CLASSES, toy_data
from helpers.fits import fit, read_logged_metrics, state_vector, trainer_for
from helpers.loops_by_hand import (
    ROUNDS,
    cohort_of_round,
    make_loop_of_three_clients,
    make_unequal_data,
    train_sharing_by_hand,
)
from helpers.models import Logs, Plain, network, sgd


def order_callbacks(
    is_before_loop: bool,
    callback: Callback,
    loop: FederatedLoop,
) -> list[Callback]:
    return [callback, loop] if is_before_loop else [loop, callback]


class LogsValidationSteps(Logs):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("val_loss_step", loss, on_step=True, on_epoch=False)


def test_loggers_have_the_round_as_x_axis(tmp_path):
    module = LogsValidationSteps()
    data = toy_data(server_val=0.3, eval_batch_size=8)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
    fit(loop, tmp_path, module, data, logger=CSVLogger(tmp_path))

    rows = read_logged_metrics(tmp_path)
    rounds_by_name = {}
    for name in (
        "train_loss_epoch",
        "train_loss_step",
        "val_acc",
        "val_loss_step",
        "cssv/client_1",
    ):
        rounds_by_name[name] = [int(row["step"]) for row in rows if row[name]]

    for name in ("train_loss_epoch", "val_acc", "cssv/client_1"):
        assert rounds_by_name[name] == [0, 1, 2]
    for name in ("train_loss_step", "val_loss_step"):
        rounds = rounds_by_name[name]
        num_batches = len(rounds) // 3
        assert num_batches > 1
        assert rounds == [0] * num_batches + [1] * num_batches + [2] * num_batches
    assert [row["epoch"] for row in rows] == [row["step"] for row in rows]
    assert "epoch" not in module.trainer.logged_metrics
    assert "step" not in module.trainer.callback_metrics
    assert "log_metrics" not in vars(module.trainer._logger_connector)


@pytest.mark.parametrize("is_before_loop", [True, False])
def test_training_that_stops_within_a_round_validates_no_client_model(tmp_path, is_before_loop):
    def time_is_up(trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 18

    models: list[Tensor] = []

    def record_model(trainer: L.Trainer, module: L.LightningModule) -> None:
        models.append(state_vector(module))

    folder = tmp_path / "c"
    best = ModelCheckpoint(
        folder,
        "{epoch}-{step}",
        monitor="val_acc",
        mode="max",
        save_top_k=-1,
    )
    loop = FederatedLoop(seed=1)
    module = Plain()
    callbacks = [
        *order_callbacks(is_before_loop, LambdaCallback(on_train_batch_end=time_is_up), loop),
        LambdaCallback(on_validation_start=record_model),
        best,
    ]
    trainer = trainer_for(None, tmp_path, callbacks=callbacks, enable_checkpointing=True)

    with pytest.warns(UserWarning, match="round 2 is discarded") as caught:
        trainer.fit(module, toy_data())

    assert sum("discarded" in str(warning.message) for warning in caught) == 1
    assert loop.round_index == 1

    global_model = state_vector(module)
    for model in models:
        assert torch.equal(model, global_model)

    for path in folder.iterdir():
        saved = Plain()
        saved.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        assert torch.equal(state_vector(saved), global_model)


# ---- callbacks that change how a model is trained


def test_callbacks_that_change_optimizers_are_moved_right_after_the_loop():
    loop = FederatedLoop()
    one_callback = Callback()
    another_callback = Callback()
    thaws = BackboneFinetuning()
    freezes = BaseFinetuning()
    callbacks = [thaws, one_callback, freezes, loop, another_callback]
    trainer: Any = SimpleNamespace(callbacks=callbacks)

    check_callbacks(trainer, loop)

    assert trainer.callbacks == [one_callback, loop, thaws, freezes, another_callback]


class Batchwise(Callback):
    def __init__(self, on_start: Any = None, on_end: Any = None) -> None:
        self.on_start = on_start
        self.on_end = on_end

    def on_train_batch_start(
        self,
        trainer: Any,
        module: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self.on_start is not None:
            self.on_start(trainer, module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.on_end is not None:
            with torch.no_grad():
                self.on_end(trainer, module, batch, batch_idx)


def set_option(trainer: Any, name: str, value: float) -> None:
    trainer.optimizers[0].param_groups[0][name] = value


def scale_parameters(module: Any, factor: float) -> None:
    for parameter in module.parameters():
        parameter.mul_(factor)


BATCHWISE: dict[str, Callable[[], Batchwise]] = {
    "rate at the first batch": lambda: Batchwise(
        lambda t, m, b, i: set_option(t, "lr", 0.3) if i == 0 else None
    ),
    "rate at the last batch": lambda: Batchwise(
        lambda t, m, b, i: set_option(t, "lr", 0.5) if t.is_last_batch else None
    ),
    "momentum from the second": lambda: Batchwise(
        lambda t, m, b, i: set_option(t, "momentum", 0.9) if i else None
    ),
    "inputs by batch": lambda: Batchwise(lambda t, m, b, i: b[0].mul_(1 + i / 10)),
    "decay at every second": lambda: Batchwise(
        on_end=lambda t, m, b, i: scale_parameters(m, 0.9) if i % 2 else None
    ),
    "decay at the last": lambda: Batchwise(
        on_end=lambda t, m, b, i: scale_parameters(m, 0.5) if t.is_last_batch else None
    ),
}


def train_with_callback_by_hand(callback: Callback, initial_net: nn.Module) -> nn.Module:
    """Its hooks are called around each batch of a client."""
    rates_of_clients: dict[int, float] = {}
    clients_of_visits = iter([client for r in range(ROUNDS) for client in cohort_of_round(r)])

    def train_client(net: nn.Module, epochs: list[list[Any]]) -> None:
        client = next(clients_of_visits)
        optimizer = sgd(net.parameters())
        optimizer.param_groups[0]["lr"] = rates_of_clients.get(client, 0.1)
        batches = [(i, batch) for epoch in epochs for i, batch in enumerate(epoch)]

        for number, (i, batch) in enumerate(batches, start=1):
            is_last = number == len(batches)
            trainer: Any = SimpleNamespace(optimizers=[optimizer], is_last_batch=is_last)
            module: Any = net
            callback.on_train_batch_start(trainer, module, batch, i)
            optimizer.zero_grad()
            x, y = batch
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            callback.on_train_batch_end(trainer, module, None, batch, i)

        # A rate that changes while a client trains goes on with it.
        rates_of_clients[client] = optimizer.param_groups[0]["lr"]

    trained, _ = train_sharing_by_hand(initial_net, private=(), train=train_client)
    return trained


@pytest.mark.parametrize(
    ("name", "is_before_loop"),
    [(name, number % 2 == 0) for number, name in enumerate(BATCHWISE)],
)
def test_batch_callbacks_act_on_the_training_client_as_in_the_loop_by_hand(
    tmp_path, name, is_before_loop
):
    callback = BATCHWISE[name]()
    net = network()
    expected = train_with_callback_by_hand(callback, net)
    module = Plain(copy.deepcopy(net))
    callbacks = order_callbacks(is_before_loop, callback, make_loop_of_three_clients())
    trainer_for(
        None,
        tmp_path,
        ROUNDS,
        callbacks=callbacks,
    ).fit(module, make_unequal_data())

    expected_state = expected.state_dict()
    for key, value in module.net.state_dict().items():
        # Large rates amplify rounding; a hook at the wrong batch moves weights by 0.01 and more.
        torch.testing.assert_close(value, expected_state[key], rtol=1e-3, atol=1e-4)
    # Its hooks are given back.
    assert not {"on_train_batch_start", "on_train_batch_end"} & vars(callback).keys()


class Adds(Callback):
    """A module, as Lightning's fine-tuners for self-supervised networks."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.add)

    def add(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.head = nn.Linear(CLASSES, CLASSES)


@pytest.mark.parametrize("performance", ["accuracy", "val_acc"])
def test_callback_that_adds_a_module_must_come_before_the_loop(tmp_path, performance):
    mode = "max" if performance == "val_acc" else None

    def fit_with_added_module(is_before_loop: bool, hook: str = "on_fit_start") -> None:
        metric = CumulativeShapley(performance=performance, mode=mode)
        loop = FederatedLoop(metrics={"game": metric}, seed=1)
        callbacks = order_callbacks(is_before_loop, Adds(hook), loop)
        trainer = trainer_for(
            None,
            tmp_path / hook,
            rounds=1,
            callbacks=callbacks,
        )
        trainer.fit(Logs(), toy_data())

    fit_with_added_module(is_before_loop=True)
    with pytest.raises(
        ConfigurationError, match=r"\['head.bias', 'head.weight'\] have come.* before FederatedLoop"
    ):
        fit_with_added_module(is_before_loop=False)

    with pytest.raises(ConfigurationError, match=r"\['head.bias', 'head.weight'\] have come"):
        fit_with_added_module(is_before_loop=True, hook="on_train_epoch_start")
