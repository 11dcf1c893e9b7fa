"""Five photographers train a network of timm on digits: who contributes which digit?

    python examples/vision_timm.py --rounds 5

The images are scikit-learn's digits (no download), made 32 x 32; the network is one of timm's by name, trained from
scratch. Class-specific Shapley values (ShapFed) measure, per client and digit, how far its update points the same way
as the joint update; the next model weighs clients by them. The script takes about half a minute on two cores.
"""

from __future__ import annotations

import argparse
from functools import partial

import lightning as L
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import ShapFedWA
from flsv.data import DirichletPartitioner, load_image_data
from flsv.metrics import ClassSpecificShapley


def larger(images: TensorDataset) -> TensorDataset:
    """The same images, 32 x 32."""
    pixels, labels = images.tensors
    return TensorDataset(interpolate(pixels, size=(32, 32), mode="bilinear"), labels)


def main(rounds: int, network: str) -> FederatedLoop:
    L.seed_everything(0)
    digits = load_image_data("digits")
    data = FederatedDataModule(
        (larger(digits.train), larger(digits.test)),
        DirichletPartitioner(num_clients=5, alpha=0.5, min_samples=40, seed=1),
        batch_size=32,
    )
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    module = ClassifierClient(f"timm:{network}", optimizer=optimizer)
    loop = FederatedLoop(aggregator=ShapFedWA("cssv"), metrics={"cssv": ClassSpecificShapley()})
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[loop],
        default_root_dir="runs/vision",
        accelerator="auto",
        devices=1,
    )
    trainer.fit(module, data)
    trainer.test(module, data)

    values = loop.metrics["cssv"].compute()  # [5 clients, 10 classes]
    for digit in range(values.shape[1]):
        best = int(values[:, digit].argmax())
        print(
            f"digit {digit}: client {best} pulls most where the federation goes ({values[best, digit]:.2f})"
        )
    return loop


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", default="resnet10t", help="any name of timm.list_models()")
    options = parser.parse_args()
    main(options.rounds, options.network)
