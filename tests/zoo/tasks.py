"""Modules of tasks that are no classification of rows, each with its samples. None of them knows flsv."""

from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from helpers import make_generator

SAMPLES, HELD_OUT = 36, 11


class Items(Dataset[Any]):
    """Whatever ``item(index)`` gives, with a class each for those who ask: its label, or else its index modulo 2."""

    def __init__(self, item, indices):
        self.item = item
        self.indices = indices
        classes = [class_of(item(index), index) for index in indices]
        self.targets = torch.tensor(classes)

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.item(self.indices[index])


def class_of(item, index):
    label = item[-1] if isinstance(item, tuple) else None
    if isinstance(label, Tensor):
        is_class = label.ndim == 0 and not label.is_floating_point()
    else:
        is_class = isinstance(label, int)
    return int(label) if is_class else index % 2


class Data(L.LightningDataModule):
    """Training items, and one or several validation sets whose last batch is not full."""

    def __init__(self, item, sizes=(HELD_OUT,), collate=None):
        super().__init__()
        self.item = item
        self.sizes = sizes
        self.collate = collate

    def train_dataloader(self):
        items = Items(self.item, range(SAMPLES))
        return DataLoader(items, batch_size=6, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self):
        loaders = []
        first_item = SAMPLES  # after those of the training
        for size in self.sizes:
            items = Items(self.item, range(first_item, first_item + size))
            loaders.append(DataLoader(items, batch_size=4, collate_fn=self.collate))
            first_item += size
        return loaders if len(loaders) > 1 else loaders[0]


def numbers(index, *shape):
    return torch.randn(*shape, generator=make_generator(index))


class Task(L.LightningModule):
    """A module with one loss for training and validation."""

    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


def make_seeded(task):
    """Make a task's module, always of the same weights."""
    torch.manual_seed(0)
    return task()


def item_with_parity(index):
    return numbers(index, 5), index % 2


class Autoencoder(Task):
    """Reconstructs its inputs, as models without targets do."""

    data = staticmethod(partial(Data, item_with_parity))

    def __init__(self):
        super().__init__()
        linear = nn.Linear(5, 3)
        self.encoder = nn.Sequential(linear, nn.BatchNorm1d(3))
        self.decoder = nn.Linear(3, 5)

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def loss(self, batch):
        x, _ = batch
        return F.mse_loss(self(x), x)


class VAE(Task):
    """Draws noise in its loss, in training and validation, as generative models do."""

    data = Autoencoder.data

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(5, 4)
        self.decoder = nn.Linear(2, 5)

    def loss(self, batch):
        x, _ = batch
        mean, log_scale = self.encoder(x).chunk(2, -1)
        scale = log_scale.exp()
        noise = torch.randn_like(mean)
        code = mean + scale * noise
        # Kullback and Leibler's, of the code's distribution from a standard normal one.
        divergences = 0.5 * (mean**2 + scale**2 - 1) - log_scale
        mean_divergence = divergences.sum(-1).mean()
        return F.mse_loss(self.decoder(code), x) + 0.1 * mean_divergence


def next_characters(index):
    step = 1 + index % 3
    text = (torch.arange(9) * step + index) % 7
    return text[:-1], text[1:]


class LanguageModel(Task):
    """Predicts the next of 7 characters, with targets ``[B, T]``, and logs a metric object, as language models do."""

    data = staticmethod(partial(Data, next_characters))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 7)
        self.perplexity = torchmetrics.text.Perplexity()

    def forward(self, x):
        hidden, _ = self.rnn(self.embedding(x))
        return self.head(hidden)

    def loss(self, batch):
        x, y = batch
        logits = self(x).flatten(0, 1)
        labels = y.flatten()
        return F.cross_entropy(logits, labels)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", self.loss(batch))
        self.perplexity(self(x), y)
        self.log("val/perplexity", self.perplexity, on_epoch=True)


def bright_pixels(index):
    image = numbers(index, 1, 4, 4)
    pixels = image[0]
    is_bright = pixels > 0
    return image, is_bright.long()


class Segmentation(Task):
    """Predicts a class for each pixel, with targets ``[B, H, W]``."""

    data = staticmethod(partial(Data, bright_pixels))

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(in_channels=1, out_channels=2, kernel_size=3, padding=1)

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)


class OneLayer(Task):
    """Has a linear layer."""

    num_outputs = 1

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, self.num_outputs)

    def forward(self, x):
        return self.net(x)


def item_with_sum(index):
    features = numbers(index, 3)
    return features, features.sum() + 1


class Regression(OneLayer):
    """Predicts a number, and logs values that are reduced by a maximum, a sum and batch sizes of its own."""

    data = staticmethod(partial(Data, item_with_sum))

    def loss(self, batch):
        x, y = batch
        predictions = self(x).squeeze(-1)
        return F.mse_loss(predictions, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        predictions = self(x).squeeze(-1)
        error = (predictions - y).abs()
        self.log("val_loss", self.loss(batch))
        self.log("val_worst", error.max(), reduce_fx="max")
        self.log("val_total", error.sum(), reduce_fx="sum")
        self.log("val_odd", error.mean(), batch_size=batch_idx + 1)


def item_with_class(index):
    features = numbers(index, 3)
    is_positive = features.sum() > 0.5
    return features, is_positive.long()


class OneLogit(OneLayer):
    """Predicts one of two classes by a single logit, as many binary classifiers do."""

    data = staticmethod(partial(Data, item_with_class))

    def loss(self, batch):
        x, y = batch
        logits = self(x).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, y.float())


