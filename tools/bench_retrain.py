"""What the exact values by retraining cost, in fits.

    python tools/bench_retrain.py [--clients 5 6 8] [--networks mlp lenet batch_norm] [--seeds 2]

FedAvg on scikit-learn's digits (8x8; for LeNet in 28x28; for fastText 64 words of 1 to 17), 15 rounds of batches of 16,
SGD. Processor time of this process, one thread: a plain fit of all clients without metrics, and all 2^n coalitions of
so many seeds, trained side by side as ``flsv retrain`` does it. The first seed's coalition of all is trained in both
ways and compared, which is in the time.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import Loader, SizePartitioner, Splits
from flsv.functional import exact_shapley
from flsv.games.retraining import RetrainedUtility
from flsv.loop.side_by_side import SideBySideUtility
from flsv.models import FastText
from flsv.sampling import FixedCohort

ROUNDS, BATCH, SPLITS = 15, 16, Splits(server_val=0.2, seed=0)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def lenet() -> nn.Module:
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(nn.Upsample(28), *first, *last)


class Words(nn.Module):
    """A pixel's place and shade as a hashed word."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shades = (16 * images.flatten(1)).long()
        return shades + 17 * torch.arange(64, device=images.device) + 1


def fast_text() -> nn.Module:
    return nn.Sequential(Words(), FastText(10, (64,), buckets=64 * 17, width=16))


NETWORKS = {"mlp": mlp, "batch_norm": batch_norm, "fast_text": fast_text, "lenet": lenet}


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y))


def game(network: str, clients: int, seed: int, folder: str) -> RetrainedUtility:
    torch.manual_seed(seed)
    sizes = SizePartitioner([1 + i / clients for i in range(clients)], seed=0)
    data = FederatedDataModule(digits(), sizes, batch_size=BATCH, splits=SPLITS, loader=Loader(drop_last=True))
    module = ClassifierClient(NETWORKS[network](), optimizer=partial(torch.optim.SGD, lr=0.1))

    def trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(sampler=cohort, seed=seed, reporting=Reporting(table=False, files=False))
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "num_sanity_val_steps": 0, "limit_val_batches": 0}
        return L.Trainer(max_epochs=ROUNDS, accelerator="cpu", default_root_dir=folder, callbacks=[loop], **quiet)

    return RetrainedUtility(trainer, module, data, max_clients=20)


def fit(network: str, clients: int, folder: str) -> None:
    game(network, clients, 0, folder)(torch.ones(1, clients, dtype=torch.bool))


def values(network: str, clients: int, seeds: int, folder: str) -> None:
    for seed in range(seeds):
        exact_shapley(SideBySideUtility(game(network, clients, seed, folder), seed, compare=not seed), clients)


def seconds(work: Any) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 6, 8])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print("| network | clients | coalitions x seeds | a fit, s | all coalitions, s | fits |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for network in options.networks:
            for n in options.clients:
                fit(network, n, folder)  # what is made once
                plain = min(seconds(partial(fit, network, n, folder)) for _ in range(3))
                took = seconds(partial(values, network, n, options.seeds, folder))
                cells = network, n, f"{2**n} x {options.seeds}", f"{plain:.2f}", f"{took:.2f}", f"{took / plain:.1f}"
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
