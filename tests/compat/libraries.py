"""Modules and data of public libraries, as their pages have them, on little data, by the library's name."""

from functools import partial

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, StackDataset

from helpers import make_generator
from helpers.models import sgd
from zoo.program import Program, Sets, make_stripes

NUM_TRAINING, NUM_VALIDATION = 24, 8
BATCH_SIZE = 8


class Samples(Dataset):
    """A list of samples of any kind."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Loaded(Sets):
    """A project's data module, whose loaders are the library's or put samples together by its function."""

    def __init__(
        self,
        train,
        val,
        make_loader=DataLoader,
        **options,
    ):
        super().__init__(train, val)
        self.make_loader = make_loader
        self.options = options

    def train_dataloader(self):
        return self.make_loader(
            self.train,
            batch_size=BATCH_SIZE,
            shuffle=True,
            **self.options,
        )

    def val_dataloader(self):
        (val,) = self.val
        return self.make_loader(val, batch_size=BATCH_SIZE, **self.options)


def load(make_samples, **options):
    """Training and validation samples, drawn one after the other, in a data module."""
    generator = make_generator()
    train = make_samples(NUM_TRAINING, generator)
    val = make_samples(NUM_VALIDATION, generator)
    return Loaded(train, val, **options)


class Wrapped(L.LightningModule):
    """A library's network with the loss of a batch, by SGD."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), batch_size=BATCH_SIZE)

    def configure_optimizers(self):
        return sgd(self.parameters())


# ---- scvi-tools: a variational autoencoder of counts of genes, trained by the library's own LightningModule

NUM_GENES = 12


def make_cells(n, generator):
    rates = 3 * torch.rand(n, NUM_GENES, generator=generator)
    counts = torch.poisson(rates, generator=generator)
    one_batch = torch.zeros(n, 1)
    labels = torch.arange(n)[:, None] % 2
    return StackDataset(X=counts, batch=one_batch, labels=labels)


def make_cells_module():
    from scvi.module import VAE
    from scvi.train import TrainingPlan

    torch.manual_seed(0)
    network = VAE(NUM_GENES, n_hidden=8, n_latent=2)
    return TrainingPlan(network, n_epochs_kl_warmup=4)


# ---- chemprop: message passing on molecules, with the library's own schedule of the learning rate


def make_molecules(n):
    from chemprop.data import MoleculeDatapoint, MoleculeDataset

    points = []
    for number in range(n):
        chain = "C" * (1 + number % 5)
        end = "O" if number % 2 else "N"
        smiles = chain + end
        target = len(smiles) + 0.5 * (number % 3)
        point = MoleculeDatapoint.from_smi(smiles, np.array([target]))
        points.append(point)
    return MoleculeDataset(points)


def make_molecules_data():
    from chemprop.data import collate_batch

    train = make_molecules(NUM_TRAINING)
    val = make_molecules(NUM_VALIDATION)
    return Loaded(train, val, collate_fn=collate_batch)


def make_molecules_module():
    from chemprop.models import MPNN
    from chemprop.nn import BondMessagePassing, MeanAggregation, RegressionFFN

    torch.manual_seed(0)
    messages = BondMessagePassing(d_h=8, depth=2, dropout=0.1)
    head = RegressionFFN(input_dim=8, hidden_dim=8, n_layers=1)
    return MPNN(messages, MeanAggregation(), head, warmup_epochs=1)


# ---- MONAI: dictionaries of arrays with what the library knows of them, segmented


def make_scans(n, generator):
    from monai.data import Dataset as DatasetOfDictionaries, MetaTensor

    samples = []
    for _ in range(n):
        image = torch.rand(1, 16, 16, generator=generator)
        label = (image > 0.6).float()
        sample = {
            "image": MetaTensor(image),
            "label": MetaTensor(label),
        }
        samples.append(sample)
    return DatasetOfDictionaries(samples)


def make_scans_data():
    from monai.data import list_data_collate

    return load(make_scans, collate_fn=list_data_collate)


class Segmentation(Wrapped):
    """A U-Net."""

    def __init__(self):
        from monai.losses import DiceLoss
        from monai.networks.nets import UNet

        torch.manual_seed(0)
        network = UNet(
            2,
            in_channels=1,
            out_channels=1,
            channels=(4, 8),
            strides=(2,),
            dropout=0.1,
        )
        super().__init__(network)
        self.dice = DiceLoss(sigmoid=True)

    def loss(self, batch):
        return self.dice(self.network(batch["image"]), batch["label"])


# ---- torch-geometric: graphs of several sizes in one batch, by the library's own loader


def make_graphs(n, generator):
    from torch_geometric.data import Data

    graphs = []
    for number in range(n):
        num_nodes = 3 + number % 4
        nodes = torch.arange(num_nodes)
        ring = torch.stack([nodes, nodes.roll(1)])
        features = torch.rand(num_nodes, 4, generator=generator) + number % 2
        label = torch.tensor([number % 2])
        graph = Data(x=features, edge_index=ring, y=label)
        graphs.append(graph)
    return Samples(graphs)


def make_graphs_data():
    from torch_geometric.loader import DataLoader as LoaderOfGraphs

    return load(make_graphs, make_loader=LoaderOfGraphs)


