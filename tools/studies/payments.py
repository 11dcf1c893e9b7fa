"""How much of a payment goes to the wrong clients, by what a run or `flsv retrain` can know: seeds, initial weights,
rounds, the untrained models, coalitions.

    python tools/studies/payments.py train NAME... [--runs 3] [--weights 3] [--folder runs/payments]
    python tools/studies/payments.py table NAME...
    python tools/studies/payments.py seeds NAME...

NAME is one of `flsv bench`'s federations or of its sets, or of those that are drawn here: `drawn_12_0` is the first one
of twelve clients. `train` keeps the scores of every coalition's model after each of the last three rounds, by the seed
of the batches and that of the initial weights, and goes on where it was stopped; `table` is arithmetic on them. The
truth are other seeds. `seeds` compares, by the package's truths of five seeds, coalitions that all have one seed with
coalitions that are dealt one of three seeds each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet, grid
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation, federation, names, truth_table
from flsv.benchmark.federation import SETS, quiet
from flsv.benchmark.scores import nanmean, share_error, spearman
from flsv.benchmark.truth import SEEDS, arcs, sampled_truth
from flsv.core.parameter_space import ParameterSpace
from flsv.filters import OutlierFilter
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.functional.shapley.few_coalitions import CURVE_FROM
from flsv.functional.shapley.size_effects import size_effects_shapley
from flsv.games.members import members_of
from flsv.games.performance import performance_of
from flsv.retraining import coalition_rounds, side_by_side
from flsv.retraining.global_model_scoring import make_evaluator
from flsv.sampling import FixedCohort
from flsv.utilities.seeding import isolated_rngs

#: Rounds whose models are scored, untrained models, clients of whom all coalitions are trained.
ROUNDS, UNTRAINED, MOST = 3, 32, 10
#: The first seed of the truth.
TRUTH = 100
SIZES = {7: "4 to 7", 9: "8, 9", 12: "10 to 12", 99: "20"}
SCORES = ("accuracy", "balanced_accuracy", "negative_loss")


class Untrained(L.Callback):
    """Keeps the weights and the scores of the model that a fit would start from."""

    def __init__(self, measured: Any) -> None:
        self.measured = measured

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop, trainer.fit_loop.min_epochs = True, 0
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        space = ParameterSpace(pl_module)
        self.scores = self.measured(trainer, space, space.read(pl_module)[None])


def measure_of(each: Federation) -> Any:
    """Evaluates models, float64 ``[K, scores]``: more is better."""
    measure = each.performance if each.performance in SCORES else performance_of("", each.performance, each.mode)

    def measured(trainer: L.Trainer, space: ParameterSpace, models: Tensor) -> Tensor:
        scores = make_evaluator(trainer, space, each.datamodule(), measure)(models)
        if isinstance(measure, str):
            return torch.stack([scores.value(name) for name in (measure, *(s for s in SCORES if s != measure))], 1)
        return measure.utility(scores.values[measure.name])[:, None]

    return measured


def untrained(each: Federation, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """The initial weights of a seed, and their scores."""
    own = Untrained(measure_of(each))
    with isolated_rngs(seed, "benchmark"), quiet():
        loop = FederatedLoop(seed=seed, reporting=Reporting(table=False, figures=0, files=False))
        trainer = each.trainer(loop)
        trainer.callbacks.insert(0, own)  # type: ignore[attr-defined]
        trainer.fit(each.module(), each.datamodule())
    return own.weights, own.scores[0]


@contextmanager
def recorded(last: int, rounds: int) -> Iterator[list[Tensor]]:
    """The models after each of the last rounds of coalitions that are trained within."""
    kept: list[Tensor] = []
    make = coalition_rounds.servers_of

    def servers_of(*args: Any, **more: Any) -> Any:
        servers, done = make(*args, **more), 0
        end = servers.end_round

        def end_round(*args: Any, **more: Any) -> Tensor:
            nonlocal done
            models, done = end(*args, **more), done + 1
            if done > rounds - last:
                kept.append(models[len(side_by_side.CHECKED) :].clone())
            return models

        servers.end_round = end_round
        return servers

    coalition_rounds.servers_of = servers_of
    try:
        yield kept
    finally:
        coalition_rounds.servers_of = make


def train(each: Federation, masks: Tensor, seed: int, weights: dict[str, Tensor], last: int = ROUNDS) -> Tensor:
    """Scores ``[rounds, K, scores]`` of coalitions that start from these weights, on the batches of this seed."""
    found: list[Tensor] = []
    measured = measure_of(each)
    loop = FederatedLoop(
        sampler=FixedCohort(range(masks.shape[1])),
        uploads=[*each.attackers()],
        filters=[OutlierFilter(threshold=None)],
        local_epochs=each.local_epochs,
        seed=seed,
        reporting=Reporting(table=False, figures=0, files=False),
    )
    with isolated_rngs(seed, "benchmark"), quiet(), recorded(last, each.rounds) as models:

        def scored(trainer: L.Trainer, space: ParameterSpace, _: Tensor) -> None:
            found.extend(measured(trainer, space, of_round) for of_round in models)

        training = side_by_side.CoalitionTraining(loop, masks, seed, weights, scored)
        trainer = each.trainer(training)
        trainer.fit(each.module(), each.datamodule())
    return torch.stack(found)


def drawn(name: str) -> Federation:
    """A federation of so many clients, made of what is common: ``drawn_<clients>_<number>``."""
    clients, number = map(int, name.removeprefix("drawn_").split("_"))
    draw = torch.Generator().manual_seed(1000 * clients + number)

    def one(options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=draw))]

    source = ("digits", "fashion_mnist", "mnist")[number % 3]
    images = source != "digits"
    splits = {"max_samples": 120 * clients, "server_val": 0.4, "seed": number} if images else {"server_val": 0.35}
    sizes = [one((1, 1, 2, 2, 3, 4)) for _ in range(clients)]
    partitioner = one(
        (
            {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": sizes, "seed": number}},
            {
                "class_path": "flsv.data.DirichletPartitioner",
                "init_args": {"num_clients": clients, "alpha": 0.5, "min_samples": 12, "seed": number},
            },
            {
                "class_path": "flsv.data.DirichletPartitioner",
                "init_args": {"num_clients": clients, "alpha": 0.2, "min_samples": 12, "seed": number},
            },
        )
    )
    order = torch.randperm(clients, generator=draw).tolist()
    corruptions = [
        {
            "class_path": "flsv.data.ClosedSetLabelNoise",
            "init_args": {"rate": one((0.4, 0.7)), "to": "random", "clients": order[: clients // 5]},
        },
        {
            "class_path": "flsv.data.GaussianNoise",
            "init_args": {"std": one((1.0, 2.0)), "clients": order[clients // 5 : clients // 3]},
        },
    ]
    optimizer = one(
        (
            {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02, "momentum": 0.9}},
            {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.005}},
        )
    )
    return Federation(
        name=name,
        title=f"{source}, {clients} clients",
        set="tuning" if number < 1000 else "fresh",
        rounds=8,
        data={
            "source": source,
            "splits": splits,
            "partitioner": partitioner,
            "corruptions": one(([], corruptions[:1], corruptions[1:], corruptions)),
            "batch_size": 10,
        },
        model={
            "class_path": "flsv.ClassifierClient",
            "init_args": {"network": "mlp", "network_args": {"hidden": [32]}, "optimizer": optimizer},
        },
        circles=0 if clients <= MOST else max(2, 96 // clients - 2),
        needs=[{"mnist": "MNIST/raw", "fashion_mnist": "FashionMNIST/raw"}[source]] if images else [],
    )


def masks_of(each: Federation, seed: int) -> Tensor:
    """The coalitions that are trained with a seed: all of them, or what few coalitions need and, for the truth, those
    of circles."""
    clients = len(each.num_samples)
    if clients <= MOST:
        return all_coalitions(clients)
    if seed >= TRUTH:
        return arcs(clients, seed, each.circles)
    pairs = few_coalitions(clients, "pairs+leave-one-out")
    return torch.tensor([*dict.fromkeys(tuple(mask) for mask in torch.cat([pairs, ~pairs]).tolist())])


def train_all(each: Federation, folder: Path, runs: int, weights: int, truths: int) -> None:
    """All seeds' coalitions of a federation: those of runs, with some initial weights each, and those of the truth."""
    folder = folder / each.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "untrained.pt"
    known = [*torch.load(path)] if path.exists() else []
    if len(known) < 2 * UNTRAINED:  # half of them are the truth's
        more = [untrained(each, 5000 + seed)[1] for seed in range(len(known), 2 * UNTRAINED)]
        torch.save(torch.stack([*known, *more]), path)
    wanted = [(run, run + 1000 * which) for run in range(runs) for which in range(weights)]
    first = TRUTH if each.name.startswith("drawn_") else TRUTH + len(SEEDS)  # the package has those before
    for batches, initial in [*wanted, *((seed, seed) for seed in range(first, first + truths))]:
        path = folder / f"{batches}_{initial}.pt"
        if path.exists():
            continue
        masks = masks_of(each, batches)
        scores = train(each, masks, batches, untrained(each, initial)[0])
        torch.save({"masks": masks, "scores": scores}, path)
        print(f"{each.name}: batches {batches}, weights {initial}: {len(masks)} coalitions", flush=True)
    each.release()


