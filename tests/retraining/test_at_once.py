"""Coalitions that train at once, beside the same coalitions one by one."""

import ctypes
from functools import partial
from typing import NamedTuple

import lightning as L
import pytest
import torch
from retraining.recorded import ShadowShapleyThatKeepsUtilities
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from flsv import ClassifierClient, FederatedLoop, Reporting
from flsv.aggregation import Aggregator, FedAdam, FedAvg, TrimmedMean
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.retraining import scored_run
from flsv.retraining.at_once import AtOnce
from flsv.retraining.price import PriceList
from flsv.sampling import UniformSampler
from flsv.training.algorithms import SCAFFOLD, ClientAlgorithm, FedDyn, FedDynServer, FedProx
from helpers import make_generator
from helpers.data import CLASSES, FEATURES, toy_data, toy_sets
from helpers.fits import fit

pytestmark = pytest.mark.slow

ONE_BY_ONE, AT_ONCE = float("inf"), 0.0


class Classifier(L.LightningModule):
    """A user's classifier of the toy data."""

    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    layers = (nn.ReLU,)

    def __init__(self):
        super().__init__()
        middle = [make_layer() for make_layer in self.layers]
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), *middle, nn.Linear(8, CLASSES))

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return functional.cross_entropy(self(inputs), labels)

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_loss", functional.cross_entropy(self(inputs), labels))

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def squared_distance(parameters, others):
    return sum((one - other).square().sum() for one, other in zip(parameters, others))


# ---- trained at once


class WithDropout(Classifier):
    layers = nn.ReLU, partial(nn.Dropout, 0.3)


class WithDropoutAndAdam(WithDropout):
    make_optimizer = partial(torch.optim.Adam, lr=0.01)


class WithBatchNorm(Classifier):
    layers = partial(nn.BatchNorm1d, 8), nn.ReLU
    make_optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


class WithZeroGradients(WithBatchNorm):
    """The bias before batch normalization has no gradient but rounding errors, and Adam divides these by their size."""

    make_optimizer = partial(torch.optim.Adam, lr=0.01)


class WithNoise(WithBatchNorm):
    layers = (nn.ReLU,)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        return super().training_step((inputs + 0.1 * torch.randn_like(inputs), labels), batch_idx)


class WithLayerNormAndSchedule(Classifier):
    layers = partial(nn.LayerNorm, 8), nn.ReLU

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [StepLR(optimizer, 1, 0.5)]


class ReadsEpoch(Classifier):
    make_optimizer = partial(torch.optim.Adam, lr=0.01)

    def on_train_epoch_start(self):
        self.weight = 1 + self.current_epoch

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)


