"""Bad input is refused before training starts, with what was wrong, what was expected and what to do."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from flsv import ClientEvaluation, FederatedDataModule, retrain, value_round
from flsv.aggregation import CGSV, FedAvg, ShapFedWA, ShapleyWeighted
from flsv.attacks import SignFlip
from flsv.federation import FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    ContributionMetric,
    CosineGradientShapley,
    DomainRelevance,
    PartialFederatedShapley,
)
from flsv.personalization import FedFomo, ShapFedPersonalizer, Standalone
from flsv.sampling import FullParticipation, SoftmaxSampler
from flsv.uploads import TopK, Upload
from helpers import refused, warns
from helpers.data import toy_data, toy_sets
from helpers.fits import fit, trainer_for
from helpers.models import Plain, network
from zoo.configured import OfOtherPackage


class FailsIfTrained(Plain):
    def training_step(self, batch, batch_idx):
        raise AssertionError("training had started")


def make_cssv_options(head=None):
    return {"cssv": ClassSpecificShapley(head=head)}


class Convolutional(Plain):
    def forward(self, x):
        return self.net(x[..., None]).flatten(1)


def test_convolution_can_be_named_as_classifier_head(tmp_path):
    loop = FederatedLoop(metrics=make_cssv_options("net"), seed=1)
    fit(loop, tmp_path, Convolutional(nn.Conv1d(6, 3, 1)))

    assert loop.values["cssv"].by_class.shape == (3, 3)


def test_plain_dataloaders_are_refused(tmp_path):
    trainer = trainer_for(FederatedLoop(), tmp_path)
    message = r"needs a FederatedDataModule, but got dataloaders. Wrap .*FederatedDataModule\(loader\.dataset, val="

    with refused(message):
        trainer.fit(FailsIfTrained(), DataLoader(toy_sets()[0], batch_size=8))


def test_trainer_of_two_processes_without_the_strategy_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(L.Trainer, "world_size", 2)

    with refused("one process.*trainer has 2"):
        fit(FederatedLoop(), tmp_path, FailsIfTrained())


class CallbackOfOtherPackage(L.Callback):
    __module__ = "pytorch_lightning.x"


MODULE_OF_OTHER_PACKAGE = OfOtherPackage(2, 2)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            lambda folder: fit(
                FederatedLoop(), folder, FailsIfTrained(), callbacks=[CallbackOfOtherPackage()]
            ),
            id="fit",
        ),
        pytest.param(
            lambda folder: FederatedDataModule(MODULE_OF_OTHER_PACKAGE).setup("fit"), id="data"
        ),
        pytest.param(
            lambda folder: retrain(
                trainer_for(FederatedLoop(), folder), MODULE_OF_OTHER_PACKAGE, toy_data()
            ),
            id="retrain",
        ),
        pytest.param(
            lambda folder: value_round(
                MODULE_OF_OTHER_PACKAGE, torch.zeros(6), [torch.zeros(6)] * 2
            ),
            id="value_round",
        ),
    ],
)
def test_objects_of_the_package_pytorch_lightning_are_refused(use, tmp_path):
    with refused("write `import lightning.pytorch"):
        use(tmp_path)


class WithoutForward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network(batch_norm=False)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithForward(WithoutForward):
    def forward(self, x):
        return self.net(x)


SEVEN_OUTPUTS = nn.Sequential(nn.Linear(6, 7))
WITHOUT_LINEAR_HEAD = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 3, 1), nn.Flatten())
WITH_EVALUATION = {"evaluation": ClientEvaluation(every=1)}
METRIC_BY_LOSS = {"mine": PartialFederatedShapley(performance="val_loss", mode="min")}
METRIC_BY_LOGGED_ACCURACY = ContributionEstimation(performance="val_acc", mode="max")
READS_ABSENT_METRIC = {
    "aggregator": ShapFedWA("cssv"),
    "metrics": {"shapley": ClassSpecificShapley()},
}


@pytest.mark.parametrize(
    ("make", "loop", "message", "options"),
    [
        (
            WithoutForward,
            READS_ABSENT_METRIC,
            r"ShapFedWA\(\) reads the metric 'cssv', but federation.metrics has only \['shapley'\]",
            {},
        ),
        (
            lambda: FailsIfTrained(SEVEN_OUTPUTS),
            {"metrics": make_cssv_options()},
            "head 'net.0' has 7 outputs, but the data have 3 classes",
            {},
        ),
        (
            lambda: FailsIfTrained(WITHOUT_LINEAR_HEAD),
            {"metrics": make_cssv_options()},
            r"metrics \['cssv'\] need the module's classifier head",
            {},
        ),
        (
            WithForward,
            WITH_EVALUATION,
            r"clients \[0, 1, 2\] have none. Set .*client_test",
            {"data": toy_data(client_test=0)},
        ),
        (
            WithForward,
            {},
            "val_check_interval=0.5 would validate during a round",
            {"val_check_interval": 0.5},
        ),
        (WithoutForward, {"metrics": METRIC_BY_LOSS}, r"validation_step, .*\. Define it, or", {}),
        (
            WithoutForward,
            {"metrics": {"mine": ContributionEstimation()}},
            r"metrics \['mine'\] call WithoutForward\.forward",
            {},
        ),
        (
            WithForward,
            {"metrics": {"mine": METRIC_BY_LOGGED_ACCURACY}},
            r"metrics \['mine'\] need a value .* Define it, or set performance",
            {},
        ),
        (
            WithoutForward,
            WITH_EVALUATION,
            r"every=1\): WithoutForward.forward\(x\) raised NotImplementedError",
            {},
        ),
    ],
)
def test_impossible_setting_is_refused_before_training(tmp_path, make, loop, message, options):
    module = make()
    arguments = {"data": toy_data(client_val=0.2), **options}

    with refused(message):
        fit(FederatedLoop(**loop), tmp_path, module, **arguments)

    assert module.trainer.global_step == 0


class NormsOfUpdates(Metric):
    """A torchmetric of the user's own, which is no ContributionMetric."""

    def __init__(self, shape=(3,)):
        super().__init__()
        self.shape = shape
        self.add_state("norms", torch.zeros(shape))

    def update(self, client_ids, client_updates):
        self.norms = torch.zeros(self.shape)
        if self.shape == (3,):
            self.norms[client_ids] = client_updates.norm(dim=1)

    def compute(self):
        return self.norms


