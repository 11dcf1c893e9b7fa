"""A proxy game's values beside those of retrained coalitions, on twelve federations made after its rules were chosen.

    python tools/studies/proxy.py train [NAME...] [--folder runs/proxy]
    python tools/studies/proxy.py table [NAME...] [--folder runs/proxy]
    python tools/studies/proxy.py lies [NAME...]
    python tools/studies/proxy.py many

`train` fits every federation by a FederatedLoop with all coalitions (`fresh_payments.play`): seed 0 is the run, seeds
100 to 102 are the truth; it goes on where it was stopped. `table` fits seed 0 with each cheap metric alone, in turns
with fits without, keeps values and processor times, and compares all with the truth. `lies` says what a client
gains by false statistics. `many` looks at the benchmark's federations of 8 to 20 clients, whose coalitions are trained:
each seed of the truth is once the run. Of four federations a backbone is most of the work: a small ResNet or ViT of
timm, trained before on the five classes that the federation does not have.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import timm
import torch
from common import be_quiet, grid
from fresh_federations import Fresh, classifier, dealt, images, made, own, spoilt
from fresh_payments import coalitions_of, fit, play, truth_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation, federation, truth_table
from flsv.benchmark.federation import quiet
from flsv.benchmark.scores import share_error, shares, spearman
from flsv.benchmark.truth import FOLDER, MOST_CLIENTS
from flsv.core import LocalData, opened
from flsv.data import load_image_data
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.enumeration import all_coalitions, shapley_of_table
from flsv.games.members import Members, members_of
from flsv.games.proxy_game import ProxyGame, linear_statistics
from flsv.metrics import BlendedContribution, GradientAgreement, ProxyShapley
from flsv.utilities.csv_files import parse_float, parse_int, read_rows
from flsv.utilities.result_file import read_members
from flsv.utilities.seeding import isolated_rngs

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


def new(*parts: Any, **more: Any) -> Fresh:
    return Fresh(made(*parts, **more))


def backbone(name: str, title: str, net: str, of: str, clients: int, partitioner: Any, *corruptions: Any) -> Fresh:
    source = {"class_path": "proxy.OtherClasses", "init_args": {"name": of, "samples": 100 * clients}}
    data = {"source": source, "partitioner": partitioner, "corruptions": [*corruptions], "batch_size": 16}
    return new(name, title, 8, data, classifier(own("proxy.Backbone", name=net, of=of), "SGD", 0.02, momentum=0.9))


def few(
    source: Any, partitioner: Any, batch_size: int, corruptions: Sequence[Any] = (), **splits: int
) -> dict[str, Any]:
    data = {"source": source, "partitioner": partitioner, "batch_size": batch_size, "splits": {"seed": 9, **splits}}
    return {**data, "corruptions": [*corruptions]}


def catalogue() -> dict[str, Fresh]:
    """Made after the rules of the proxy game were chosen."""
    noise, dirichlet, sizes = "ClosedSetLabelNoise", partial(dealt, "Dirichlet"), partial(dealt, "Size")
    built_in, mlp = "flsv.benchmark.built_in.BuiltInData", classifier("mlp", "SGD", 0.05, momentum=0.9)
    pooled, cnn = own("fresh_federations.Pooled"), own("proxy.SmallCNN")
    digits = own(built_in, name="digits", merge=7, keep=[1.0, 0.7, 0.5, 0.4], val_fraction=0.4)
    patients = own(built_in, name="diabetes", val_fraction=0.4)
    columns = {"exclude": ["woman", "district"], "categorical": ["livch"]}
    women = {"path": "tables/contraception.csv", "target": "use", "val_fraction": 0.4, "columns": columns}
    regressor = own("flsv.models.RegressorClient", optimizer=own("torch.optim.SGD", lr=0.01))
    copies = own("flsv.benchmark.Duplicates", unique=0.2, clients=[1, 4], seed=93)
    balanced, loss = {"performance": "balanced_accuracy"}, {"performance": "val_loss", "mode": "min"}

    table = few(
        own("flsv.data.TableData", **women),
        sizes(5, 95, proportions=[1, 2, 2, 4, 6]),
        16,
        [spoilt(noise, [3], rate=0.5)],
        max_samples=900,
    )
    numbers = few(patients, sizes(5, 96, proportions=[3, 1, 2, 2, 4]), 10, [spoilt("GaussianNoise", [4], std=1.0)])
    lungs = few("pneumoniamnist.npz", dirichlet(4, 97, alpha=0.5), 16, max_samples=1200)
    first = images("digits", 5, 120, sizes(5, 91, proportions=[1, 2, 2, 3, 4]), [spoilt(noise, [4], rate=0.5)])
    labels = images("fashion_mnist", 6, 100, dirichlet(6, 92, alpha=0.3))
    copied = images("mnist", 5, 100, dirichlet(5, 93, alpha=1.0), [copies])
    colors = images("cifar10", 4, 150, dirichlet(4, 98, alpha=0.5), [spoilt("GaussianNoise", [2], std=1.5)])
    wrong, noisy = spoilt(noise, [3], rate=0.6), spoilt("GaussianNoise", [1], std=1.5)
    resnet, vit, fashion, cifar = "test_resnet", "test_vit", "fashion_mnist", "cifar10"
    slow = classifier("mlp", "SGD", 0.02, momentum=0.9)
    found = [
        new("momentum_5", "digits, 1 to 4 parts, wrong labels", 10, first, mlp),
        new("labels_6", "Fashion-MNIST, few classes a client", 10, labels, classifier(pooled, "SGD", 0.1)),
        new("copies_5", "MNIST, most samples of two are copies", 10, copied, classifier(pooled, "Adam", 0.005)),
        new(
            "rare_5",
            "digits, one common class",
            10,
            few(digits, dirichlet(5, 94, alpha=0.5), 10),
            classifier("mlp", "SGD", 0.1),
            **balanced,
        ),
        new("women_5", "contraception in Bangladesh, wrong labels", 12, table, mlp, needs=[women["path"]], **balanced),
        new("patients_5", "diabetes, noise", 12, numbers, regressor, **loss),
        new("lungs_4", "pneumonia, four clinics", 10, lungs, slow, needs=["pneumoniamnist.npz"], **balanced),
        new(
            "colors_4",
            "CIFAR-10, convolution, noise",
            10,
            colors,
            classifier(cnn, "SGD", 0.03, momentum=0.9),
            needs=["cifar-10-batches-py"],
        ),
        backbone("resnet_mnist_4", "MNIST", resnet, "mnist", 4, dirichlet(4, 101, alpha=0.5)),
        backbone(
            "vit_fashion_4",
            "Fashion-MNIST, wrong labels",
            vit,
            fashion,
            4,
            sizes(4, 102, proportions=[1, 2, 2, 3]),
            wrong,
        ),
        backbone("resnet_cifar_4", "CIFAR-10", resnet, cifar, 4, dirichlet(4, 103, alpha=0.3)),
        backbone("vit_cifar_5", "CIFAR-10, noise", vit, cifar, 5, dirichlet(5, 104, alpha=0.7), noisy),
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


def cheap(each: Fresh, path: Path) -> dict[str, Any]:
    """The run's values by metrics that train no coalition, and what they cost in fits, the least of some turns."""
    if path.exists():
        return torch.load(path)
    of = each.federation
    measure: dict[str, Any] = {"performance": of.performance, "mode": of.mode}
    ways = {
        "plain": lambda: {},
        "proxy": lambda: {"value": ProxyShapley(**measure)},
        "proxy, model": lambda: {"value": ProxyShapley(**measure, features="model")},
        "proxy, inputs": lambda: {"value": ProxyShapley(**measure, features="inputs")},
        "blended": lambda: {"value": BlendedContribution(**measure)},
    }
    found: dict[str, Any] = {"values": {}, "seconds": {}}
    for turn in range(3):  # the first one warms up, and a long fit is measured once
        if turn == 2 and min(found["seconds"]["plain"]) > 2:
            break
        for name, make in ways.items():
            metrics, began = make(), time.process_time()
            fit(each, RUN, metrics)
            spent = time.process_time() - began
            found["seconds"].setdefault(name, []).append(spent)
            for metric in metrics.values():
                found["values"][name] = metric.compute().as_subclass(Tensor).double()
    found["seconds"] = {name: min(spent[1:]) for name, spent in found["seconds"].items()}
    of.release()
    torch.save(found, path)
    return found


