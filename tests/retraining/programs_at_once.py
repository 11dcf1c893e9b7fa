"""Programs whose coalitions train at once, and programs with something for each coalition that rows share."""

from contextlib import suppress
from functools import partial
from typing import ClassVar

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanAbsoluteError, MeanMetric, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy

from flsv import ClassifierClient
from flsv.aggregation import Aggregator, FedAdam, FedAvg, TrimmedMean
from flsv.data import FederatedDataModule, SizePartitioner
from flsv.sampling import UniformSampler
from flsv.training.algorithms import SCAFFOLD, ClientAlgorithm, FedDyn, FedDynServer, FedProx
from helpers import make_generator
from helpers.data import CLASSES, FEATURES, draw_around, toy_data, toy_sets


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


class KeepsAccuracy(Classifier):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        outputs = self(inputs)
        self.log("train_accuracy", self.accuracy(outputs, labels), prog_bar=True)
        return functional.cross_entropy(outputs, labels)


class PrintsAccuracy(KeepsAccuracy):
    def on_train_epoch_end(self):
        print(f"accuracy {self.accuracy.compute():.3f}")
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()


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


class ReadsValueAndCatches(ReadsValue):
    """In rows its loss is the plain one, but where it is small it is another one alone."""

    def training_step(self, batch, batch_idx):
        loss = Classifier.training_step(self, batch, batch_idx)
        with suppress(RuntimeError):
            return loss if loss.item() > 0.01 else 0 * loss
        return loss


class ManualOptimization(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ScalesGradients(L.Callback):
    def on_after_backward(self, trainer, module):
        for parameter in module.parameters():
            parameter.grad *= 0.5


#: Weights that NumPy changes, which no mode of torch sees.
ARRAYS = []


class ScheduleThatChangesModel(Classifier):
    def on_train_start(self):
        ARRAYS[:] = [self.network[0].weight.detach().numpy()]

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, self.change_model)]

    def change_model(self, epoch):
        if epoch:
            ARRAYS[0] *= 0.9
        return 1.0


class ChangesModelInArray(Classifier):
    def on_train_start(self):
        ARRAYS[:] = [self.network[0].weight.detach().numpy()]

    def on_train_epoch_start(self):
        if self.current_epoch:
            ARRAYS[0] *= 0.9


# ---- what client 1 has not seen: class 2. The witnesses, clients 0 and 2, have seen all classes, as the run has


def data_without_a_class():
    generator = make_generator(0)
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    sets = [draw_around(centers, size, generator) for size in (36, 27, 12, 20)]
    inputs, labels = sets[1].tensors
    sets[1] = TensorDataset(inputs[labels < 2], labels[labels < 2])
    return FederatedDataModule(clients=sets[:3], val=sets[3], batch_size=8)


class MasksUnseen(Classifier):
    """Lowers the scores of the classes that it has not seen."""

    def __init__(self):
        super().__init__()
        self.make_memory()

    def make_memory(self):
        pass

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        seen = self.see(labels.tolist())
        penalties = torch.tensor([0.0 if label in seen else -5.0 for label in range(CLASSES)])
        return functional.cross_entropy(self(inputs) + penalties, labels)


SEEN = set()


class SeenInGlobal(MasksUnseen):
    def see(self, labels):
        SEEN.update(labels)
        return SEEN


class SeenInClass(MasksUnseen):
    seen: ClassVar[set[int]] = set()

    def see(self, labels):
        self.seen.update(labels)
        return self.seen


class SeenInClosure(MasksUnseen):
    def make_memory(self):
        seen = set()

        def see(labels):
            seen.update(labels)
            return seen

        self.see = see


class SeenInMetric(MasksUnseen):
    def make_memory(self):
        self.metric = MeanMetric()
        self.metric.seen = set()

    def see(self, labels):
        self.metric.seen.update(labels)
        return self.metric.seen


class SeenInDataModule(MasksUnseen):
    def see(self, labels):
        data = self.trainer.datamodule
        data.seen = getattr(data, "seen", set()) | set(labels)
        return data.seen


class ForgetsInBuffer(Classifier):
    """Its buffer changes only in the coalition that has not seen class 2, and in no row of the run."""

    def __init__(self):
        super().__init__()
        self.register_buffer("forgets", torch.zeros((), dtype=torch.long))

    def training_step(self, batch, batch_idx):
        loss = (1 + self.forgets) * super().training_step(batch, batch_idx)
        biases = self.network[-1].bias
        self.forgets = (biases[2] < biases[:2].mean() + 0.03).long()
        return loss


class SwallowsRefusal(Classifier):
    weight = 1.0

    def on_train_epoch_start(self):
        try:
            self.weight = 1 / (1 + float(self.network[0].weight.norm()))
        except Exception:
            self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)


