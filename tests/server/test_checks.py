"""Bad input is refused before training starts, with what was wrong, what was expected and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from data_options import grouped
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from toys import Plain, fit, network, toy_data, toy_sets, trainer_for

from flsv import ClientEvaluation, ConfigurationError, Reporting
from flsv.aggregation import CGSV, FedAvg, ShapFedWA, ShapleyWeighted
from flsv.attacks import HeadAlignment, SignFlip
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.loop import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CosineGradientShapley,
    DomainRelevance,
    PartialFederatedShapley,
)
from flsv.personalization import FedFomo, PFedSV, ShapFedPersonalizer, SparsifiedReward
from flsv.privacy import GaussianPrivacy
from flsv.sampling import ShapleyImportanceSampler, SoftmaxSampler, UniformSampler
from flsv.uploads import TopK


class NeverTrained(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training had started")


def refused(loop: FederatedLoop, folder: Path, match: str, net: Any = None, **kwargs: Any) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(loop, folder, NeverTrained(net), **kwargs)


def cssv(head: str | None = None) -> dict[str, Any]:
    return {"cssv": ClassSpecificShapley(head=head)}


def test_a_metric_nobody_defines(tmp_path: Path) -> None:
    refused(
        FederatedLoop(ShapFedWA("cssv"), {"shapley": ClassSpecificShapley()}),
        tmp_path,
        r"aggregator ShapFedWA\(\) reads the metric 'cssv', which is not defined. Defined: \['shapley'\]",
    )


def test_class_count_that_does_not_match_the_head(tmp_path: Path) -> None:
    wide = nn.Sequential(nn.Linear(6, 7))
    refused(FederatedLoop(metrics=cssv()), tmp_path, "the head 'net.0' has 7 rows and the data have 3 classes", wide)
    refused(FederatedLoop(metrics=cssv("net.0")), tmp_path, "has 7 rows", wide)


def test_unknown_head_and_no_linear_head(tmp_path: Path) -> None:
    refused(
        FederatedLoop(metrics=cssv("fc")),
        tmp_path,
        r"head='fc' is not a layer of the module. Its linear layers: \['net.0'",
    )
    no_linear = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 3, 1), nn.Flatten())
    refused(FederatedLoop(metrics=cssv()), tmp_path, r"metrics \['cssv'\] need a classifier head", no_linear)


def test_a_head_that_is_not_linear_can_be_named(tmp_path: Path) -> None:
    class Convolutional(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[..., None]).flatten(1)

    loop = FederatedLoop(metrics=cssv("net"), seed=1)
    fit(loop, tmp_path, Convolutional(nn.Conv1d(6, 3, 1)))
    assert loop.contributions["cssv"].by_class.shape == (3, 3)


def test_metric_made_for_another_federation(tmp_path: Path) -> None:
    refused(
        FederatedLoop(metrics={"cssv": ClassSpecificShapley(num_clients=5, num_classes=3)}),
        tmp_path,
        r"num_clients=5\) does not fit the federation, which has num_clients=3",
    )


def test_cohort_larger_than_the_federation(tmp_path: Path) -> None:
    refused(FederatedLoop(sampler=UniformSampler(4)), tmp_path, r"UniformSampler\(cohort_size=4\) cannot be met")


def test_personal_evaluation_without_test_split_or_forward(tmp_path: Path) -> None:
    loop = FederatedLoop(evaluation=ClientEvaluation(every=1))
    refused(
        loop,
        tmp_path,
        r"clients \[0, 1, 2\] have none. Set .*client_test",
        data=toy_data(client_test=0),
    )

    class NoForward(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise AssertionError("training had started")

        def configure_optimizers(self) -> Any:
            return None

    with pytest.raises(ConfigurationError, match=r"calls NoForward.forward\(x\), which is not defined"):
        fit(loop, tmp_path, NoForward())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"val_check_interval": 0.5}, "val_check_interval=0.5: in the middle of a round there is no global model"),
        ({"max_steps": 7}, "max_steps=7 would stop in the middle of a round"),
    ],
)
def test_trainer_options_that_cut_a_round(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    refused(FederatedLoop(), tmp_path, match, **options)


def test_more_than_one_process(tmp_path: Path) -> None:
    trainer = trainer_for(FederatedLoop(), tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer), "world_size", 2)
        with pytest.raises(ConfigurationError, match="runs in one process on one device, and the trainer has 2"):
            trainer.fit(NeverTrained(), toy_data())


def test_data_that_are_not_federated(tmp_path: Path) -> None:
    trainer = trainer_for(FederatedLoop(), tmp_path)
    said = r"trains on a FederatedDataModule, and got dataloaders. Wrap .*FederatedDataModule\(loader\.dataset, val="
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(NeverTrained(), DataLoader(toy_sets()[0], batch_size=8))


class Bare(L.LightningModule):
    """Neither ``forward`` nor ``validation_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network(batch_norm=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Calls(Bare):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


LOGGED: dict[str, Any] = {"performance": "val_loss", "mode": "min"}


@pytest.mark.parametrize(
    ("kind", "metric", "said"),
    [
        (Bare, PartialFederatedShapley(**LOGGED), r"validation_step, which is not defined\. Define it\. Class"),
        (
            Bare,
            PartialFederatedShapley(),
            r"forward\(x\), which is not defined\. Let it return the logits \[B, M\]\. C",
        ),
        (Bare, ContributionEstimation(), r"metrics \['mine'\] call Bare\.forward"),
        (
            Calls,
            ContributionEstimation(performance="val_acc", mode="max"),
            r"metrics \['mine'\] ask .* Define it, or measure by forward\(x\): .*need neither",
        ),
    ],
)
def test_a_module_that_metrics_cannot_evaluate_is_told_of_those_that_need_not(
    tmp_path: Path, kind: Any, metric: Any, said: str
) -> None:
    data = toy_data(client_val=0.2)
    with pytest.raises(ConfigurationError, match=said):
        fit(FederatedLoop(metrics={"mine": metric}), tmp_path, kind(), data, rounds=1)


def test_empty_client_too_many_clients_and_empty_validation_set(tmp_path: Path) -> None:
    small = toy_sets(samples=12)[0]
    for kwargs, match in (
        ({"partitioner": IIDPartitioner(20)}, "20 clients"),
        ({"partitioner": IIDPartitioner(10), "client_test": 0.5}, "client"),
        ({"partitioner": IIDPartitioner(2), "server_val": 0.01}, "server_val=0.01"),
    ):
        refused(FederatedLoop(), tmp_path, match, data=FederatedDataModule(small, batch_size=4, **grouped(kwargs)))
    with pytest.raises(ConfigurationError, match="at least 2 clients"):
        IIDPartitioner(1)
    with pytest.raises(ConfigurationError, match="at least 2 clients"):
        IIDPartitioner(0)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"local_epochs": 0}, r"local_epochs=0\): expected a whole number of at least 1"),
        ({"optimizer_state": "clear"}, 'expected "reset" or "persist"'),
        ({"metrics": cssv("b"), "uploads": [HeadAlignment(clients=[0], head="a")]}, "name different heads"),
        ({"uploads": [TopK(0.1), SignFlip(clients=[0])]}, "expected attacks first"),
        ({"uploads": [GaussianPrivacy(1.0, 1.0), GaussianPrivacy(1.0, 1.0)]}, "one GaussianPrivacy"),
        ({"metrics": {"weight": ClassSpecificShapley()}}, "'weight' is taken by the reports"),
        ({"metrics": {"train_loss": ClassSpecificShapley()}}, "'train_loss' is taken by the reports"),
    ],
)
def test_wrong_arguments(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        FederatedLoop(**kwargs)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: FedAvg(server_lr=0.0), r"FedAvg\(server_lr=0.0\): expected a finite number above 0"),
        (lambda: ClientEvaluation(every=-1), "expected a whole number of at least 0"),
        (lambda: ClientEvaluation(models="own"), 'expected "received" or "trained"'),  # type: ignore[arg-type]
        (lambda: Reporting(figures=-1), "expected a whole number of at least 0"),
    ],
)
def test_wrong_parts(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


class Wants(Metric):
    """A torchmetric of the user's own, which is no ContributionMetric."""

    def __init__(self, shape: tuple[int, ...] = (3,)) -> None:
        super().__init__()
        self.shape = shape
        self.add_state("norms", torch.zeros(shape))

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms = torch.zeros(self.shape)
        if self.shape == (3,):
            self.norms[client_ids] = client_updates.norm(dim=1)

    def compute(self) -> Tensor:
        return self.norms


def test_any_torchmetric_that_speaks_the_vocabulary_will_do(tmp_path: Path) -> None:
    loop = FederatedLoop(metrics={"norm": Wants()}, seed=1)
    fit(loop, tmp_path)
    assert (loop.contributions["norm"] > 0).all()
    with pytest.raises(ValueError, match=r"metric 'norm': compute\(\) must give one row per .*it gave \[5\]"):
        fit(FederatedLoop(metrics={"norm": Wants((5,))}), tmp_path)


def test_a_metric_that_asks_for_what_a_round_does_not_have() -> None:
    class Asks(Wants):
        def update(self, client_ids: Tensor, raw_images: Tensor) -> None: ...

    with pytest.raises(ConfigurationError, match=r"asks for \['raw_images'\].*It may ask for \['aggregation_weights'"):
        FederatedLoop(metrics={"mine": Asks()})


def test_one_optimizer_with_two_paces(tmp_path: Path) -> None:
    class Two(NeverTrained):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedulers = [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": interval}
                for interval in ("step", "epoch")
            ]
            return [optimizer], schedulers

    with pytest.raises(ConfigurationError, match="steps per batch and one that steps per round.*SequentialLR"):
        fit(FederatedLoop(), tmp_path, Two(network()))


CLIENTS, CLASSES, PAIRS = CosineGradientShapley, ClassSpecificShapley, DomainRelevance


@pytest.mark.parametrize(
    ("loop", "metric", "needed"),
    [
        ({"aggregator": ShapFedWA("m")}, CLIENTS, r"aggregator ShapFedWA\(metric='m'\) needs a metric \[n, M\] ="),
        ({"aggregator": ShapleyWeighted("m")}, CLASSES, r"aggregator ShapleyWeighted.* needs a metric \[n\] = \[4\]"),
        ({"aggregator": CGSV("m")}, CLASSES, r"CGSV.* needs a metric \[n\] = \[4\], and 'm' .* gives \[4, 3\]"),
        ({"sampler": SoftmaxSampler(2, "m")}, CLASSES, r"sampler SoftmaxSampler.* needs a metric \[n\]"),
        ({"sampler": SoftmaxSampler(2, "m")}, PAIRS, r"gives \[4, 4\]. Name a metric with one value per client"),
        ({"sampler": ShapleyImportanceSampler(2, "m")}, CLASSES, r"sampler ShapleyImportanceSampler.* gives \[4, 3\]"),
        ({"personalizer": SparsifiedReward("m")}, CLASSES, r"personalizer SparsifiedReward.* gives \[4, 3\]"),
        (
            {"personalizer": ShapFedPersonalizer("m")},
            CLIENTS,
            r"ShapFedPersonalizer.* = \[4, 3\].* gives \[4\]",
        ),
        ({"personalizer": PFedSV("m")}, CLASSES, r"personalizer PFedSV.* \[n, n\] = \[4, 4\].* gives \[4, 3\]"),
    ],
)
def test_a_metric_of_another_shape(tmp_path: Path, loop: dict[str, Any], metric: Any, needed: str) -> None:
    data = toy_data((3, 1, 2, 2), client_val=0.2)
    if metric is PAIRS:
        loop = {**loop, "personalizer": FedFomo()}  # whose clients say what the others are worth
    refused(FederatedLoop(**loop, metrics={"m": metric()}), tmp_path, needed, data=data)


def test_a_metric_that_cannot_say_its_shape_yet_is_believed(tmp_path: Path) -> None:
    class Late(Wants):
        def compute(self) -> Tensor:
            if not self.norms.any():
                raise RuntimeError("nothing yet")
            return self.norms

    for metric in (Late(), Wants()):
        loop = FederatedLoop(ShapleyWeighted("norm"), {"norm": metric}, seed=1)
        fit(loop, tmp_path)
        assert loop.round_index == 3