def estimates(run: dict[str, Tensor], found: dict[str, Any]) -> dict[str, Tensor]:
    """Values by all ways: cheap ones, retrained coalitions of one seed, and few of them."""
    values = dict(found["values"]) | {"shadow": few_coalitions_shapley(run["masks"], run["utilities"]).values}
    places = {tuple(mask): place for place, mask in enumerate(run["masks"].tolist())}
    for which in ("singles", "both"):
        some = few_coalitions(run["masks"].shape[1], which)
        own = run["utilities"][[places[tuple(mask)] for mask in some.tolist()]]
        values[which] = few_coalitions_shapley(some, own).values
    return values


def table(wanted: Sequence[Fresh], folder: Path) -> str:
    """Misallocation and rank correlation by federation, their means and paired differences, and the costs."""
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    lines = [["federation", "way", "misallocated, %", "rank", "costs, % of a fit"]]
    costs: dict[str, list[float]] = {}
    for each in wanted:
        name, of = each.federation.name, folder / each.federation.name
        truths = truth_of(each.federation, [torch.load(of / f"run_{seed}.pt") for seed in TRUTHS])
        found = cheap(each, of / "cheap.pt")
        by_way = estimates(torch.load(of / "run_0.pt"), found)
        plain = found["seconds"].pop("plain")
        for way, values in by_way.items():
            score = 100 * share_error(values, truths.mean(0)), spearman(values, truths.mean(0))
            scores.setdefault(way, {})[name] = score
            cost = 100 * (found["seconds"][way] / plain - 1) if way in found["seconds"] else float("nan")
            costs.setdefault(way, []).append(cost)
            lines.append([name, way, f"{score[0]:.1f}", f"{score[1]:.2f}", f"{cost:.0f}" if cost == cost else ""])
    head = [
        "way",
        "misallocated, %",
        "worst",
        "less than blended",
        "rank",
        "worst",
        "costs, % of a fit",
        "of",
    ]
    means = [head]
    for way, of_way in scores.items():
        errors, ranks = (torch.tensor(part) for part in zip(*of_way.values()))
        gain = torch.tensor([scores["blended"][name][0] for name in of_way]) - errors
        half = t_quantile(LEVEL, len(gain) - 1) * gain.std() / len(gain) ** 0.5
        spent = sorted(cost for cost in costs[way] if cost == cost)
        cells = f"{errors.mean():.1f}", f"{errors.max():.1f}", f"{gain.mean():+.1f} ± {half:.1f}", f"{ranks.mean():.2f}"
        cost = f"{spent[0]:.0f} to {spent[-1]:.0f}" if spent else ""
        means.append([way, *cells, f"{ranks.min():.2f}", cost, str(len(errors))])
    return grid(means) + "\n\n" + grid(lines)