class GraphClassification(Wrapped):
    """Two convolutions on graphs, and the mean of a graph's nodes."""

    def __init__(self):
        from torch_geometric.nn import GCN

        torch.manual_seed(0)
        network = GCN(
            4,
            8,
            num_layers=2,
            out_channels=2,
            dropout=0.1,
            norm="batch_norm",
        )
        super().__init__(network)

    def loss(self, batch):
        from torch_geometric.nn import global_mean_pool

        outputs = self.network(batch.x, batch.edge_index)
        logits = global_mean_pool(outputs, batch.batch)
        return nn.functional.cross_entropy(logits, batch.y)


# ---- pytorch-forecasting: series, cut by the library's own data set


def make_series(numbers):
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    frames = []
    for number in numbers:
        times = np.arange(16)
        values = np.sin(times / 2 + number) + 0.1 * number
        columns = {
            "time": times,
            "value": values,
            "series": str(number),
        }
        frames.append(pd.DataFrame(columns))
    return TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=6,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
    )


def make_series_data():
    train = make_series(range(3))
    return Loaded(train, make_series(range(3, 5)), collate_fn=train._collate_fn)


class ResetsLoss(L.Callback):
    """Empties the loss, which keeps the last batch's autograd graph. It cannot be copied by hand else."""

    def on_train_end(self, trainer, pl_module):
        pl_module.loss.reset()


def make_series_module():
    from pytorch_forecasting import NBeats
    from pytorch_forecasting.metrics import MAE

    torch.manual_seed(0)
    return NBeats.from_dataset(
        make_series(range(3)),
        loss=MAE(),
        widths=[8, 8],
        num_blocks=[1, 1],
        log_interval=-1,
    )


# ---- lightly: contrastive learning, whose views are drawn in the training step


class Contrastive(Wrapped):
    """SimCLR, whose views are noise."""

    def __init__(self):
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead

        torch.manual_seed(0)
        backbone = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
        )
        head = SimCLRProjectionHead(16, 16, 8)
        super().__init__(nn.Sequential(backbone, head))
        self.criterion = NTXentLoss()
        # The library leaves it as the memory is.
        self.criterion.memory_bank.bank_ptr.zero_()

    def loss(self, batch):
        images, _ = batch
        first_view, second_view = self._embed(images), self._embed(images)
        return self.criterion(first_view, second_view)

    def _embed(self, images):
        noise = torch.randn_like(images)
        return self.network(images + 0.1 * noise)


# ---- transformers: dictionaries; the network has its own loss


def make_texts(n, generator):
    tokens = torch.randint(5, 30, (n, 7), generator=generator)
    labels = (tokens[:, 0] > 16).long()
    return StackDataset(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        labels=labels,
    )


class TextClassification(Wrapped):
    """BERT with dropout."""

    def __init__(self):
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=30,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
        )
        super().__init__(BertForSequenceClassification(config))

    def loss(self, batch):
        return self.network(**batch).loss


# ---- torchvision: detection, whose batches are lists, and which draws boxes


def make_photos(n, generator):
    photos = []
    for number in range(n):
        image = torch.rand(3, 32, 32, generator=generator)
        corner = 4 + number % 6
        box = [corner, corner, corner + 12, corner + 14]
        target = {
            "boxes": torch.tensor([box]).float(),
            "labels": torch.tensor([1 + number % 2]),
        }
        photos.append((image, target))
    return Samples(photos)


def put_into_lists(samples):
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detection(Wrapped):
    """Faster R-CNN on a small network."""

    def __init__(self):
        from torchvision.models.detection import FasterRCNN
        from torchvision.models.detection.anchor_utils import AnchorGenerator

        torch.manual_seed(0)
        convolution = nn.Conv2d(
            3,
            8,
            3,
            stride=4,
            padding=1,
        )
        backbone = nn.Sequential(convolution, nn.ReLU())
        backbone.out_channels = 8
        network = FasterRCNN(
            backbone,
            num_classes=3,
            min_size=32,
            max_size=32,
            rpn_anchor_generator=AnchorGenerator(((8, 16),), ((1.0,),)),
            rpn_pre_nms_top_n_train=20,
            rpn_post_nms_top_n_train=10,
            rpn_batch_size_per_image=8,
            box_batch_size_per_image=8,
        )
        super().__init__(network)

    def loss(self, batch):
        losses = self.network(*batch)
        return sum(losses.values())

    def validation_step(self, batch, batch_idx):
        # In evaluation it returns boxes. Its losses are those of training.
        self.network.train()
        super().validation_step(batch, batch_idx)
        self.network.eval()


PROGRAMS = {
    "scvi": Program(
        make_cells_module, partial(load, make_cells), logged="validation_loss", tolerance=5e-6
    ),
    "chemprop": Program(make_molecules_module, make_molecules_data),
    "monai": Program(Segmentation, make_scans_data),
    "torch_geometric": Program(GraphClassification, make_graphs_data),
    "pytorch_forecasting": Program(
        make_series_module, make_series_data, callbacks=lambda: [ResetsLoss()]
    ),
    "lightly": Program(Contrastive, partial(load, make_stripes)),
    "transformers": Program(TextClassification, partial(load, make_texts)),
    # In double precision it is 1e-12: the losses' sums over few boxes round.
    "torchvision": Program(
        Detection, partial(load, make_photos, collate_fn=put_into_lists), tolerance=1e-5
    ),
}