class ReadsBatchIndex(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2 == 0:
            self.log("train_loss", loss)
        return loss / (1 + batch_idx)


class HeadThatJoinsLater(ReadsBatchIndex):
    def __init__(self):
        super().__init__()
        self.second_head = nn.Linear(8, CLASSES)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch >= 2:
            features = self.network[:-1](inputs)
            loss = loss + functional.cross_entropy(self.second_head(features), labels)
        return loss


class ThawsBackbone(Classifier):
    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.network[0].requires_grad_(True)


class FrozenBackbone(Classifier):
    """Its optimizer has the frozen parameters, too."""

    def __init__(self):
        super().__init__()
        self.network[0].requires_grad_(False)


class FrozenInDouble(WithZeroGradients):
    """It is compared in 64 bits, in which the run's frozen parameters are not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(FEATURES, FEATURES).requires_grad_(False)

    def forward(self, inputs):
        return self.network(self.embedding(inputs))


class Recurrent(Classifier):
    def __init__(self):
        super().__init__()
        self.network = nn.GRU(1, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        outputs, _ = self.network(inputs[:, :, None])
        return self.head(outputs[:, -1])


class Packed(Recurrent):
    def forward(self, inputs):
        lengths = torch.full((len(inputs),), FEATURES)
        sequences = nn.utils.rnn.pack_padded_sequence(inputs[:, :, None], lengths, batch_first=True)
        _, hidden = self.network(sequences)
        return self.head(hidden[-1])


class Compiled(Classifier):
    def __init__(self):
        super().__init__()
        self.network = torch.compile(self.network, backend="eager")


class WithOwnGenerator(Classifier):
    def __init__(self):
        super().__init__()
        self.generator = make_generator(1)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        noise = torch.randn(inputs.shape, generator=self.generator)
        return super().training_step((inputs + 0.1 * noise, labels), batch_idx)


class WithCumulativeNorm(Classifier):
    layers = (partial(nn.BatchNorm1d, 8, momentum=None),)


class WithSpectralNorm(Classifier):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.network[0])


class WithSparseGradients(Classifier):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2, 4, sparse=True)
        self.network = nn.Linear(4 * FEATURES, CLASSES)

    def forward(self, inputs):
        return self.network(self.embedding((inputs > 0).long()).flatten(1))


class Regression(Classifier):
    """Predicts the first feature from the others."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.network(inputs)[:, 0]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return functional.mse_loss(self(inputs), targets)

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        self.log("val_loss", functional.mse_loss(self(inputs), targets))


class ReadsDictionaries(Classifier):
    """A classifier of rows of a table: dictionaries with a category and numbers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 2)
        self.network = nn.Linear(FEATURES + 2, CLASSES)

    def forward(self, row):
        features = torch.cat([row["numbers"], self.embedding(row["category"])], dim=1)
        return self.network(features)

    def training_step(self, row, batch_idx):
        return functional.cross_entropy(self(row), row["label"])

    def validation_step(self, row, batch_idx):
        is_correct = self(row).argmax(1) == row["label"]
        self.log("val_accuracy", is_correct.float().mean())


class ReadsTexts(Classifier):
    """An embedding bag of tokens, with offsets."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(10, 4)
        self.network = nn.Linear(4, CLASSES)

    def forward(self, batch):
        tokens, offsets, _ = batch
        return self.network(self.embedding(tokens, offsets))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self(batch), batch[2])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self(batch), batch[2]))


class WeighsByLoss(Aggregator):
    needs = ("losses",)

    def weights(self, round, contributions):
        return round.losses / round.losses.sum()


def classifier_client(middle=None, **options):
    layer = middle or nn.ReLU()
    network = nn.Sequential(nn.Linear(FEATURES, 8), layer, nn.Linear(8, CLASSES))
    make_optimizer = partial(torch.optim.SGD, lr=0.1)
    return ClassifierClient(network, num_classes=CLASSES, optimizer=make_optimizer, **options)


balanced_client = partial(classifier_client, class_weights="balanced")


class DecayedMoves(ClientAlgorithm):
    """A user's algorithm, which pulls less, the further a parameter has moved."""

    def add_proximal_gradients(self, parameters, gradients, initial_parameters):
        for parameter, gradient, initial in zip(parameters, gradients, initial_parameters):
            gradient.add_((parameter.detach() - initial).tanh(), alpha=0.3)


class CountedMoves(DecayedMoves):
    """One that keeps a number at the client, too."""

    def begin_client(self, context):
        context.state["rounds"] = context.state.get("rounds", torch.zeros(())) + 1

    def gradients(self, context, parameters, gradients):
        super().gradients(context, parameters, gradients)
        for gradient in gradients:
            gradient.div_(context.state["rounds"])