class Liars(ProxyShapley):
    """Each client's share of the payment if it is honest, and if it alone lies, ``{lie: [n]}``."""

    def update(
        self,
        client_ids: Tensor,
        all_clients: Any,
        validation: Any,
        server_vector: Tensor,
        round_index: int = 0,
        generator: Any = None,
    ) -> None:
        super().update(client_ids, all_clients, validation, server_vector, round_index, generator)
        if round_index != self._last:
            return
        game = self._server(validation, server_vector).ask(all_clients, self._samples)
        honest = self._shares(game)
        self.lies: dict[str, Tensor] = {"honest": honest}
        for client in all_clients:
            x, y = client.ask(LocalData.samples)
            classes, draw = game.server.classes, torch.Generator().manual_seed(client.id)
            with torch.no_grad():
                known = validation.module(server_vector)(x).argmax(1)
            told = {"its statistics times five, but for the count": y, "the labels of the global model": known}
            told |= {"random labels": torch.randint(classes, y.shape, generator=draw)}
            for lie, labels in told.items():
                counts = labels.bincount()
                liar = LocalData("liar", partial(of_one_batch, (x, labels)), counts, counts, module=validation.module)
                with opened(liar):
                    sums = linear_statistics(liar, game.server.axes, server_vector, self.head, classes, "both")
                if labels is y:
                    sums = [(5 * gram, 5 * moments) for gram, moments in sums]
                    for gram, _ in sums:
                        gram[-1, -1] /= 5
                after = [tuple(part.clone() for part in of_kind) for of_kind in game.sums]
                for of_kind, of_liar in zip(after, sums):
                    for part, lied in zip(of_kind, of_liar):
                        part[client.id] = lied
                share = self._shares(ProxyGame(game.server, game.players, after))[client.id]  # type: ignore[arg-type]
                self.lies.setdefault(lie, torch.zeros_like(honest))[client.id] = share

    @staticmethod
    def _shares(game: ProxyGame) -> Tensor:
        return shares(shapley_of_table(game(all_coalitions(len(game.players)))[:, None])[:, 0])