class LoadsWeights(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.load_state_dict({name: tensor * 0.9 for name, tensor in self.first.items()})

    def on_train_start(self):
        self.first = {name: tensor.clone() for name, tensor in self.state_dict().items()}


class ReadsRateInHook(Classifier):
    def on_train_epoch_end(self):
        self.rate = self.optimizers().param_groups[0]["lr"]


# ---- what only some coalitions come to, which neither all clients nor a client alone do


def weigh_classes(labels):
    """Return other weights if a class is rare: of no client alone and not of all, but of clients 0 and 1."""
    counts = torch.bincount(labels, minlength=CLASSES).double()
    return counts.sum() / counts.clamp_min(1) if counts.min() < 0.2 * counts.max() else None


class WeighsByLabels(Classifier):
    weights = None

    def labels(self):
        return torch.cat([labels for _, labels in self.trainer.datamodule.train_dataloader()])

    def weigh(self):
        self.weights = weigh_classes(self.labels())

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        weights = None if self.weights is None else self.weights.float()
        return functional.cross_entropy(self(inputs), labels, weight=weights)


class WeighsInSetup(WeighsByLabels):
    def setup(self, stage):
        self.weigh()


class WeighsAtTrainStart(WeighsByLabels):
    def on_train_start(self):
        self.weigh()


class WeighsByCounts(WeighsByLabels):
    def on_fit_start(self):
        counts = self.trainer.datamodule.class_counts.sum(0)
        self.weights = weigh_classes(torch.arange(CLASSES).repeat_interleave(counts))


class WeighsByDataSet(WeighsByLabels):
    def labels(self):
        return self.trainer.datamodule.samples.tensors[1]

    def setup(self, stage):
        self.weigh()


class WeighsInStep(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss / len(self.trainer.datamodule.members)


class RateBySamples(Classifier):
    def configure_optimizers(self):
        num_samples = len(self.trainer.datamodule.train_dataloader().dataset)
        return torch.optim.SGD(self.parameters(), lr=1 / num_samples)


class OwnData(UsersData):
    def setup(self, stage):
        self.samples = toy_sets()[0]

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=8, shuffle=True)


def own_data():
    return FederatedDataModule(OwnData(), SizePartitioner([4, 1, 2]))


class SlowsIfAccurate(KeepsAccuracy):
    def on_train_epoch_end(self):
        if self.accuracy.compute() > 0.9:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByState(KeepsAccuracy):
    def on_train_epoch_end(self):
        if self.accuracy.tp > 10:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByList(Classifier):
    def __init__(self):
        super().__init__()
        self.losses = CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        if len(self.losses.value) and self.losses.value[0] < 0.5:
            self.network[0].requires_grad_(False)
        self.losses.reset()


class SlowsAndCatches(SlowsIfAccurate):
    def on_train_epoch_end(self):
        try:
            super().on_train_epoch_end()
        except Exception:
            self.accuracy.reset()


class SlowsByValues(KeepsAccuracy):
    """Reads a state by a method that is no operation of torch's."""

    def on_train_epoch_end(self):
        if max(self.accuracy.tp.tolist()) > 10:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByUpdates(KeepsAccuracy):
    def on_train_epoch_end(self):
        if self.accuracy.update_count == 3:
            self.network[0].requires_grad_(False)
        self.accuracy.reset()


class SlowsByWrapper(KeepsAccuracy):
    """Reads an attribute that a metric sets when it computes."""

    def __init__(self):
        super().__init__()
        self.range = MinMaxMetric(self.accuracy)

    def on_train_epoch_end(self):
        self.range.compute()
        if self.range.max_val > 0.9:
            self.network[0].requires_grad_(False)
        self.range.reset()


class SlowsBySchedule(KeepsAccuracy):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [LambdaLR(optimizer, self.factor)]

    def factor(self, epoch):
        return 0.1 if epoch and self.accuracy.compute() > 0.9 else 1.0


class SlowsByGradient(Classifier):
    def on_train_epoch_end(self):
        gradient = self.network[0].weight.grad
        if gradient is not None and gradient.norm() < 0.1:
            self.network[0].requires_grad_(False)


class ClipsByHook(Classifier):
    def __init__(self):
        super().__init__()
        self.network[0].weight.register_hook(lambda gradient: gradient.clamp(-10.0, 10.0))


# ---- differences that are no rounding, though training enlarges rounding errors


class OtherLossInRows(WithZeroGradients):
    """From round 2 on, rows have a slightly other loss."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        is_in_row = torch._C._functorch.maybe_current_level() is not None
        smoothing = 0.01 if is_in_row and self.current_epoch >= 1 else 0.0
        return functional.cross_entropy(self(inputs), labels, label_smoothing=smoothing)


class OtherScoresOfRows(WithZeroGradients):
    """After the training of rows, whose hooks are guarded, the same weights have other outputs."""

    shift = 0.0

    def on_train_end(self):
        if "on_train_end" in vars(self):
            self.shift = 0.1

    def forward(self, inputs):
        return super().forward(inputs) + self.shift * inputs[:, :1]


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
    "torchmetric that is only written": {"make_module": PrintsAccuracy},
}


READS = "a hook reads {}, which each coalition has for itself."
READS_WEIGHT = READS.format("'network.0.weight' of the module")
OF_ONE_CLIENT = "changes the training of one client."
READS_DATA = "a hook reads the clients' data"
CHANGES = "at once: training changes"
NO_ROUNDING = "this is no rounding error"
WITHOUT_A_CLASS = {"data": data_without_a_class}
#: Programs, their options, and a part of the line that says why.
TRAINED_ONE_BY_ONE = [
    (AnchoredToRound, {}, READS_WEIGHT),
    (TeacherInGlobal, {}, READS_WEIGHT),
    (RateBySteps, {}, READS.format("trainer.optimizers")),
    (RateByWeights, {}, READS_WEIGHT),
    (RateByLogs, {}, "training may depend on validations or checkpoints."),
    (ScheduleByLength, {}, "CosineAnnealingLR steps after every batch of a client."),
    (CountsSteps, {}, "training changes 'num_steps', which is not shared."),
    (CountsInAttribute, {}, "training changes num_steps of the module."),
    (ReadsValue, {}, "calling .item() on a Tensor."),
    (ReadsValueAndCatches, {}, "reads the value of a tensor, and goes on if this fails."),
    (ManualOptimization, {}, "steps its optimizers itself"),
    (Classifier, {"loop": {"client_algorithm": CountedMoves()}}, OF_ONE_CLIENT),
    (
        Classifier,
        {"loop": {"client_algorithm": SCAFFOLD()}},
        "SCAFFOLD() sends or reports tensors.",
    ),
    (
        Classifier,
        {"loop": {"client_algorithm": FedDyn(), "aggregator": FedDynServer()}},
        OF_ONE_CLIENT,
    ),
    (Classifier, {"callbacks": [ScalesGradients()]}, "ScalesGradients takes part in training."),
    (Packed, {}, "torch cannot stack a recurrent layer of packed sequences."),
    (WithCumulativeNorm, {}, "with momentum=None reads the value of its counter."),
    (WithSpectralNorm, {}, "by an operation that torch cannot stack."),
    (WithSparseGradients, {}, "has gradients that torch cannot stack."),
    (ScheduleThatChangesModel, {}, "a hook changes the model between rounds."),
    (ChangesModelInArray, {}, "a hook changes the model before a round."),
    (SwallowsRefusal, {}, READS_WEIGHT),
    (LoadsWeights, {}, READS_WEIGHT),
    (ReadsRateInHook, {}, READS.format("trainer.strategy")),
    (SeenInGlobal, WITHOUT_A_CLASS, CHANGES),
    (SeenInClass, WITHOUT_A_CLASS, CHANGES),
    (SeenInClosure, WITHOUT_A_CLASS, CHANGES),
    (SeenInMetric, WITHOUT_A_CLASS, CHANGES),
    (SeenInDataModule, WITHOUT_A_CLASS, CHANGES),
    (ForgetsInBuffer, WITHOUT_A_CLASS, CHANGES),
    (WeighsInSetup, {}, READS_DATA),
    (WeighsAtTrainStart, {}, READS_DATA),
    (WeighsByCounts, {}, READS_DATA),
    (WeighsByDataSet, {"data": own_data}, READS_DATA),
    (RateBySamples, {}, READS_DATA),
    (WeighsInStep, {}, "training_step reads the clients' data"),
    (SlowsIfAccurate, {}, "a hook reads "),
    (SlowsByState, {}, "a hook reads "),
    (SlowsByList, {}, "a hook reads "),
    (SlowsAndCatches, {}, "a hook reads "),
    (SlowsByValues, {}, READS.format("'accuracy.tp' of the module")),
    (SlowsByUpdates, {}, READS.format("accuracy._update_count of the module")),
    (SlowsByWrapper, {}, READS.format("'range.max_val' of the module")),
    (SlowsBySchedule, {}, READS.format("the metric 'accuracy'")),
    (SlowsByGradient, {}, READS.format("the gradient of 'network.0.weight' of the module")),
    (ClipsByHook, {}, "has a hook, which would see no client's gradient."),
    (OtherLossInRows, {}, NO_ROUNDING),
    (OtherScoresOfRows, {}, NO_ROUNDING),
]