class NeedsUnknownArgument(NormsOfUpdates):
    def update(self, client_ids, raw_images): ...


def test_torchmetric_with_known_update_arguments_is_used_as_a_contribution_metric(tmp_path):
    loop = FederatedLoop(metrics={"norm": NormsOfUpdates()}, seed=1)

    fit(loop, tmp_path, rounds=1)

    assert (loop.contributions["norm"] > 0).all()


def test_torchmetric_with_values_of_another_number_of_clients_raises(tmp_path):
    with pytest.raises(ValueError, match=r"metric 'norm': compute\(\) must.*\[5\]"):
        fit(FederatedLoop(metrics={"norm": NormsOfUpdates((5,))}), tmp_path)


class SchedulesByStepAndByEpoch(FailsIfTrained):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        schedulers = [{"scheduler": scheduler, "interval": name} for name in ("step", "epoch")]
        return [optimizer], schedulers


def test_optimizer_with_two_scheduler_intervals_is_refused(tmp_path):
    with refused("steps per batch.*per round.*SequentialLR"):
        fit(FederatedLoop(), tmp_path, SchedulesByStepAndByEpoch(network()))


@pytest.mark.parametrize(
    ("options", "metric", "message"),
    [
        (
            {"aggregator": ShapFedWA("m")},
            CosineGradientShapley(),
            r"aggregator ShapFedWA\(metric='m'\) needs a metric of shape \[n, M\] =",
        ),
        (
            {"aggregator": CGSV("m")},
            ClassSpecificShapley(),
            r"CGSV.* needs a metric of shape \[n\] = \[4\], but the values of 'm' .* have shape \[4, 3\]",
        ),
        (
            # Clients of FedFomo score the models of others, as this metric needs.
            {"sampler": SoftmaxSampler(2, "m"), "personalizer": FedFomo()},
            DomainRelevance(),
            r"have shape \[4, 4\]. Name a metric with one value per client",
        ),
        (
            {"personalizer": ShapFedPersonalizer("m")},
            CosineGradientShapley(),
            r"ShapFedPersonalizer.* = \[4, 3\].* have shape \[4\]",
        ),
    ],
)
def test_metric_of_the_wrong_shape_is_refused(tmp_path, options, metric, message):
    data = toy_data((3, 1, 2, 2), client_val=0.2)
    loop = FederatedLoop(**options, metrics={"m": metric})

    with refused(message):
        fit(loop, tmp_path, FailsIfTrained(), data)


class FailsWithoutAnUpdate(NormsOfUpdates):
    def compute(self):
        if not self.norms.any():
            raise RuntimeError("nothing yet")
        return self.norms


def test_metric_without_a_value_yet_passes_the_shape_check(tmp_path):
    loop = FederatedLoop(ShapleyWeighted("norm"), {"norm": FailsWithoutAnUpdate()}, seed=1)
    fit(loop, tmp_path, rounds=1)

    assert loop.round_index == 1