class UsersData(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(toy_sets()[0], batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(toy_sets()[1], batch_size=8)


class UsersTexts(UsersData):
    def train_dataloader(self):
        return DataLoader(texts(40), batch_size=8, shuffle=True, collate_fn=joined_texts)

    def val_dataloader(self):
        return DataLoader(texts(20), batch_size=8, collate_fn=joined_texts)


def texts(num_texts):
    """Texts of 2 to 4 tokens, whose classes have different tokens."""
    generator = make_generator(num_texts)
    items = []
    for index in range(num_texts):
        label = index % CLASSES
        length = 2 + index % 3
        items.append(
            (torch.randint(3 * label, 3 * label + 4, (length,), generator=generator), label)
        )
    return items


def joined_texts(items):
    lengths = torch.tensor([len(tokens) for tokens, _ in items])
    offsets = lengths.cumsum(0) - lengths
    return torch.cat([tokens for tokens, _ in items]), offsets, torch.tensor([y for _, y in items])


# ---- trained one by one, since each coalition has something for itself that rows share


class AnchoredToRound(Classifier):
    """FedProx by hand."""

    def on_train_epoch_start(self):
        self.anchor = [parameter.detach().clone() for parameter in self.parameters()]

    def training_step(self, batch, batch_idx):
        distance = squared_distance(self.parameters(), self.anchor)
        return super().training_step(batch, batch_idx) + 0.1 * distance


TEACHERS = []


class TeacherInGlobal(Classifier):
    def on_train_epoch_end(self):
        TEACHERS[:] = [self.network[0].weight.detach().clone()]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not TEACHERS:
            return loss
        return loss + (self.network[0].weight - TEACHERS[0]).square().sum()


class RateBySteps(Classifier):
    def on_train_epoch_start(self):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.1 / (1 + self.global_step / 10)


class ZeroGradientsAndRateBySteps(WithZeroGradients, RateBySteps):
    pass


class RateByWeights(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        weight = self.network[0].weight
        schedule = LambdaLR(optimizer, lambda _: 1 / (1 + float(weight.detach().norm())))
        return [optimizer], [schedule]


class RateByLogs(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.factor = float(self.trainer.callback_metrics.get("train_loss", 1.0))


class ScheduleByLength(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        num_steps = self.trainer.estimated_stepping_batches
        schedule = CosineAnnealingLR(optimizer, T_max=num_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class CountsSteps(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_steps", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        return super().training_step(batch, batch_idx) / (1 + 0.01 * self.num_steps)


class CountsInAttribute(Classifier):
    num_steps = 0

    def training_step(self, batch, batch_idx):
        if self.current_epoch >= 1:
            self.num_steps += 1
        return super().training_step(batch, batch_idx)


class ReadsValue(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class ManualOptimization(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class WeighsByMembers(Classifier):
    def on_train_start(self):
        self.factor = 1 / len(self.trainer.datamodule.members)

    def training_step(self, batch, batch_idx):
        return self.factor * super().training_step(batch, batch_idx)


class ScalesGradients(L.Callback):
    def on_after_backward(self, trainer, module):
        for parameter in module.parameters():
            parameter.grad *= 0.5


class ScheduleThatChangesModel(Classifier):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, self.change_model)]

    def change_model(self, epoch):
        if epoch:
            self.network[0].weight.data.mul_(0.9)
        return 1.0


ARRAYS = []


class ChangesModelInArray(Classifier):
    """NumPy changes its weights, which no mode of torch sees."""

    def on_train_start(self):
        ARRAYS[:] = [self.network[0].weight.detach().numpy()]

    def on_train_epoch_start(self):
        if self.current_epoch:
            ARRAYS[0] *= 0.9


class Result(NamedTuple):
    utilities: torch.Tensor
    values: torch.Tensor
    #: How coalitions differ from the run.
    differences: list[str]
    #: The line that says why coalitions are trained one by one, or the plan.
    lines: list[str]


def fit_with_coalitions(
    monkeypatch,
    caplog,
    folder,
    price,
    make_module=Classifier,
    *,
    data=None,
    loop=None,
    metric=None,
    rounds=3,
    **options,
):
    """Fit with all coalitions, at the ``price`` of training them at once."""
    monkeypatch.setattr(PriceList, "at_once", lambda prices, masks: price_of(prices, price))
    options_of_metric = metric or {"performance": "negative_loss"}
    metric = ShadowShapleyThatKeepsUtilities(coalitions="all", **options_of_metric)
    TEACHERS.clear()
    L.seed_everything(1, verbose=False)
    options_of_loop = {
        "reporting": Reporting(table=False, figures=0, files=False),
        **(loop or {}),
    }
    federated_loop = FederatedLoop(metrics={"value": metric}, seed=5, **options_of_loop)
    caplog.clear()
    with caplog.at_level("INFO", "lightning.pytorch"):
        fit(
            federated_loop,
            folder,
            make_module(),
            data() if data else toy_data(server_val=0.2),
            rounds=rounds,
            **options,
        )
    differences = federated_loop.run.coalition_differences
    return Result(metric.utilities, metric.compute(), differences, list(caplog.messages))


def price_of(prices, price):
    return ONE_BY_ONE if prices.trial.why_not else price


def is_trained_at_once(result):
    is_planned = any("are trained at once" in line for line in result.lines)
    return is_planned and not any("one by one" in line for line in result.lines)


def users_data(kind=UsersData):
    return FederatedDataModule(kind(), SizePartitioner([4, 1, 2]))


def as_items(to_item):
    """Return a function that makes lists of the toy samples in another form, of which clients have unequal numbers."""

    def data():
        samples = [to_item(inputs, label) for inputs, label in zip(*toy_sets()[0].tensors)]
        clients = [samples[:20], samples[20:25], samples[25:36]]
        return FederatedDataModule(clients=clients, val=samples[60:90], batch_size=8)

    return data


def to_row(inputs, label):
    return {"numbers": inputs, "category": int(inputs[0] > 0), "label": label}


def to_regression(inputs, label):
    return inputs, inputs[0]


def one_class_clients():
    inputs, labels = toy_sets()[0].tensors
    clients = [
        TensorDataset(inputs[labels == label], labels[labels == label]) for label in range(CLASSES)
    ]
    return FederatedDataModule(clients=clients, val=toy_sets()[1], batch_size=8)


#: Each option stands in one row at least, and each row has another pair of them.
TRAINED_AT_ONCE = {
    "dropout, Adam, clipped norms, two epochs, user's data module": {
        "make_module": WithDropoutAndAdam,
        "data": users_data,
        "loop": {"local_epochs": 2},
        "gradient_clip_val": 0.1,
    },
    "batch norm, momentum, clipped values, server optimizer": {
        "make_module": WithBatchNorm,
        "loop": {"aggregator": FedAdam()},
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
    "layer norm, schedule by round, drawn cohorts": {
        "make_module": WithLayerNormAndSchedule,
        "loop": {"sampler": UniformSampler(2)},
    },
    "noise in the step, momentum, robust average, clients of one class": {
        "make_module": WithNoise,
        "data": one_class_clients,
        "loop": {"aggregator": TrimmedMean(0.34)},
    },
    "hook that reads the epoch, Adam, double precision, equal weights": {
        "make_module": ReadsEpoch,
        "loop": {"aggregator": FedAvg(weighting="uniform")},
        "precision": "64-true",
    },
    "head that joins later, index of the batch, two epochs": {
        "make_module": HeadThatJoinsLater,
        "loop": {"local_epochs": 2},
        "rounds": 4,
    },
    "backbone that thaws, steps instead of epochs": {
        "make_module": ThawsBackbone,
        "loop": {"local_epochs": "3 steps"},
        "rounds": 4,
    },
    "frozen backbone that is not shared": {
        "make_module": FrozenBackbone,
        "loop": {"share": "trainable"},
    },
    "recurrent layer, two epochs": {"make_module": Recurrent, "loop": {"local_epochs": 2}},
    "compiled layers": {"make_module": Compiled},
    "numbers of its own generator, drawn cohorts": {
        "make_module": WithOwnGenerator,
        "loop": {"sampler": UniformSampler(2)},
    },
    "texts, drawn cohorts": {
        "make_module": ReadsTexts,
        "data": partial(users_data, UsersTexts),
        "loop": {"sampler": UniformSampler(2)},
        "metric": {"performance": "val_loss", "mode": "min"},
    },
    "regression, weights by losses": {
        "make_module": Regression,
        "data": as_items(to_regression),
        "loop": {"aggregator": WeighsByLoss()},
        "metric": {"performance": MeanAbsoluteError()},
    },
    "dictionaries, two epochs": {
        "make_module": ReadsDictionaries,
        "data": as_items(to_row),
        "loop": {"local_epochs": 2},
        "metric": {"performance": "val_accuracy", "mode": "max"},
    },
    "values per class, scores by clients": {
        "make_module": classifier_client,
        "data": partial(toy_data, client_val=0.2),
        "metric": {"per_class": True, "evaluators": "clients"},
    },
    "proximal term, dropout, Adam, clipped norms, server optimizer": {
        "make_module": WithDropoutAndAdam,
        "loop": {"client_algorithm": FedProx(0.5), "local_epochs": 2, "aggregator": FedAdam()},
        "gradient_clip_val": 0.1,
    },
    "decay of what a client moves": {"loop": {"client_algorithm": DecayedMoves()}},
    "balanced classes with dropout, drawn cohorts": {
        "make_module": partial(balanced_client, nn.Dropout(0.3)),
        "loop": {"sampler": UniformSampler(2)},
    },
}

TRAINED_ONE_BY_ONE = {
    "anchor of the round": {"make_module": AnchoredToRound},
    "teacher in a global": {"make_module": TeacherInGlobal},
    "rate by the number of steps": {"make_module": RateBySteps},
    "the same where rounding errors grow": {"make_module": ZeroGradientsAndRateBySteps},
    "rate by the weights": {"make_module": RateByWeights},
    "attribute by a logged value": {"make_module": RateByLogs},
    "schedule by a client's length": {"make_module": ScheduleByLength},
    "counter in a buffer": {"make_module": CountsSteps},
    "counter in an attribute from round 2 on": {"make_module": CountsInAttribute},
    "value of a tensor": {"make_module": ReadsValue},
    "manual optimization": {"make_module": ManualOptimization},
    "number of members": {"make_module": WeighsByMembers},
    "proximal term by the client's round": {"loop": {"client_algorithm": CountedMoves()}},
    "control variates": {"loop": {"client_algorithm": SCAFFOLD()}},
    "callback that trains": {"callbacks": [ScalesGradients()]},
}
#: What coalitions are then is compared for a refusal by the reads of a program, and for one by a proof.
WITH_REFERENCE = ("teacher in a global", "the same where rounding errors grow")


@pytest.mark.by_turn
@pytest.mark.parametrize("options", TRAINED_AT_ONCE.values(), ids=TRAINED_AT_ONCE)
def test_coalitions_at_once_are_those_that_train_one_by_one(options, monkeypatch, caplog, tmp_path):
    at_once = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, **options)
    one_by_one = fit_with_coalitions(monkeypatch, caplog, tmp_path, ONE_BY_ONE, **options)

    assert is_trained_at_once(at_once), at_once.lines
    assert not is_trained_at_once(one_by_one)
    assert not at_once.differences
    torch.testing.assert_close(at_once.utilities, one_by_one.utilities, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at_once.values, one_by_one.values, rtol=1e-3, atol=1e-5)


@pytest.mark.by_turn
@pytest.mark.parametrize("name", TRAINED_ONE_BY_ONE)
def test_coalitions_that_cannot_share_a_fit_train_one_by_one(name, monkeypatch, caplog, tmp_path):
    options = {"rounds": 2, **TRAINED_ONE_BY_ONE[name]}
    refused = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, **options)
    assert not is_trained_at_once(refused)

    if name in WITH_REFERENCE:
        one_by_one = fit_with_coalitions(monkeypatch, caplog, tmp_path, ONE_BY_ONE, **options)
        torch.testing.assert_close(refused.utilities, one_by_one.utilities, rtol=0, atol=0)


def test_frozen_parameters_are_the_runs_after_a_comparison_in_64_bits(
    monkeypatch, caplog, tmp_path
):
    options = {"make_module": FrozenInDouble, "loop": {"share": "trainable"}, "rounds": 2}
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, **options)

    assert result.values.isfinite().all()


FEDDYN = {"client_algorithm": FedDyn(), "aggregator": FedDynServer()}


@pytest.mark.by_turn
@pytest.mark.parametrize(
    ("make_module", "loop", "reason"),
    [
        (Classifier, FEDDYN, "changes the training of one client."),
        (Packed, {}, "torch cannot stack a recurrent layer of packed sequences."),
        (WithCumulativeNorm, {}, "with momentum=None reads the value of its counter."),
        (WithSpectralNorm, {}, "by an operation that torch cannot stack."),
        (WithSparseGradients, {}, "has gradients that torch cannot stack."),
    ],
)
def test_a_line_says_why_coalitions_train_one_by_one(
    make_module, loop, reason, monkeypatch, caplog, tmp_path
):
    result = fit_with_coalitions(
        monkeypatch, caplog, tmp_path, AT_ONCE, make_module, loop=loop, rounds=1
    )

    assert any(line.endswith(reason) for line in result.lines), result.lines


@pytest.mark.parametrize(
    ("make_module", "when"),
    [(ScheduleThatChangesModel, "between rounds"), (ChangesModelInArray, "before a round")],
)
def test_hook_that_changes_the_model_is_named(make_module, when, monkeypatch, caplog, tmp_path):
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module, rounds=2)

    (line,) = [line for line in result.lines if "one by one" in line]
    assert line.endswith(f"they cannot be trained at once: a hook changes the model {when}.")


def test_rounding_errors_that_training_enlarges_are_told(monkeypatch, caplog, capsys, tmp_path):
    loop = {"reporting": Reporting(figures=0, files=False)}
    options = {"make_module": WithZeroGradients, "loop": loop}
    at_once = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, **options)
    report = capsys.readouterr().out
    one_by_one = fit_with_coalitions(monkeypatch, caplog, tmp_path, ONE_BY_ONE, **options)

    assert is_trained_at_once(at_once), at_once.lines
    assert not at_once.differences
    assert "training enlarges rounding errors" in report
    torch.testing.assert_close(at_once.values, one_by_one.values, rtol=0.05, atol=0.005)


COUNTER_IN_C = ctypes.c_long(0)


class CountsOutsideOfCopies(WithZeroGradients):
    def training_step(self, batch, batch_idx):
        COUNTER_IN_C.value += self.current_epoch
        return super().training_step(batch, batch_idx) * (1 + 0.01 * COUNTER_IN_C.value)


def test_training_that_cannot_be_repeated_is_no_rounding(monkeypatch, caplog, tmp_path):
    COUNTER_IN_C.value = 0
    options = {"make_module": CountsOutsideOfCopies, "rounds": 3}
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, **options)

    assert any("this is no rounding error" in line for line in result.lines)
    assert result.differences


def test_proofs_need_no_stored_outputs(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(scored_run, "MAX_STORED_OUTPUTS", 0)
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, rounds=2)
    assert is_trained_at_once(result), result.lines


def test_groups_that_do_not_fit_into_memory_are_halved(monkeypatch, caplog, tmp_path):
    whole = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE)
    group_sizes = []
    fit_group = AtOnce._fit

    def fit_with_memory_for_four(coalitions, group, in_double=False):
        group_sizes.append(len(group))
        if len(group) > 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return fit_group(coalitions, group, in_double)

    monkeypatch.setattr(AtOnce, "_fit", fit_with_memory_for_four)
    with pytest.warns(UserWarning, match="6 groups of clients do not fit into the memory"):
        halves = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE)

    assert group_sizes == [6, 3, 3]
    assert is_trained_at_once(halves), halves.lines
    torch.testing.assert_close(halves.utilities, whole.utilities, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "limit",
    ["retraining.price.MAX_ELEMENTS_OF_GROUP", "vmap.coalition_rows.MAX_ELEMENTS_OF_CHUNK"],
    ids=["groups", "chunks"],
)
@pytest.mark.parametrize("make_module", [Classifier, WithDropout])
def test_coalitions_in_parts_are_those_of_one_part(
    limit, make_module, monkeypatch, caplog, tmp_path
):
    whole = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module)
    monkeypatch.setattr(f"flsv.{limit}", 700)
    parts = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module)

    assert is_trained_at_once(parts), parts.lines
    torch.testing.assert_close(parts.utilities, whole.utilities, rtol=1e-4, atol=1e-5)


class Prints(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        self.last_round = trainer.current_epoch
        print(self.last_round)


def test_values_with_a_callback_that_watches_are_those_without(monkeypatch, caplog, tmp_path):
    without = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE)
    one_by_one = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, callbacks=[Prints()])
    excluded = fit_with_coalitions(
        monkeypatch,
        caplog,
        tmp_path,
        AT_ONCE,
        callbacks=[Prints()],
        metric={"performance": "negative_loss", "excluded_callbacks": ["Prints"]},
    )

    assert not is_trained_at_once(one_by_one)
    assert any("excluded_callbacks=['Prints']" in line for line in one_by_one.lines)
    torch.testing.assert_close(one_by_one.values, without.values, rtol=1e-3, atol=1e-5)
    assert is_trained_at_once(excluded), excluded.lines
    assert torch.equal(excluded.values, without.values)
