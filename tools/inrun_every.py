"""In-run data Shapley that looks at some steps only: what is lost of the values where ``every`` saves time.

    python tools/inrun_every.py [--root DATA] [--seeds 5]

Clients' values: rank correlation with the truth in those tuning federations of ``flsv bench`` whose samples have
classes and whose clients train by SGD. Samples' values: digits of six clients, a fifth of all labels wrong, 20 rounds;
the AUROC with which a sample's value tells that its label is wrong, and the rank correlation with the values of
``every=1``. Differences are from ``every=1``, by pairs: of federations (means over seeds), and of seeds. What it costs:
``bench_inrun.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence

import lightning as L
import torch
from common import be_quiet, grid, quiet_trainer
from sklearn.metrics import roc_auc_score
from table_statistics import Values, paired
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.benchmark import truth_table
from flsv.benchmark.federation import federations
from flsv.benchmark.registry import METRICS
from flsv.benchmark.run import run
from flsv.benchmark.scores import spearman
from flsv.clients.algorithms import InRunValues
from flsv.data import DirichletPartitioner
from flsv.data.sets.digits import digits
from flsv.metrics import InRunShapley

EVERY = (1, 2, 4, 8)
CLIENTS, ROUNDS, WRONG, VALIDATION = 6, 20, 0.2, 200
ByEvery = dict[int, dict[int, float]]


class MislabelledDigits(L.LightningDataModule):
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


def of_clients(root: str | None, seeds: Sequence[int]) -> tuple[list[str], ByEvery]:
    """Federations, and by ``every`` the mean rank correlation of clients' values with the truth in each."""
    names: list[str] = []
    found: ByEvery = {every: {} for every in EVERY}
    for each in federations(["tuning"], root, print):
        if each.circles or not each.classifies:
            continue
        truth = truth_table(each).mean
        for every, ranks in found.items():
            # With the metric's own client side first: who refuses that (Adam) is left out, and is no fault of the run.
            options = {"client_algorithm": InRunValues(every)} if every > 1 else None
            runs = [run(each, {"in_run": METRICS["in_run"]}, seed, options=options) for seed in seeds]
            if runs[0].refused:
                break
            ranks[len(names)] = statistics.mean(spearman(one.values["in_run"], truth) for one in runs)
        else:
            names.append(each.name)
    return names, found


def of_samples(seed: int) -> dict[int, tuple[float, float]]:
    """By ``every``: the AUROC of wrong labels by samples' values, and their rank correlation with those of every=1."""
    given = MislabelledDigits(seed)
    wrong: list[bool] = []
    values: dict[int, Tensor] = {}
    for every in EVERY:
        data = FederatedDataModule(
            given, DirichletPartitioner(CLIENTS, alpha=1.0, min_samples=60, seed=seed), seed=seed
        )
        loop = FederatedLoop(
            metrics={"in_run": InRunShapley()},
            client_algorithm=InRunValues(every),
            seed=seed,
            figures_every=0,
            print_table=False,
        )
        torch.manual_seed(seed)
        module = ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), network_args={"hidden": [64]})
        with tempfile.TemporaryDirectory() as folder:
            quiet_trainer(folder, ROUNDS, [loop]).fit(module, data)
        kept = loop.state_dict()["clients"]
        values[every] = torch.cat([kept[client]["in_run_values"] for client in range(CLIENTS)])
        if not wrong:
            loaders = [data.client_loader(client, "train", shuffle=False) for client in range(CLIENTS)]
            images = torch.cat([batch[0] for loader in loaders for batch in loader])
            wrong = [given.is_wrong[image.numpy().tobytes()] for image in images]
    return {every: (float(roc_auc_score(wrong, -found)), spearman(found, values[1])) for every, found in values.items()}


def table(names: Sequence[str], clients: ByEvery, aurocs: ByEvery, ranks: ByEvery) -> str:
    head = [f"clients' rank correlation with the truth, {len(names)} federations", "minus every=1", "the least"]
    rows = [["", *head, "AUROC of wrong labels", "minus every=1", "samples' rank correlation with every=1"]]
    for every in EVERY:
        cells = [f"`every={every}`", _mean(clients[every]), _minus(clients, every)]
        cells += [f"{min(clients[every].values()):.2f}", _mean(aurocs[every], 3), _minus(aurocs, every, 3)]
        rows.append([*cells, _mean(ranks[every])])
    return grid(rows)


def _mean(values: Values, digits: int = 2) -> str:
    return f"{statistics.mean(values.values()):.{digits}f}"


def _minus(found: ByEvery, every: int, digits: int = 2) -> str:
    if every == 1:
        return ""
    difference = paired(found[every], found[1])
    return f"{difference.mean:+.{digits}f} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=None, help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    be_quiet()
    seeds = range(asked.seeds)
    single = {seed: of_samples(seed) for seed in seeds}
    aurocs, ranks = ({e: {s: single[s][e][part] for s in seeds} for e in EVERY} for part in (0, 1))
    print(table(*of_clients(asked.root, seeds), aurocs, ranks))


if __name__ == "__main__":
    main()
