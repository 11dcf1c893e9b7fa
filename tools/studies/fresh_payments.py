"""How much of a payment goes to the wrong clients, on twelve federations that were made after every choice.

    python tools/studies/fresh_payments.py train [NAME...] [--truths 6] [--folder runs/fresh_payments]
    python tools/studies/fresh_payments.py cost [NAME...]
    python tools/studies/fresh_payments.py table [NAME...] [--folder runs/fresh_payments]

`train` fits each federation as a user does, by a FederatedLoop with ShadowShapley, keeps what its coalitions came to,
and goes on where it was stopped; `table` is arithmetic on that. Three seeds are runs, and together `flsv retrain`; the
others are the truth: all coalitions of up to ten clients, of more those along circles of the clients
(`flsv.benchmark.truth`). Beside each value stands that of 1.0.0, by its coalitions, its estimator and its seeds, of the
same trainings. `cost` measures both in fits without metrics: processor time of one thread, the least of two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import be_quiet, grid
from fresh_federations import Fresh, catalogue
from torch import Tensor

import flsv
from flsv import FederatedLoop, Reporting
from flsv.benchmark import Federation
from flsv.benchmark.federation import quiet
from flsv.benchmark.scores import NAN, nanmean, share_error, spearman
from flsv.benchmark.truth import arcs, sampled_truth
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.functional.shapley.few_coalitions import CURVE_FROM, MOST_FOR_ALL, Which, retrained_shapley
from flsv.functional.shapley.one_seed import one_seed_stderr
from flsv.functional.shapley.size_effects import size_effects_shapley
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.utilities.seeding import isolated_rngs

RUNS, TRUTH, MOST, LEVEL = (0, 1, 2), 100, 10, 0.9
SIZES = {9: "4 to 9", 12: "10 to 12", 99: "20"}
#: What rows cannot train: 1.0.0 and this version train the same few coalitions, once.
BY_FITS = ("gru_4",)


class Game(ShadowShapley):
    """ShadowShapley that keeps the last game."""

    def _share_out(self, masks: Tensor, utilities: Tensor) -> None:
        self.game = masks, utilities.double().cpu().flatten()


def parts(each: Fresh, seed: int, metrics: Mapping[str, Any], **changes: Any) -> tuple[Any, Any, Any]:
    """A trainer, a module and the data."""
    arguments = {**each.loop(), **changes}
    arguments["metrics"] = {**arguments.get("metrics", {}), **metrics}
    loop = FederatedLoop(seed=seed, reporting=Reporting(table=False, figures=0, files=False), **arguments)
    return each.federation.trainer(loop), each.federation.module, each.federation.datamodule()


def fit(each: Fresh, seed: int, metrics: Mapping[str, Any], **changes: Any) -> None:
    with isolated_rngs(seed, "fresh"), quiet():
        trainer, module, data = parts(each, seed, metrics, **changes)
        trainer.fit(module(), data)


def play(each: Fresh, seed: int, masks: Tensor, **changes: Any) -> dict[str, Tensor]:
    """What coalitions come to with a seed, by ShadowShapley."""
    of, members = each.federation, [mask.nonzero().flatten().tolist() for mask in masks]
    measure = {"performance": of.performance, "mode": of.mode}
    metric = Game(coalitions=[some for some in members if 0 < len(some) < masks.shape[1]], every=of.rounds, **measure)
    fit(each, seed, {"value": metric}, **changes)
    masks, utilities = metric.game
    return {"masks": masks, "utilities": utilities}


def coalitions_of(each: Federation, seed: int) -> Tensor:
    clients = len(each.num_samples)
    if clients <= MOST:
        return all_coalitions(clients)
    return arcs(clients, seed, each.circles) if seed >= TRUTH else few_coalitions(clients, "pairs+leave-two-out")


def train(wanted: Sequence[Fresh], folder: Path, truths: int) -> None:
    """All federations' coalitions, seed after seed."""
    for seed in (*RUNS, *range(TRUTH, TRUTH + truths)):
        for each in wanted:
            kinds: dict[str, dict[str, Any]] = {"run": {}}
            if "sampler" in each.loop() and seed in RUNS:
                kinds["all"] = {"sampler": None}  # as flsv retrain has it
            for kind, changes in kinds.items():
                path, began = folder / each.federation.name / f"{kind}_{seed}.pt", time.process_time()
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    torch.save(play(each, seed, coalitions_of(each.federation, seed), **changes), path)
                    print(f"{path.parent.name}: {path.stem}, {time.process_time() - began:.0f} s", flush=True)


