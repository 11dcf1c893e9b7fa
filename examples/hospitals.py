"""Four hospitals train on measurements of tumours, and one of them has wrong diagnoses.

    python examples/hospitals.py --rounds 15

The table is scikit-learn's breast cancer data (569 tumours, 30 measurements, no download). In Quito a third of the
diagnoses are wrong. Each hospital is trained alone, too, and a hospital's Shapley value over all 16 coalitions
is how much it lowers the validation loss. A budget is shared by these values. The script takes a few seconds. It uses
one seed: before you pay, retrain with several (``flsv retrain``).
"""

from __future__ import annotations

import argparse
from functools import partial

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, allocate
from flsv.data import ClosedSetLabelNoise
from flsv.metrics import ShadowShapley

ROWS = {"Boston": 160, "Lyon": 80, "Osaka": 40, "Quito": 80}


def tables(seed: int = 0) -> tuple[dict[str, tuple], tuple, tuple]:
    """Every hospital's measurements and diagnoses, and the server's for validation and testing."""
    found = load_breast_cancer()
    order = np.random.default_rng(seed).permutation(len(found.target))
    x = (found.data - found.data.min(0)) / (
        found.data.max(0) - found.data.min(0)
    )  # ranges agreed on beforehand
    x, y = x[order].astype("float32"), found.target_names[found.target[order]]
    ends = np.cumsum(list(ROWS.values()))
    parts = [(x[end - rows : end], y[end - rows : end]) for end, rows in zip(ends, ROWS.values())]
    return dict(zip(ROWS, parts)), (x[360:455], y[360:455]), (x[455:], y[455:])


def main(rounds: int, seed: int) -> torch.Tensor:
    L.seed_everything(seed)
    hospitals, val, test = tables(seed)
    wrong = ClosedSetLabelNoise(rate=1 / 3, clients=[list(hospitals).index("Quito")])
    data = FederatedDataModule(
        clients=hospitals, val=val, test=test, batch_size=16, corruptions=[wrong]
    )
    module = ClassifierClient("mlp", {"hidden": [16]}, optimizer=partial(torch.optim.SGD, lr=0.5))
    loop = FederatedLoop(metrics={"value": ShadowShapley(performance="negative_loss")})
    trainer = L.Trainer(
        max_epochs=rounds, callbacks=[loop], default_root_dir="runs/hospitals", accelerator="cpu"
    )
    trainer.fit(module, data)

    values = loop.contributions["value"]
    euros = allocate(values, budget=10_000, negatives="zero", unit=0.01)
    for name, value, share in zip(data.client_names, values.tolist(), euros.tolist()):
        print(f"{name:8} {value:+.3f} nats of validation loss {share:10.2f} euros")
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    main(options.rounds, options.seed)
