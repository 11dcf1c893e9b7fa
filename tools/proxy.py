"""What a proxy game's values are worth beside those of retrained coalitions, on twelve federations made after its rules.

    python tools/proxy.py train [NAME...] [--folder runs/proxy]
    python tools/proxy.py table [NAME...] [--folder runs/proxy]

`train` fits every federation by a FederatedLoop with all coalitions (`fresh_payments.play`): seed 0 is the run, seeds
100 to 102 are the truth; it also fits seed 0 with each cheap metric alone, in turn with fits without metrics, and keeps
values and processor times. It goes on where it was stopped. `table` is arithmetic on that. Of four federations a
backbone is most of the work: a small ResNet or ViT of timm, trained before on the five classes that the federation does
not have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import timm
import torch
from common import be_quiet
from fresh_federations import Fresh, classifier, dealt, images, made, own, spoilt
from fresh_payments import coalitions_of, play
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv.data import load_image_data

RUN, TRUTHS, LEVEL = 0, (100, 101, 102), 0.9
BEFORE, AFTER = range(5), range(5, 10)
WEIGHTS = Path("runs/proxy/weights")


def of_classes(name: str, classes: range, samples: int) -> TensorDataset:
    """Images of some classes, which are renumbered from 0."""
    source = load_image_data(name).train
    x, y = source[torch.randperm(len(source), generator=torch.Generator().manual_seed(5))[: 4 * samples].tolist()]
    kept = (y >= classes.start) & (y < classes.stop)
    return TensorDataset(x[kept][:samples], y[kept][:samples] - classes.start)


class OtherClasses(L.LightningDataModule):
    """The classes on which a backbone was not trained."""

    def __init__(self, name: str, samples: int, val: int = 400) -> None:
        super().__init__()
        x, y = of_classes(name, AFTER, samples + val).tensors
        self.train_set, self.val_set = TensorDataset(x[val:], y[val:]), TensorDataset(x[:val], y[:val])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=16, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=400)


class Backbone(nn.Module):
    """A network of timm, trained on the first five classes, with a new head for the others."""

    def __init__(self, name: str, of: str) -> None:
        super().__init__()
        color = of == "cifar10"
        size = {"img_size": 32 if color else 28, "patch_size": 8 if color else 7} if "vit" in name else {}
        options = {"in_chans": 3 if color else 1, "num_classes": len(AFTER), **size}
        self.net = timm.create_model(name, **options)
        path = WEIGHTS / f"{name}_{of}.pt"
        if not path.exists():
            trained = pretrained(timm.create_model(name, **options), of)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(trained, path)
        head = self.net.get_classifier()
        fresh = {name: value.clone() for name, value in head.state_dict().items()}
        self.net.load_state_dict(torch.load(path))
        head.load_state_dict(fresh)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def pretrained(net: nn.Module, of: str, epochs: int = 4) -> dict[str, Tensor]:
    """Weights after some epochs of the first five classes."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    draw = torch.Generator().manual_seed(3)
    for _ in range(epochs):
        for x, y in DataLoader(of_classes(of, BEFORE, 4000), batch_size=32, shuffle=True, generator=draw):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.state_dict()


class SmallCNN(nn.Sequential):
    """A convolution for images of 32 x 32 pixels in color."""

    def __init__(self) -> None:
        layers = nn.AvgPool2d(2), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 24)
        super().__init__(*layers, nn.ReLU(), nn.Linear(24, 10))


def backbone(name: str, title: str, net: str, of: str, clients: int, partitioner: Any, *corruptions: Any) -> Fresh:
    source = {"class_path": "proxy.OtherClasses", "init_args": {"name": of, "samples": 100 * clients}}
    data = {"source": source, "partitioner": partitioner, "corruptions": [*corruptions], "batch_size": 16}
    model = classifier(own("proxy.Backbone", name=net, of=of), "SGD", 0.02, momentum=0.9)
    return Fresh(made(name, title, 8, data, model))