def cost(wanted: Sequence[Fresh]) -> str:
    """Fits without metrics that ShadowShapley and flsv.retrain take by default."""
    lines = [["federation", "clients", "a fit, s", "ShadowShapley", "valued once", "flsv.retrain"]]
    for each in wanted:
        of = each.federation
        measure: dict[str, Any] = {"performance": of.performance, "mode": of.mode}
        ways = {
            "plain": partial(fit, each, 0, {}),
            "shadow": lambda: fit(each, 0, {"value": ShadowShapley(**measure)}),  # noqa: B023
            "once": lambda: fit(each, 0, {"value": ShadowShapley(every=of.rounds, **measure)}),  # noqa: B023
            "retrain": partial(retrained, each),
        }
        taken: dict[str, float] = {}
        for _ in range(2):
            for name, way in ways.items():
                began = time.process_time()
                way()
                taken[name] = min(taken.get(name, float("inf")), time.process_time() - began)
        fits = [f"{taken[name] / taken['plain']:.1f}" for name in ("shadow", "once", "retrain")]
        lines.append([of.name, str(len(of.num_samples)), f"{taken['plain']:.2f}", *fits])
        print(grid(lines), flush=True)
    return ""


def retrained(each: Fresh) -> None:
    with isolated_rngs(0, "fresh"), quiet():
        trainer, module, data = parts(each, 0, {})
        flsv.retrain(trainer, module, data, metric=each.federation.performance, mode=each.federation.mode)


def some_of(kept: Mapping[str, Tensor], which: Which) -> tuple[Tensor, Tensor]:
    places = {tuple(mask): place for place, mask in enumerate(kept["masks"].tolist())}
    masks = few_coalitions(kept["masks"].shape[1], which)
    return masks, kept["utilities"][[places[tuple(mask)] for mask in masks.tolist()]]


def as_before(kept: Mapping[str, Tensor], which: Which) -> tuple[Tensor, Tensor]:
    """Values and half their intervals as of 1.0.0, of one seed: the Gaussian process alone, and its standard error."""
    masks, utilities = some_of(kept, which)
    found, n = few_coalitions_shapley(masks, utilities), masks.shape[1]
    curve = size_effects_shapley(masks, utilities[:, None]) if n >= CURVE_FROM and len(masks) < 2**n else None
    values = found.values if curve is None else 2 * found.values - curve[:, 0]
    return values, t_quantile(LEVEL) * found.stderr


def estimates(
    name: str, runs: Sequence[Mapping[str, Tensor]], retrained: Sequence[Mapping[str, Tensor]]
) -> dict[str, list[tuple[Tensor, Tensor | None]]]:
    """Values and half their intervals by each way, of 1.0.0 and now; of one run three times."""
    n = runs[0]["masks"].shape[1]
    before: Which = "all" if n <= MOST_FOR_ALL else "pairs+leave-one-out"
    found: dict[str, list[tuple[Tensor, Tensor | None]]] = {
        "ShadowShapley, 1.0.0": [(as_before(run, before)[0], None) for run in runs],
        "ShadowShapley": [],
    }
    for run in runs:
        fitted = few_coalitions_shapley(*some_of(run, "auto"))
        half = t_quantile(LEVEL) * one_seed_stderr(fitted.values, fitted.stderr)
        found["ShadowShapley"].append((fitted.values, half))
    if name in BY_FITS:
        games = [some_of(run, "both") for run in retrained]
        found["flsv retrain, 1.0.0"] = [as_before(run, "both") for run in retrained]
        found["flsv retrain"] = [retrained_shapley(masks, utilities[None]) for masks, utilities in games]
        return found
    masks = some_of(retrained[0], "auto")[0]
    now = retrained_shapley(masks, torch.stack([some_of(run, "auto")[1] for run in retrained]))
    found["flsv retrain, 1.0.0"] = [now] if n <= MOST_FOR_ALL else [as_before(run, before) for run in retrained]
    found["flsv retrain"] = [now]
    return found


