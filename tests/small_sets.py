"""A few samples, a module that writes down which of them it has seen, and a data module of them that is dealt out."""

import lightning as L
import torch
from data_options import grouped
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv.data import FederatedDataModule

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(200) % 5


class Linear(L.LightningModule):
    """A classifier that writes down which samples it was trained, validated and tested on."""

    def __init__(self, inputs: int = 4, classes: int = 5):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
        self.seen = {"train": [], "val": [], "test": []}

    def _step(self, batch, split):
        x, y = batch
        self.seen[split].append(y)
        return nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

    def training_step(self, batch):
        return self._step(batch, "train")

    def validation_step(self, batch):
        self._step(batch, "val")

    def test_step(self, batch):
        self._step(batch, "test")

    def predict_step(self, batch):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Somebodys(L.LightningDataModule):
    """A data module as users write them, which counts what is called."""

    def __init__(self, size: int = 120, batch_size: int = 7):
        super().__init__()
        self.size = size
        self.batch_size = batch_size
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        if stage == "fit":
            self.train = TensorDataset(X[: self.size], Y[: self.size])
            self.val = TensorDataset(X[120:150], Y[120:150])
        if stage == "test":
            self.test = TensorDataset(X[150:], Y[150:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=11)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=13)


def trainer(**options):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped(kwargs))
    data.prepare_data()
    data.setup("fit")
    return data


class Flip:
    def __init__(self, factor: float = -1.0):
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Images(Dataset):
    """Not a TensorDataset; groups and classes as attributes."""

    classes = ("a", "b", "c", "d", "e")

    def __init__(self, length: int = 60):
        self.length = length
        self.groups = [index % 3 for index in range(length)]
        self.ward = [index // 20 for index in range(length)]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return X[index], int(Y[index])