def of_one_batch(batch: tuple[Tensor, Tensor], split: str) -> list[tuple[Tensor, Tensor]]:
    return [batch]


def lies(wanted: Sequence[Fresh]) -> str:
    """What a client gains that alone lies about its statistics, in points of the payment."""
    found: dict[str, list[Tensor]] = {}
    for each in wanted:
        if each.federation.performance != "val_loss":
            liars = Liars(performance=each.federation.performance)
            fit(each, RUN, {"value": liars})
            for lie, of_lie in liars.lies.items():
                found.setdefault(lie, []).append(100 * of_lie)
    honest = torch.cat(found["honest"])
    lines = [["lie", "honest share, %", "gain, points", "largest gain", "clients"]]
    for lie, parts in found.items():
        gain = torch.cat(parts) - honest
        cells = f"{honest.mean():.1f}", f"{gain.mean():+.1f}", f"{gain.max():+.1f}", str(len(gain))
        lines.append([lie, *cells])
    return grid(lines)


MANY = ("eight_clients", "nine_clients", "ten_clients", "digits_20_clients", "fashion_20_clients")


def of_one_fit(of: Federation, metrics: dict[str, Any]) -> dict[str, Tensor]:
    """Each metric's values of one fit of a federation of the benchmark."""
    loop = FederatedLoop(
        metrics=metrics,
        filters=[],
        uploads=[*of.attackers()],
        local_epochs=of.local_epochs,
        reporting=Reporting(table=False, figures=0, files=False),
        seed=RUN,
    )
    with isolated_rngs(RUN, "benchmark"), quiet():
        of.trainer(loop).fit(of.module(), of.datamodule())
    return {name: metric.compute().as_subclass(Tensor).double() for name, metric in metrics.items()}


def many() -> str:
    """Cheap values, and those of few coalitions, where there are more clients."""
    lines = [["federation", "coalitions", "way", "misallocated, %", "rank"]]
    for name in MANY:
        of = federation(name)
        truth, measure = truth_table(of), {"performance": of.performance, "mode": of.mode}
        n = truth.num_clients
        cheap = {
            "proxy": ProxyShapley(**measure),
            "blended": BlendedContribution(**measure),
            "gradients": GradientAgreement(),
        }
        values = of_one_fit(of, cheap)
        trained: dict[int, dict[Members, float]] = {}
        columns = {"seed": parse_int, "coalition": read_members, "utility": parse_float}
        for _, row in read_rows(FOLDER / f"{name}.csv", columns, skip=1):
            trained.setdefault(row["seed"], {})[row["coalition"]] = row["utility"]
        scores: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for place, seed in enumerate(truth.seeds):
            rest = torch.cat([truth.values[:place], truth.values[place + 1 :]]).mean(0)
            found = {("none", way): of_way for way, of_way in values.items()}
            for which in ("singles", "both", "auto") if n <= MOST_CLIENTS else ("singles", "both"):
                masks = few_coalitions(n, which)  # type: ignore[arg-type]
                own = torch.tensor([trained[seed][members] for members in members_of(masks)])
                found[which, "few"] = few_coalitions_shapley(masks, own).values
            for key, value in found.items():
                scores.setdefault(key, []).append((100 * share_error(value, rest), spearman(value, rest)))
        for (which, way), of_seeds in scores.items():
            errors, ranks = torch.tensor(of_seeds).T
            lines.append([name, which, way, f"{errors.mean():.1f}", f"{ranks.mean():.2f}"])
        of.release()
    return grid(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table", "lies", "many"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=Path("runs/proxy"))
    options = parser.parse_args()
    be_quiet()
    if options.what == "many":
        print(many())
        return
    known = catalogue()
    wanted = [known[name] for name in options.names or known]
    if options.what == "train":
        train(wanted, options.folder)
    elif options.what == "lies":
        print(lies(wanted))
    else:
        print(table(wanted, options.folder))


if __name__ == "__main__":
    main()