def truth_of(each: Federation, kept: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Each seed's values, ``[seeds, n]``."""
    found = []
    for seed, of in enumerate(kept, TRUTH):
        masks, utilities = of["masks"], of["utilities"]
        if each.circles:
            known = {seed: dict(zip(members_of(masks), utilities.tolist()))}
            found.append(sampled_truth(known, masks.shape[1], each.circles).mean)
        else:
            found.append(few_coalitions_shapley(masks, utilities).values)
    return torch.stack(found)


def score(found: Sequence[tuple[Tensor, Tensor | None]], truth: Tensor) -> tuple[float, float, float]:
    """Percent misallocated, rank correlation, and the share of the truth in the intervals, means over runs."""
    inside = [NAN if half is None else float(((v - truth).abs() <= half).double().mean()) for v, half in found]
    wrong = nanmean(100 * share_error(values, truth) for values, _ in found)
    return wrong, nanmean(spearman(values, truth) for values, _ in found), sum(inside) / len(inside)


def table(wanted: Sequence[Fresh], folder: Path) -> str:
    """A table of federations, and one of means over those of so many clients."""
    rows: dict[str, dict[str, list[tuple[float, float, float]]]] = {size: {} for size in (*SIZES.values(), "all")}
    lines = [["federation", "way", "misallocated, %", "rank", "in the interval"]]
    for each in wanted:
        name, of = each.federation.name, each.federation
        truths = truth_of(of, [torch.load(path) for path in sorted((folder / name).glob("run_1??.pt"))])
        runs, alone = ([torch.load(p) for p in sorted((folder / name).glob(f"{k}_?.pt"))] for k in ("run", "all"))
        size = next(title for most, title in SIZES.items() if truths.shape[1] <= most)
        scores = {way: score(found, truths.mean(0)) for way, found in estimates(name, runs, alone or runs).items()}
        scores["half of the truth's seeds"] = score([(truths[::2].mean(0), None)], truths[1::2].mean(0))
        for way, found in scores.items():
            rows[size].setdefault(way, []).append(found)
            rows["all"].setdefault(way, []).append(found)
            lines.append([name, way, f"{found[0]:.1f}", f"{found[1]:.3f}", f"{found[2]:.2f}"])
    head = "clients", "way", "misallocated, %", "worst", "less than 1.0.0's", "rank", "worst", "in the interval", "of"
    means = [[*head]]
    for size, ways in rows.items():
        for way, of_way in ways.items():
            errors, ranks, inside = map(torch.tensor, zip(*of_way))
            before, less = ways.get(f"{way}, 1.0.0"), ""
            if before is not None and len(errors) > 1:
                gain = torch.tensor([first for first, *_ in before]) - errors
                less = f"{gain.mean():+.1f} ± {t_quantile(LEVEL, len(gain) - 1) * gain.std() / len(gain) ** 0.5:.1f}"
            cells = f"{errors.mean():.1f}", f"{errors.max():.1f}", less, f"{ranks.mean():.3f}", f"{ranks.min():.2f}"
            means.append([size, way, *cells, f"{inside.mean():.2f}", str(len(errors))])
    return grid(lines) + "\n\n" + grid(means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "cost", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--truths", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/fresh_payments"))
    options = parser.parse_args()
    be_quiet()
    known = catalogue()
    wanted = [known[name] for name in options.names or known]
    if options.what == "train":
        train(wanted, options.folder, options.truths)
    else:
        print(cost(wanted) if options.what == "cost" else table(wanted, options.folder))


if __name__ == "__main__":
    main()
