"""In-run data Shapley that looks at some steps only: what is lost of the values where ``every`` saves time.

    python tools/inrun_every.py [--seeds 5]

Digits of six clients, a fifth of all labels wrong, 20 rounds. A client's whole value does not depend on ``every``: the
server has it from the update. Its classes' and its samples' do: their rank correlation with those of ``every=1``, and
the AUROC with which a sample's value tells that its label is wrong, minus that of ``every=1`` by pairs of seeds. What
it costs: ``bench_inrun.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping

import lightning as L
import torch
from common import be_quiet, grid, quiet_trainer
from sklearn.metrics import roc_auc_score
from table_statistics import paired
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.benchmark.scores import spearman
from flsv.clients.algorithms import InRunValues
from flsv.data import DirichletPartitioner, Splits
from flsv.data.sources.named import digits
from flsv.metrics import InRunShapley

EVERY = (1, 2, 4, 8)
CLIENTS, ROUNDS, WRONG, VALIDATION = 6, 20, 0.2, 200
COLUMNS = {"classes": 2, "samples": 2, "auroc": 3}


class MislabeledDigits(L.LightningDataModule):
    """Digits whose training labels are wrong at random, and clean ones to validate on.

    Attributes:
        is_wrong: whose label is, by the image's bytes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        images, labels = digits().train.tensors  # type: ignore[attr-defined]
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=draw)
        mine, clean = order[VALIDATION:], order[:VALIDATION]
        wrong = torch.rand(len(mine), generator=draw) < WRONG
        other = (labels[mine] + torch.randint(1, 10, (len(mine),), generator=draw)) % 10
        self.train = TensorDataset(images[mine], torch.where(wrong, other, labels[mine]))
        self.val = TensorDataset(images[clean], labels[clean])
        self.is_wrong = {image.numpy().tobytes(): bool(bad) for image, bad in zip(images[mine], wrong)}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=16)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=VALIDATION)


def measured(seed: int) -> dict[int, dict[str, float]]:
    """By ``every``: the AUROC of wrong labels by samples' values, and how samples' and classes' values agree with those
    of ``every=1``."""
    given = MislabeledDigits(seed)
    wrong: list[bool] = []
    samples: dict[int, Tensor] = {}
    classes: dict[int, Tensor] = {}
    for every in EVERY:
        dealt = DirichletPartitioner(CLIENTS, alpha=1.0, min_samples=60, seed=seed)
        data = FederatedDataModule(given, dealt, splits=Splits(seed=seed))
        loop = FederatedLoop(
            metrics={"in_run": InRunShapley()},
            client_algorithm=InRunValues(every),
            seed=seed,
            reporting=Reporting(figures=0, table=False),
        )
        torch.manual_seed(seed)
        module = ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), network_args={"hidden": [64]})
        with tempfile.TemporaryDirectory() as folder:
            quiet_trainer(folder, ROUNDS, [loop]).fit(module, data)
        kept = loop.state_dict()["clients"]
        samples[every] = torch.cat([kept[client]["in_run_values"] for client in range(CLIENTS)])
        classes[every] = loop.contributions["in_run"][:, :10].flatten()
        if not wrong:
            loaders = [data.client_loader(client, "train", shuffle=False) for client in range(CLIENTS)]
            images = torch.cat([batch[0] for loader in loaders for batch in loader])
            wrong = [given.is_wrong[image.numpy().tobytes()] for image in images]
    return {
        every: {
            "classes": spearman(classes[every], classes[1]),
            "samples": spearman(samples[every], samples[1]),
            "auroc": float(roc_auc_score(wrong, -samples[every])),
        }
        for every in EVERY
    }


def table(found: Mapping[int, Mapping[int, Mapping[str, float]]]) -> str:
    """Of what was measured by seed."""
    rows = [["", "classes, with every=1", "samples, with every=1", "AUROC of wrong labels", "minus every=1"]]
    for every in EVERY:
        of = {name: {seed: each[every][name] for seed, each in found.items()} for name in found[0][every]}
        cells = [f"{statistics.mean(of[name].values()):.{digits}f}" for name, digits in COLUMNS.items()]
        difference = paired(of["auroc"], {seed: each[1]["auroc"] for seed, each in found.items()})
        interval = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
        rows.append([f"`every={every}`", *cells, interval if every > 1 else ""])
    return grid(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    be_quiet()
    print(table({seed: measured(seed) for seed in range(seeds)}))


if __name__ == "__main__":
    main()