# ---- the names under which strategies let tensors cross


class ReportsHeight(FedAvg):
    """Each client reports its number of samples, and twice that: a vector of two entries."""

    reports = ("height",)

    def report(self, local):
        num_samples = local.class_counts.sum()
        return {"height": torch.tensor([1.0, 2.0]) * num_samples}


class AlsoReportsHeight(FullParticipation):
    reports = ("height",)


class KeepsHeights(ContributionMetric):
    def init_states(self, num_clients, num_classes):
        self.add_state("values", torch.full((num_clients, 2), float("nan")), dist_reduce_fx="sum")

    def update(self, client_ids, height):
        self.values[client_ids] = height

    def compute(self):
        return self.values


def test_declared_reports_of_any_name_and_shape_reach_metrics(tmp_path):
    data = toy_data()
    loop = FederatedLoop(ReportsHeight(), metrics={"heights": KeepsHeights()})

    fit(loop, tmp_path, data=data, rounds=1)

    sizes = data.num_samples.double()
    expected = torch.stack([sizes, 2 * sizes], dim=1)
    torch.testing.assert_close(loop.values["heights"].by_class.double(), expected)


class AddsNoise(Upload):
    """Noise for privacy, of a class that does not say so to the loop."""

    place = 1

    def apply(self, update, context):
        return update + torch.randn_like(update)


class ReportsUnderATakenName(FedAvg):
    reports = ("losses",)


class ReportsAnUndeclaredName(ReportsHeight):
    def report(self, local):
        return {"width": 1.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metrics": {**make_cssv_options("b"), "other": ClassSpecificShapley(head="a")}},
            "name different classifier heads",
        ),
        ({"uploads": [TopK(0.1), SignFlip(clients=[0])]}, "expected attacks first"),
        ({"uploads": [AddsNoise()]}, "Derive its class from flsv.uploads.PrivateUpload"),
        ({"metrics": {"weight": ClassSpecificShapley()}}, "reports use the name 'weight'"),
        (
            {"metrics": {"mine": NeedsUnknownArgument()}},
            r"update\(\) takes \['raw_images'\].*It may have \['aggregation_weights'",
        ),
        (
            {"aggregator": ReportsHeight(), "sampler": AlsoReportsHeight()},
            r"sampler AlsoReportsHeight.* and .* reports = 'height'",
        ),
        ({"aggregator": ReportsUnderATakenName()}, "an attribute of every round"),
        (
            {"metrics": {"heights": KeepsHeights()}, "personalizer": Standalone()},
            r"update\(\) takes \['height'\]",
        ),
    ],
)
def test_loop_with_wrong_arguments_is_refused(options, message):
    with refused(message):
        FederatedLoop(**options)


EXPECTS_METRICS_BY_NAME = (
    r'expected objects of the class Metric, written as in metrics=\{"value": flsv.metrics.Shadow'
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": [ClassSpecificShapley()]}, EXPECTS_METRICS_BY_NAME),
        ({"metrics": {"cssv": ClassSpecificShapley}}, EXPECTS_METRICS_BY_NAME),
        ({"metrics": {"cssv": "ClassSpecificShapley"}}, EXPECTS_METRICS_BY_NAME),
        (
            {"aggregator": "FedAvg"},
            r"'FedAvg'\): .* Aggregator, written as in aggregator=flsv.*Avg\(\)",
        ),
        ({"sampler": 3}, r"sampler=flsv.sampling.UniformSampler\(10\)"),
        ({"uploads": TopK(0.1)}, r"uploads=\[flsv.uploads.TopK\(0.1\)\]"),
        ({"evaluation": 5}, "objects of the class ClientEvaluation"),
    ],
)
def test_argument_of_a_wrong_type_is_refused_with_an_example(options, message):
    with refused(message):
        FederatedLoop(**options)


def test_run_of_0_rounds_has_a_warning(tmp_path):
    with warns("max_epochs=0 is a run of 0 rounds"):
        fit(FederatedLoop(seed=0), tmp_path, rounds=0)


def test_federated_data_in_a_trainer_without_a_loop_have_a_warning():
    with warns("Trainer has no FederatedLoop, so one model is trained on all clients' samples"):
        L.Trainer(fast_dev_run=True, accelerator="cpu").fit(Plain(network()), toy_data())


def test_undeclared_report_of_a_client_is_an_error(tmp_path):
    with (
        warns("discarded"),
        pytest.raises(RuntimeError, match=r"report \['width'\]"),
    ):
        fit(FederatedLoop(ReportsAnUndeclaredName()), tmp_path, rounds=1)
