"""Whatever happens at a private site after it has read its data, it sends one kind of message of one size."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg
from flsv.core import Instruction
from flsv.data import OneClient
from flsv.engines.engine import shared_space
from flsv.engines.remote import Packet, Site
from flsv.engines.remote.messages import instruction_packet
from flsv.privacy import GaussianPrivacy
from flsv.uploads import TopK
from helpers.sites import make_shapfed_loop

RUN = "0" * 16
CLASSES = 10
#: Methods of a LightningModule that a fit calls, beside its hooks.
METHODS = [
    "training_step",
    "forward",
    "backward",
    "configure_optimizers",
    "configure_callbacks",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "log",
    "state_dict",
]
HOOKS = {*vars(ModelHooks), *vars(DataHooks), *vars(CheckpointHooks)}
OUTCOMES = [*METHODS, *sorted(name for name in HOOKS if not name.startswith("_"))]


class Client(ClassifierClient):
    """A client whose hook may fail, but only while a site answers."""

    is_answering = False


def make_failing(hook: str, error: type[BaseException]) -> Callable[[], ClassifierClient]:
    class FailingClient(Client):
        pass

    def fail_while_answering(self: Any, *args: Any, **kwargs: Any) -> Any:
        if Client.is_answering:
            raise error("what a sample says")
        inherited_hook = getattr(super(FailingClient, self), hook)
        return inherited_hook(*args, **kwargs)

    setattr(FailingClient, hook, fail_while_answering)
    return partial(make_classifier, FailingClient)


def make_classifier(kind: type[ClassifierClient] = Client) -> ClassifierClient:
    torch.manual_seed(7)
    return kind(
        "mlp",
        network_args={"hidden": [4]},
        num_classes=CLASSES,
        input_shape=(1, 8, 8),
    )


def make_labeled_data(largest_label: int = CLASSES - 1) -> FederatedDataModule:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 1, 8, 8, generator=draw)
    y = torch.arange(24) % (largest_label + 1)

    class OwnData(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)

    return FederatedDataModule(OwnData(), OneClient())


def make_private_loop(**settings: Any) -> FederatedLoop:
    uploads = [GaussianPrivacy(1.0, 50.0)]
    if settings.pop("is_compressed", False):
        uploads.append(TopK(0.1))
    return make_shapfed_loop(uploads=uploads, aggregator=FedAvg(), metrics={}, **settings)


def make_training_message(**fields: Any) -> Packet:
    client = make_classifier()
    space = shared_space(client, make_private_loop().config)
    instruction = Instruction(
        round_index=0,
        client_id=0,
        seed=7,
        start=space.read(client),
        tensors={},
    )
    info: dict[str, Any] = {
        "run": RUN,
        "rounds": 3,
        "classes": CLASSES,
        "clients": 3,
        "counted": None,
    }

    return instruction_packet(instruction, {**info, **fields})


@pytest.fixture(autouse=True)
def _fixed_noise(monkeypatch):
    """The noised vector is held fixed, so that every difference is one that noise does not hide."""

    def constant(self: GaussianPrivacy, update: Tensor, context: Any) -> Tensor:
        return torch.full_like(update, 0.01)

    monkeypatch.setattr(GaussianPrivacy, "apply", constant)


def answer_of_site(
    folder: Path,
    make_module: Callable[[], L.LightningModule] = make_classifier,
    make_data: Callable[[], FederatedDataModule] = make_labeled_data,
    packet: Packet | None = None,
    **settings: Any,
) -> Packet:
    site = Site(make_module, make_data, partial(make_private_loop, **settings), folder)
    Client.is_answering = True
    try:
        return site.answer(packet or make_training_message())
    finally:
        Client.is_answering = False


def assert_same_message(reply: Packet, expected: Packet) -> None:
    assert reply.kind == expected.kind == "update"
    assert repr(reply.plain) == repr(expected.plain)
    assert reply.tensors.keys() == expected.tensors.keys()
    for name, tensor in reply.tensors.items():
        assert tensor.dtype == expected.tensors[name].dtype
        assert torch.equal(tensor, expected.tensors[name])


@pytest.mark.filterwarnings("ignore")
def test_error_in_any_hook_leaves_the_message_of_a_private_site_unchanged(tmp_path):
    """Over all hooks that Lightning has, also those of versions to come, and each kind of error in turn."""
    assert {"on_train_epoch_end", "on_fit_end", "teardown", "setup"} <= set(OUTCOMES)
    expected = answer_of_site(tmp_path / "expected")
    errors = cycle([ValueError, KeyboardInterrupt, StopIteration])
    for hook, error in zip(OUTCOMES, errors, strict=False):
        reply = answer_of_site(tmp_path / hook, make_failing(hook, error))
        assert_same_message(reply, expected)


class Skips(Client):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


class Stops(Client):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class Grows(Client):
    def on_train_end(self) -> None:
        self.network.extra = nn.Linear(3, 3)


class Replaces(Client):
    def on_train_batch_end(self, *_: Any) -> None:
        self.network = nn.Linear(64, 3)


class Widens(Client):
    def on_train_batch_end(self, *_: Any) -> None:
        self.double()


class LosesItsUpdate(Client):
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.fill_(float("nan"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Skips, Stops, Grows, Replaces, Widens, LosesItsUpdate])
def test_training_without_an_update_leaves_the_message_of_a_private_site_unchanged(tmp_path, kind):
    settings = {"local_epochs": 2, "is_compressed": True, "optimizer_state": "persist"}
    expected = answer_of_site(tmp_path / "expected", **settings)
    reply = answer_of_site(tmp_path / "odd", partial(make_classifier, kind), **settings)
    assert_same_message(reply, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("classes", [1, 3, 9, None])
def test_number_of_classes_in_a_message_does_not_find_a_private_sites_labels(tmp_path, classes):
    packet = make_training_message(classes=classes)
    few_classes = partial(make_labeled_data, largest_label=2)
    reply = answer_of_site(tmp_path / "few", make_data=few_classes, packet=packet)
    expected = answer_of_site(tmp_path / "all", packet=packet)
    assert_same_message(reply, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "fields",
    [
        {"classes": 0},
        {"classes": "x"},
        {"rounds": 2.5},
        {"clients": None},
    ],
    ids=str,
)
def test_impossible_request_is_refused_before_any_privacy_is_spent(tmp_path, fields):
    reply = answer_of_site(tmp_path, packet=make_training_message(**fields))
    assert reply.kind == "failed"
    assert "it cannot train as it is asked" in reply.plain["error"]
    assert not (tmp_path / "privacy.json").exists()
