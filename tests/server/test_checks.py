"""Bad input is refused before training starts, with what was wrong, what was expected and what to do."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from flsv import ClientEvaluation, ConfigurationError, FederatedDataModule, retrain, value_round
from flsv.aggregation import CGSV, FedAvg, ShapFedWA, ShapleyWeighted
from flsv.attacks import SignFlip
from flsv.core import LocalData
from flsv.federation import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    ContributionMetric,
    CosineGradientShapley,
    DomainRelevance,
    PartialFederatedShapley,
)
from flsv.personalization import FedFomo, PFedSV, ShapFedPersonalizer, Standalone
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FullParticipation, SoftmaxSampler, UniformSampler
from flsv.uploads import TopK
from helpers.data import toy_data, toy_sets
from helpers.fits import fit, trainer_for
from helpers.models import OfOtherPackage, Plain, network


class NeverTrained(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training had started")


def cssv(head: str | None = None) -> dict[str, Any]:
    return {"cssv": ClassSpecificShapley(head=head)}


WIDE = nn.Sequential(nn.Linear(6, 7))
NO_LINEAR = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 3, 1), nn.Flatten())
EVALUATED = {"evaluation": ClientEvaluation(every=1)}


@pytest.mark.parametrize(
    ("loop", "match", "options"),
    [
        (
            {"aggregator": ShapFedWA("cssv"), "metrics": {"shapley": ClassSpecificShapley()}},
            r"aggregator ShapFedWA\(\) reads the metric 'cssv', which is not defined. Defined: \['shapley'\]",
            {},
        ),
        ({"metrics": cssv()}, "the head 'net.0' has 7 rows and the data have 3 classes", {"net": WIDE}),
        ({"metrics": cssv("fc")}, r"head='fc' is not a layer of the module. Its linear layers: \['net.0'", {}),
        ({"metrics": cssv()}, r"metrics \['cssv'\] need a classifier head", {"net": NO_LINEAR}),
        (
            {"metrics": {"cssv": ClassSpecificShapley(num_clients=5, num_classes=3)}},
            r"num_clients=5\) does not fit the federation, which has num_clients=3",
            {},
        ),
        ({"sampler": UniformSampler(4)}, r"UniformSampler\(cohort_size=4\) cannot be met", {}),
        (EVALUATED, r"clients \[0, 1, 2\] have none. Set .*client_test", {"data": toy_data(client_test=0)}),
        ({}, "val_check_interval=0.5: in the middle of a round there is no global", {"val_check_interval": 0.5}),
        ({}, "max_steps=7 would stop in the middle of a round", {"max_steps": 7}),
        ({}, "LearningRateFinder tries training out", {"callbacks": [LearningRateFinder()]}),
    ],
)
def test_impossible_setting_is_refused_before_training(
    tmp_path: Path, loop: dict[str, Any], match: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(FederatedLoop(**loop), tmp_path, NeverTrained(options.pop("net", None)), **options)


def test_classifier_head_that_is_not_linear_can_be_named(tmp_path: Path) -> None:
    class Convolutional(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[..., None]).flatten(1)

    loop = FederatedLoop(metrics=cssv("net"), seed=1)
    fit(loop, tmp_path, Convolutional(nn.Conv1d(6, 3, 1)))
    assert loop.contributions["cssv"].by_class.shape == (3, 3)


def test_ddp_and_plain_dataloaders_are_refused(tmp_path: Path) -> None:
    trainer = trainer_for(FederatedLoop(), tmp_path)
    said = r"trains on a FederatedDataModule, and got dataloaders. Wrap .*FederatedDataModule\(loader\.dataset, val="
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(NeverTrained(), DataLoader(toy_sets()[0], batch_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(trainer), "world_size", 2)
        with pytest.raises(ConfigurationError, match="runs in one process on one device, and the trainer has 2"):
            trainer.fit(NeverTrained(), toy_data())


def test_what_is_of_the_package_pytorch_lightning_is_refused_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "write `import lightning.pytorch as pl`"
    other = type("Own", (L.Callback,), {"__module__": "pytorch_lightning.x"})
    trainer = trainer_for(FederatedLoop(), tmp_path, callbacks=[other()])
    with pytest.raises(ConfigurationError, match=f"Own is .*{said}"):
        trainer.fit(NeverTrained(), toy_data())
    module, new = OfOtherPackage(2, 2), trainer_for(FederatedLoop(), tmp_path)
    for use in (
        lambda: FederatedDataModule(module).setup("fit"),
        lambda: retrain(new, module, toy_data()),  # type: ignore[arg-type]
        lambda: value_round(module, torch.zeros(6), [torch.zeros(6)] * 2),
    ):
        with pytest.raises(ConfigurationError, match=f"OfOtherPackage is .*{said}"):
            use()
    monkeypatch.setattr(L.Trainer, "__module__", "pytorch_lightning.trainer.trainer")
    with pytest.raises(ConfigurationError, match=f"Trainer is .*{said}"):
        trainer_for(FederatedLoop(), tmp_path).fit(NeverTrained(), DataLoader(toy_sets()[0], batch_size=8))


class Bare(L.LightningModule):
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
    ("kind", "loop", "said"),
    [
        (Bare, {"metrics": {"mine": PartialFederatedShapley(**LOGGED)}}, r"validation_step, .*\. Define it, or"),
        (Bare, {"metrics": {"mine": PartialFederatedShapley()}}, r"forward\(x\), which .* or name what valid"),
        (Bare, {"metrics": {"mine": ContributionEstimation()}}, r"metrics \['mine'\] call Bare\.forward"),
        (
            Calls,
            {"metrics": {"mine": ContributionEstimation(performance="val_acc", mode="max")}},
            r"metrics \['mine'\] ask .* Define it, or measure by forward\(x\): .*need neither",
        ),
        (Bare, EVALUATED, r"every=1\): Bare.forward\(x\) ends in NotImplementedError"),
    ],
)
def test_module_that_cannot_be_evaluated_is_refused(tmp_path: Path, kind: Any, loop: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        fit(FederatedLoop(**loop), tmp_path, kind(), toy_data(client_val=0.2), rounds=1)


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


class Asks(Wants):
    def update(self, client_ids: Tensor, raw_images: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"metrics": {**cssv("b"), "other": ClassSpecificShapley(head="a")}}, "name different heads"),
        ({"uploads": [TopK(0.1), SignFlip(clients=[0])]}, "expected attacks first"),
        ({"uploads": [GaussianPrivacy(1.0, 1.0), GaussianPrivacy(1.0, 1.0)]}, "one GaussianPrivacy"),
        ({"metrics": {"weight": ClassSpecificShapley()}}, "'weight' is taken by the reports"),
        ({"metrics": {"mine": Asks()}}, r"asks for \['raw_images'\].*It may ask for \['aggregation_weights'"),
        ({"engine": "threads"}, 'expected "sequential" or "vmap"'),
        ({"metrics": {"epsilon": Asks()}, "uploads": [GaussianPrivacy(1.0, 1.0)]}, 'adds a metric "epsilon"'),
        ({"evaluation": 1}, r"evaluation=1\): expected evaluation=flsv.ClientEvaluation"),
    ],
)
def test_loop_with_wrong_arguments_is_refused(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        FederatedLoop(**kwargs)


def test_torchmetric_with_known_update_arguments_is_used_as_a_contribution_metric(tmp_path: Path) -> None:
    loop = FederatedLoop(metrics={"norm": Wants()}, seed=1)
    fit(loop, tmp_path)
    assert (loop.contributions["norm"] > 0).all()
    with pytest.raises(ValueError, match=r"metric 'norm': compute\(\) must give one row per .*it gave \[5\]"):
        fit(FederatedLoop(metrics={"norm": Wants((5,))}), tmp_path)


def test_optimizer_with_two_scheduler_intervals_is_refused(tmp_path: Path) -> None:
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
        ({"sampler": SoftmaxSampler(2, "m")}, PAIRS, r"gives \[4, 4\]. Name a metric with one value per client"),
        ({"personalizer": ShapFedPersonalizer("m")}, CLIENTS, r"ShapFedPersonalizer.* = \[4, 3\].* gives \[4\]"),
        ({"personalizer": PFedSV("m")}, CLASSES, r"personalizer PFedSV.* \[n, n\] = \[4, 4\].* gives \[4, 3\]"),
    ],
)
def test_metric_of_the_wrong_shape_is_refused(tmp_path: Path, loop: dict[str, Any], metric: Any, needed: str) -> None:
    data = toy_data((3, 1, 2, 2), client_val=0.2)
    if metric is PAIRS:
        loop = {**loop, "personalizer": FedFomo()}  # whose clients say what the others are worth
    with pytest.raises(ConfigurationError, match=needed):
        fit(FederatedLoop(**loop, metrics={"m": metric()}), tmp_path, NeverTrained(), data)


def test_metric_without_a_value_yet_passes_the_shape_check(tmp_path: Path) -> None:
    class Late(Wants):
        def compute(self) -> Tensor:
            if not self.norms.any():
                raise RuntimeError("nothing yet")
            return self.norms

    loop = FederatedLoop(ShapleyWeighted("norm"), {"norm": Late()}, seed=1)
    fit(loop, tmp_path, rounds=1)
    assert loop.round_index == 1


# ---- the names under which strategies let tensors cross


class Height(FedAvg):
    reports = ("height",)

    def report(self, local: LocalData) -> dict[str, Any]:
        return {"height": torch.tensor([1.0, 2.0]) * local.class_counts.sum()}


class AlsoHeight(FullParticipation):
    reports = ("height",)


class Heights(ContributionMetric):
    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("values", torch.full((num_clients, 2), float("nan")), dist_reduce_fx="sum")

    def update(self, client_ids: Tensor, height: Tensor) -> None:
        self.values[client_ids] = height

    def compute(self) -> Tensor:
        return self.values


def test_declared_reports_of_any_name_and_shape_reach_metrics(tmp_path: Path) -> None:
    loop = FederatedLoop(Height(), metrics={"heights": Heights()})
    fit(loop, tmp_path, rounds=1)
    assert loop.contributions["heights"].by_class.tolist() == [[54.0, 108.0], [14.0, 28.0], [26.0, 52.0]]


class Losses(FedAvg):
    reports = ("losses",)


class Another(Height):
    def report(self, local: LocalData) -> dict[str, Any]:
        return {"width": 1.0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aggregator": Height(), "sampler": AlsoHeight()}, r"sampler AlsoHeight.* and .* reports = 'height'"),
        ({"aggregator": Losses()}, "a name in every round"),
        ({"metrics": {"heights": Heights()}, "personalizer": Standalone()}, r"asks for \['height'\]"),
    ],
)
def test_report_names_that_clash_or_are_not_declared_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FederatedLoop(**options)


def test_undeclared_report_of_a_client_is_an_error(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="discarded"), pytest.raises(RuntimeError, match=r"report \['width'\]"):
        fit(FederatedLoop(Another()), tmp_path, rounds=1)