def catalogue() -> dict[str, Fresh]:
    """Made after the rules of the proxy game were chosen."""
    noise = "ClosedSetLabelNoise"
    builtin: dict[str, Any] = {"class_path": "flsv.benchmark.built_in.BuiltInData"}
    digits = {**builtin, "init_args": {"name": "digits", "merge": 7, "keep": [1.0, 0.7, 0.5, 0.4], "val_fraction": 0.4}}
    patients = {**builtin, "init_args": {"name": "diabetes", "val_fraction": 0.4}}
    regressor = {
        "class_path": "flsv.models.RegressorClient",
        "init_args": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}}},
    }
    copies = {"class_path": "flsv.benchmark.Duplicates", "init_args": {"unique": 0.2, "clients": [1, 4], "seed": 93}}
    table = {
        "source": {
            "class_path": "flsv.data.TableData",
            "init_args": {
                "path": "tables/contraception.csv",
                "target": "use",
                "val_fraction": 0.4,
                "columns": {"exclude": ["woman", "district"], "categorical": ["livch"]},
            },
        },
        "splits": {"max_samples": 900, "seed": 9},
        "partitioner": dealt("Size", 5, 95, proportions=[1, 2, 2, 4, 6]),
        "corruptions": [spoilt(noise, [3], rate=0.5)],
        "batch_size": 16,
    }
    normed = {
        "source": digits,
        "partitioner": dealt("Dirichlet", 5, 94, alpha=0.5),
        "batch_size": 10,
        "splits": {"seed": 9},
    }
    numbers = {
        "source": patients,
        "splits": {"seed": 9},
        "partitioner": dealt("Size", 5, 96, proportions=[3, 1, 2, 2, 4]),
        "corruptions": [spoilt("GaussianNoise", [4], std=1.0)],
        "batch_size": 10,
    }
    clinics = {
        "source": "pneumoniamnist.npz",
        "splits": {"max_samples": 1200, "seed": 9},
        "partitioner": dealt("Dirichlet", 4, 97, alpha=0.5),
        "batch_size": 16,
    }
    pooled, sizes = own("fresh_federations.Pooled"), [1, 2, 2, 3, 4]
    found = [
        Fresh(
            made(
                "momentum_5",
                "digits, 1 to 4 parts, wrong labels",
                10,
                images("digits", 5, 120, dealt("Size", 5, 91, proportions=sizes), [spoilt(noise, [4], rate=0.5)]),
                classifier("mlp", "SGD", 0.05, momentum=0.9),
            )
        ),
        Fresh(
            made(
                "labels_6",
                "Fashion-MNIST, few classes a client",
                10,
                images("fashion_mnist", 6, 100, dealt("Dirichlet", 6, 92, alpha=0.3)),
                classifier(pooled, "SGD", 0.1),
            )
        ),
        Fresh(
            made(
                "copies_5",
                "MNIST, four fifths of two clients' samples are copies",
                10,
                images("mnist", 5, 100, dealt("Dirichlet", 5, 93, alpha=1.0), [copies]),
                classifier(pooled, "Adam", 0.005),
            )
        ),
        Fresh(
            made(
                "rare_5",
                "digits, one common class",
                10,
                normed,
                classifier("mlp", "SGD", 0.1),
                performance="balanced_accuracy",
            )
        ),
        Fresh(
            made(
                "women_5",
                "contraception in Bangladesh, wrong labels",
                12,
                table,
                classifier("mlp", "SGD", 0.05, momentum=0.9),
                performance="balanced_accuracy",
                needs=["tables/contraception.csv"],
            )
        ),
        Fresh(
            made("patients_5", "diabetes, noise", 12, numbers, regressor, performance="val_loss", mode="min"),
        ),
        Fresh(
            made(
                "lungs_4",
                "pneumonia, four clinics",
                10,
                clinics,
                classifier("mlp", "SGD", 0.02, momentum=0.9),
                performance="balanced_accuracy",
                needs=["pneumoniamnist.npz"],
            )
        ),
        Fresh(
            made(
                "colors_4",
                "CIFAR-10, a convolution, noise",
                10,
                images(
                    "cifar10", 4, 150, dealt("Dirichlet", 4, 98, alpha=0.5), [spoilt("GaussianNoise", [2], std=1.5)]
                ),
                classifier(own("proxy.SmallCNN"), "SGD", 0.03, momentum=0.9),
                needs=["cifar-10-batches-py"],
            )
        ),
        backbone("resnet_mnist_4", "MNIST", "test_resnet", "mnist", 4, dealt("Dirichlet", 4, 101, alpha=0.5)),
        backbone(
            "vit_fashion_4",
            "Fashion-MNIST, wrong labels",
            "test_vit",
            "fashion_mnist",
            4,
            dealt("Size", 4, 102, proportions=[1, 2, 2, 3]),
            spoilt(noise, [3], rate=0.6),
        ),
        backbone("resnet_cifar_4", "CIFAR-10", "test_resnet", "cifar10", 4, dealt("Dirichlet", 4, 103, alpha=0.3)),
        backbone(
            "vit_cifar_5",
            "CIFAR-10, noise",
            "test_vit",
            "cifar10",
            5,
            dealt("Dirichlet", 5, 104, alpha=0.7),
            spoilt("GaussianNoise", [1], std=1.5),
        ),
    ]
    return {each.federation.name: each for each in found}


def train(wanted: Sequence[Fresh], folder: Path) -> None:
    """Play all coalitions of the run and of the truth's seeds."""
    for seed in (RUN, *TRUTHS):
        for each in wanted:
            path, began = folder / each.federation.name / f"run_{seed}.pt", time.process_time()
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                torch.save(play(each, seed, coalitions_of(each.federation, seed)), path)
                print(f"{path.parent.name}: seed {seed}, {time.process_time() - began:.0f} s", flush=True)
            each.federation.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/proxy"))
    options = parser.parse_args()
    be_quiet()
    known = catalogue()
    wanted = [known[name] for name in options.names or known]
    if options.what == "train":
        train(wanted, options.folder)


if __name__ == "__main__":
    main()