def truth_of(each: Federation, scores: dict[tuple[int, int], Any], nobody: Tensor) -> Tensor:
    """The mean over other seeds, with that of all untrained models for U(nobody)."""
    seeds = {b: of for (b, w), of in scores.items() if b >= TRUTH}
    found, starts = [], []
    if not each.name.startswith("drawn_"):
        table = truth_table(each)
        found, starts = [*table.values], [] if table.utilities is None else table.utilities[:, 0].tolist()
    for seed, kept in seeds.items():
        masks, utilities = kept["masks"], kept["scores"][-1, :, 0]
        starts.append(float(utilities[~masks.any(1)]))
        if len(masks) == 2 ** masks.shape[1]:
            found.append(few_coalitions_shapley(masks, utilities).values)
        else:
            known = {seed: dict(zip(members_of(masks), utilities.tolist()))}
            found.append(sampled_truth(known, masks.shape[1], each.circles).mean)
    values = torch.stack(found).mean(0)
    return values + (nanmean(starts) - nanmean([*starts, *nobody.tolist()])) / len(values) if starts else values


def ways(scores: dict[tuple[int, int], Any], run: int, nobody: float) -> Iterator[tuple[str, Tensor, Tensor]]:
    """What is measured of one run, or by three seeds: its name, coalitions and their utilities."""
    masks = scores[run, run]["masks"]
    weights = torch.stack([of["scores"][..., 0] for (b, w), of in scores.items() if b == run])
    seeds = torch.stack([of["scores"][..., 0] for (b, w), of in scores.items() if b == w < TRUTH])
    own, empty = scores[run, run]["scores"][..., 0], ~masks.any(1)
    found = {"one run": own[-1], "its last three rounds": own.mean(0)}
    found |= {"three initial weights": weights[:, -1].mean(0)} if len(weights) == 3 else {}
    found |= {"three seeds": seeds[:, -1].mean(0)} if len(seeds) == 3 else {}
    for name, utilities in found.items():
        yield name, masks, utilities
        yield f"{name}, U(nobody) of {UNTRAINED}", masks, torch.where(empty, nobody, utilities)


