"""Four hospitals with a table of measurements, one of which has got its diagnoses wrong.

    python examples/hospitals.py --rounds 15

The table is scikit-learn's breast cancer data (569 tumours, 30 measurements, no download), dealt to four hospitals. In
Quito a third of the diagnoses are wrong. Every round the Shapley value of each hospital in the game "by how much does
its update lower the validation loss" is found exactly, from all 16 coalitions; their sum over the rounds is what a
hospital has contributed. A few seconds.
"""

from __future__ import annotations

import argparse
from functools import partial

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.data import ClosedSetLabelNoise, SizePartitioner
from flsv.metrics import CumulativeShapley

HOSPITALS = {"Boston": 4, "Lyon": 2, "Osaka": 1, "Quito": 2}  # relative sizes


def table() -> tuple[TensorDataset, TensorDataset]:
    """Training and test data, measurements scaled by the training data's ranges."""
    x, y = load_breast_cancer(return_X_y=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(x, dtype=torch.float32)[order], torch.tensor(y)[order]
    low, high = x[:455].amin(0), x[:455].amax(0)
    x = (x - low) / (high - low)
    return TensorDataset(x[:455], y[:455]), TensorDataset(x[455:], y[455:])


def main(rounds: int) -> dict[str, float]:
    L.seed_everything(0)
    data = FederatedDataModule(
        table(),
        SizePartitioner(list(HOSPITALS.values())),
        batch_size=16,
        server_val_fraction=0.2,
        corruptions=[ClosedSetLabelNoise(rate=1 / 3, clients=[list(HOSPITALS).index("Quito")])],
    )
    module = ClassifierClient("mlp", {"hidden": [16]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    loop = FederatedLoop(metrics={"value": CumulativeShapley(performance="negative_loss")})
    trainer = L.Trainer(max_epochs=rounds, callbacks=[loop], default_root_dir="runs/hospitals", accelerator="cpu")
    trainer.fit(module, data)

    values = dict(zip(HOSPITALS, loop.metrics["value"].compute().tolist()))
    for name, value in sorted(values.items(), key=lambda item: -item[1]):
        print(f"{name:8} {value:+.3f} nats of validation loss")
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