def item_with_labels(index):
    features = numbers(index, 3)
    is_positive = features > 0
    return features, is_positive.long()


class Multilabel(OneLayer):
    """Predicts several labels of a sample."""

    data = staticmethod(partial(Data, item_with_labels))
    num_outputs = 3

    def loss(self, batch):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self(x), y.float())


def masked_words(index):
    positions = torch.arange(6)
    num_words = 3 + index % 4
    words = {"ids": (positions * index) % 11, "mask": positions < num_words}
    label = torch.tensor(index % 2)
    return {"input": words, "labels": label}


class Glue(Task):
    """Takes apart batches that are dictionaries, and collects outputs until the end of the epoch, as examples of
    transformers do."""

    data = staticmethod(partial(Data, masked_words))

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 2)
        self.outputs = []

    def loss_and_logits(self, batch):
        labels = batch.pop("labels")
        words = batch["input"]
        mask = words["mask"][..., None]
        embedded = self.embedding(words["ids"]) * mask
        means = embedded.sum(1) / mask.sum(1)
        logits = self.head(means)
        return F.cross_entropy(logits, labels), logits

    def loss(self, batch):
        loss, _ = self.loss_and_logits(batch)
        return loss

    def validation_step(self, batch, batch_idx):
        labels = batch["labels"]
        loss, logits = self.loss_and_logits(batch)
        is_right = logits.argmax(-1) == labels
        self.outputs.append((is_right, loss))

    def on_validation_epoch_end(self):
        is_right = torch.cat([is_right for is_right, _ in self.outputs])
        losses = torch.stack([loss for _, loss in self.outputs])
        self.log_dict({"accuracy_all": is_right.float().mean(), "loss_all": losses.mean()})
        self.outputs.clear()


class Graphs:
    """A batch of graphs, as PyTorch Geometric's: one tensor of nodes, one of edges."""

    def __init__(self, items):
        num_nodes = 0
        nodes, edges, labels, graph_of_nodes = [], [], [], []
        for number, (nodes_of_graph, edges_of_graph, label) in enumerate(items):
            nodes.append(nodes_of_graph)
            edges.append(edges_of_graph + num_nodes)
            labels.append(label)
            graph_of_nodes += [number] * len(nodes_of_graph)
            num_nodes += len(nodes_of_graph)
        self.x = torch.cat(nodes)
        self.y = torch.stack(labels)
        self.edges = torch.cat(edges, dim=1)
        self.graph = torch.tensor(graph_of_nodes)

    def to(self, device, **_):
        for name in ("x", "y", "edges", "graph"):
            moved = getattr(self, name).to(device)
            setattr(self, name, moved)
        return self


def small_graph(index):
    num_nodes = 3 + index % 3
    nodes = numbers(index, num_nodes, 4)
    senders = [0, 1, 2]
    receivers = [1, 2, 0]
    edges = torch.tensor([senders, receivers])
    label = torch.tensor(index % 2)
    return nodes, edges, label


class GraphNet(Task):
    """Classifies graphs, whose batches are objects without a length."""

    data = staticmethod(partial(Data, small_graph, collate=Graphs))

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 2)

    def loss(self, batch):
        hidden = self.inner(batch.x).relu()
        senders, receivers = batch.edges
        hidden = hidden.index_add(0, receivers, hidden[senders])
        zeros = torch.zeros(len(batch.y), 6)
        sums = zeros.index_add(0, batch.graph, hidden)
        return F.cross_entropy(self.outer(sums), batch.y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=len(batch.y))


def item_with_rising_sum(index):
    features = numbers(index, 3)
    return features, features.sum() + index / 30


class SeveralLoaders(Regression):
    """Validates on two loaders, whose values are logged apart."""

    data = staticmethod(partial(Data, item_with_rising_sum, sizes=(HELD_OUT, 5)))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))


class Hooked(Autoencoder):
    """Scales batches by another factor in training than in validation, logs the lowest validation loss so far, and
    changes a validation batch in place."""

    def __init__(self):
        super().__init__()
        self.best = torchmetrics.MinMetric()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        factor = 9.0 if self.trainer.training else 0.5
        return factor * x, y

    def on_validation_epoch_start(self):
        self.sum = torch.zeros(())

    def validation_step(self, batch, batch_idx):
        assert self.trainer.validating
        assert not self.training

        loss = self.loss(batch)
        x, _ = batch
        x.mul_(100)  # must not change the data
        self.sum += loss
        self.log("val_loss", loss, on_step=True, on_epoch=True)

        if self.logger is not None:
            self.logger.experiment.add_scalar("by_hand", loss)

    def on_validation_epoch_end(self):
        self.best.update(self.sum)
        self.log("best", self.best.compute())