def values_by(masks: Tensor, utilities: Tensor) -> dict[str, Tensor]:
    """By all coalitions, and by few of more than seven clients: the process, the curve, and both."""
    n, found = masks.shape[1], {}
    if len(masks) == 2**n:
        found["all"] = few_coalitions_shapley(masks, utilities).values
    places = {tuple(mask): place for place, mask in enumerate(masks.tolist())}
    for which in ("pairs+leave-one-out", "pairs+leave-two-out") if n > 7 else ():
        some = few_coalitions(n, which)  # type: ignore[arg-type]
        game = utilities[[places[tuple(mask)] for mask in some.tolist()]]
        curve = size_effects_shapley(some, game[:, None])
        assert curve is not None
        both = few_coalitions_shapley(some, game).values
        process = both if n < CURVE_FROM else 2 * both - curve[:, 0]
        parts = {"process": process, "curve": curve[:, 0], "both": (process + curve[:, 0]) / 2}
        found |= {f"{which}, {name}": values for name, values in parts.items()}
    return found


def table(federations: list[Federation], folder: Path) -> str:
    """Misallocation and rank correlation of each way, means over the federations of so many clients."""
    rows: dict[tuple[str, str, str], dict[str, list[tuple[float, float]]]] = {}
    for each in federations:
        scores = {}
        for path in sorted((folder / each.name).glob("*_*.pt")):
            batches, weights = map(int, path.stem.split("_"))
            scores[batches, weights] = torch.load(path)
        runs = [run for run in range(TRUTH) if (run, run) in scores]
        if not runs:
            continue
        nobody = torch.load(folder / each.name / "untrained.pt")[:, 0]
        truth = truth_of(each, scores, nobody)
        size = next(name for most, name in SIZES.items() if len(truth) <= most)
        for run in runs:
            for way, masks, utilities in ways(scores, run, float(nobody[:UNTRAINED].mean())):
                for coalitions, values in values_by(masks, utilities).items():
                    score = share_error(values, truth), spearman(values, truth)
                    rows.setdefault((size, coalitions, way), {}).setdefault(each.name, []).append(score)
    lines = [["clients", "coalitions", "utilities", "misallocated, %", "worst", "rank", "worst", "federations"]]
    for key, by_name in rows.items():
        errors, ranks = ([nanmean(score[i] for score in of) for of in by_name.values()] for i in (0, 1))
        cells = f"{100 * nanmean(errors):.1f}", f"{100 * max(errors):.1f}", f"{nanmean(ranks):.3f}", f"{min(ranks):.2f}"
        lines.append([*key, *cells, str(len(by_name))])
    return grid(lines)


def dealt_seeds(federations: list[Federation]) -> str:
    """Misallocation by coalitions of one common seed, and of seeds of their own, against two other seeds."""
    lines = [["coalitions", "common seed, %", "own seeds, %", "gain", "better in", "of"]]
    designs: tuple[Any, ...] = ("both", "pairs+leave-one-out", "all")
    truths = [truth_table(each) for each in federations]
    truths = [of for of in truths if of.utilities is not None and len(of.seeds) >= 5 and of.num_clients <= 8]
    for which in designs:
        found = []
        for of in truths:
            assert of.utilities is not None
            masks, truth = few_coalitions(of.num_clients, which), of.values[3:].mean(0)
            games = of.utilities[:, (masks * 2 ** torch.arange(of.num_clients)).sum(1)]
            draw, ends = torch.Generator().manual_seed(0), ~masks.any(1) | masks.all(1)
            common = nanmean(share_error(few_coalitions_shapley(masks, games[seed]).values, truth) for seed in range(3))
            own = []
            for run in range(6):
                seeds = torch.randint(3, (len(masks),), generator=draw).masked_fill(ends, run % 3)
                game = games[seeds, torch.arange(len(masks))]
                own.append(share_error(few_coalitions_shapley(masks, game).values, truth))
            found.append((100 * common, 100 * nanmean(own)))
        pairs = torch.tensor(found)
        gain = pairs[:, 0] - pairs[:, 1]
        half = t_quantile(0.9, len(gain) - 1) * gain.std() / len(gain) ** 0.5
        cells = f"{pairs[:, 0].mean():.2f}", f"{pairs[:, 1].mean():.2f}", f"{gain.mean():+.2f} ± {half:.2f}"
        lines.append([which, *cells, str(int((gain > 0).sum())), str(len(gain))])
    return grid(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table", "seeds"))
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--weights", type=int, default=3)
    parser.add_argument("--truths", type=int, default=0, help="seeds of the truth besides the package's")
    parser.add_argument("--folder", type=Path, default=Path("runs/payments"))
    options = parser.parse_args()
    be_quiet()
    wanted = [name for each in options.names for name in (names(each) if each in SETS else [each])]
    found = [drawn(name) if name.startswith("drawn_") else federation(name) for name in wanted]
    if options.what == "seeds":
        print(dealt_seeds(found))
    elif options.what == "table":
        print(table(found, options.folder))
    else:
        for each in found:
            train_all(each, options.folder, options.runs, options.weights, options.truths)


if __name__ == "__main__":
    main()
