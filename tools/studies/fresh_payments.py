"""How much of a payment goes to the wrong clients, before a choice and after it, on federations made after the choice.

    python tools/studies/fresh_payments.py train [NAME...] [--truths 6] [--folder runs/fresh_payments]
    python tools/studies/fresh_payments.py table [NAME...] [--folder runs/fresh_payments]
    python tools/studies/fresh_payments.py cost [NAME...]

`train` fits each federation as a user does, by a FederatedLoop with ShadowShapley, keeps what its coalitions came to in
the last three rounds, and goes on where it was stopped; `table` is arithmetic on that. Three seeds are runs, and
together `flsv retrain`; the others are the truth: all coalitions of up to ten clients, of more those along circles of
the clients (`flsv.benchmark.truth`). *Before* is 1.1.0: with a sampler a coalition trained with those of its members
that the run drew, and all of them in `flsv retrain`; a kernel of two parts; brackets of 2.5 % of the gain. `cost`
measures fits of the run without metrics: processor time of one thread, the least of two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from flsv.functional.shapley import few_coalitions as estimator
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.functional.shapley.few_coalitions import MOST_FOR_TWO, Which, retrained_shapley
from flsv.functional.shapley.one_seed import one_seed_stderr
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.metrics.shadow import RECENT
from flsv.retraining.coalition_rounds import CoalitionRounds
from flsv.utilities.seeding import isolated_rngs

RUNS, TRUTH, MOST, LEVEL = (0, 1, 2), 100, 10, 0.9
#: What a standard error of one seed was before, as a fraction of the sum of all positive values.
BEFORE = 0.025
Kept = Mapping[str, Tensor]
#: Values and half their brackets.
Found = tuple[Tensor, Tensor | None]


class Game(ShadowShapley):
    """ShadowShapley that keeps the games after the last rounds."""

    def update(self, client_ids: Tensor, coalitions: Tensor, utility: Any, round_index: int = 0) -> None:
        if self._last is None or round_index > self._last - RECENT:
            super().update(client_ids, coalitions, utility, round_index)

    def _share_out(self, masks: Tensor, utilities: Tensor) -> None:
        vars(self).setdefault("games", []).append(utilities.double().cpu().flatten())
        vars(self)["masks"] = masks


@contextmanager
def drawn_by_the_run() -> Iterator[None]:
    """Coalitions train with those of their members that the run draws, as before."""
    own = CoalitionRounds._drawn
    CoalitionRounds._drawn = lambda rounds, index: rounds._masks & own(rounds, index)[0]  # type: ignore[method-assign]
    try:
        yield
    finally:
        CoalitionRounds._drawn = own  # type: ignore[method-assign]


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
    """What coalitions come to in the last rounds with a seed, ``[rounds, K]``, and untrained models."""
    of, members = each.federation, [mask.nonzero().flatten().tolist() for mask in masks]
    wanted = [some for some in members if 0 < len(some) < masks.shape[1]]
    metric = Game(coalitions=wanted, performance=of.performance, mode=of.mode)
    fit(each, seed, {"value": metric}, **changes)
    kept: Any = vars(metric)
    return {"masks": kept["masks"], "utilities": torch.stack(kept["games"]), "starts": metric.starts[:, 0]}


def coalitions_of(each: Federation, seed: int) -> Tensor:
    clients = len(each.num_samples)
    if clients <= MOST:
        return all_coalitions(clients)
    if seed >= TRUTH:
        return arcs(clients, seed, each.circles)
    both = torch.cat([few_coalitions(clients), few_coalitions(clients, "complements")])
    return torch.tensor([*dict.fromkeys(tuple(mask) for mask in both.tolist())])


def train(wanted: Sequence[Fresh], folder: Path, truths: int) -> None:
    """All federations' coalitions, seed after seed."""
    for seed in (*RUNS, *range(TRUTH, TRUTH + truths)):
        for each in wanted:
            drawn = "sampler" in each.loop()
            kinds = ["run", *(["before"] if drawn else []), *(["all"] if drawn and seed in RUNS else [])]
            for kind in kinds:
                path, began = folder / each.federation.name / f"{kind}_{seed}.pt", time.process_time()
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists():
                    continue
                game = partial(play, each, seed, coalitions_of(each.federation, seed))
                if kind == "before":
                    with drawn_by_the_run():
                        torch.save(game(), path)
                else:
                    torch.save(game(**({"sampler": None} if kind == "all" else {})), path)
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


def some_of(kept: Kept, which: Which) -> tuple[Tensor, Tensor]:
    """Coalitions, and their utilities ``[rounds, K]``."""
    places = {tuple(mask): place for place, mask in enumerate(kept["masks"].tolist())}
    masks = few_coalitions(kept["masks"].shape[1], which)
    return masks, kept["utilities"][:, [places[tuple(mask)] for mask in masks.tolist()]]


@contextmanager
def two_parts() -> Iterator[None]:
    """The kernel has two parts for any number of players, as before."""
    own, estimator.NEAR_TO = estimator.NEAR_TO, 0
    try:
        yield
    finally:
        estimator.NEAR_TO = own


def before(kept: Kept) -> Found:
    """One seed's values and brackets of 1.1.0."""
    with two_parts():
        masks, utilities = some_of(kept, "auto")
        found = few_coalitions_shapley(masks, utilities[-1])
    error = (found.stderr.square() + (BEFORE * found.values.clamp_min(0).sum()).square()).sqrt()
    return found.values, t_quantile(LEVEL) * error


def now(kept: Kept, which: Which = "auto") -> Found:
    """One seed's values and brackets."""
    masks, utilities = some_of(kept, which)
    by_round = [few_coalitions_shapley(masks, of_round) for of_round in utilities]
    recent = torch.stack([each.values for each in by_round]) if len(by_round) == RECENT else None
    error = one_seed_stderr(by_round[-1].values, by_round[-1].stderr, kept["starts"], recent)
    return by_round[-1].values, t_quantile(LEVEL) * error


def retrained_before(runs: Sequence[Kept]) -> Found:
    with two_parts():
        return retrained_now(runs)


def retrained_now(runs: Sequence[Kept], which: Which = "auto") -> Found:
    masks = some_of(runs[0], which)[0]
    return retrained_shapley(masks, torch.stack([some_of(run, which)[1][-1] for run in runs]))


def truth_of(each: Federation, kept: Sequence[tuple[int, Kept]]) -> Tensor:
    """Each seed's values, ``[seeds, n]``."""
    found = []
    for seed, of in kept:
        masks, utilities = of["masks"], of["utilities"][-1]
        if each.circles:
            known = {seed: dict(zip(members_of(masks), utilities.tolist()))}
            found.append(sampled_truth(known, masks.shape[1], each.circles).mean)
        else:
            found.append(few_coalitions_shapley(masks, utilities).values)
    return torch.stack(found)


def shares(values: Tensor) -> Tensor:
    return values.clamp_min(0) / values.clamp_min(0).sum()


def share_inside(values: Tensor, half: Tensor, truth: Tensor) -> float:
    """How many of the truth's shares are between those that a client has with its own value at a bracket's ends."""
    held = []
    for client, right in enumerate(shares(truth).tolist()):
        ends = []
        for end in (values - half, values + half):
            moved = values.clone()
            moved[client] = end[client]
            ends.append(float(shares(moved)[client]))
        held.append(ends[0] <= right <= ends[1])
    return sum(held) / len(held)


def score(found: Sequence[Found], truth: Tensor) -> tuple[float, ...]:
    """Percent misallocated, rank correlation, the parts of the truth's values and shares that brackets hold, and half a
    bracket's width in percent of what is paid: means over runs."""
    wrong = nanmean(100 * share_error(values, truth) for values, _ in found)
    rank = nanmean(spearman(values, truth) for values, _ in found)
    known = [(values, half) for values, half in found if half is not None]
    if not known:
        return wrong, rank, NAN, NAN, NAN
    inside = [float(((values - truth).abs() <= half).double().mean()) for values, half in known]
    of_shares = [share_inside(values, half, truth) for values, half in known]
    width = [100 * float(half.mean() / values.clamp_min(0).sum()) for values, half in known]
    return wrong, rank, *(sum(part) / len(part) for part in (inside, of_shares, width))


def loaded(folder: Path, kind: str, seeds: str) -> list[tuple[int, Kept]]:
    return [(int(path.stem.split("_")[1]), torch.load(path)) for path in sorted(folder.glob(f"{kind}_{seeds}.pt"))]


def ways(each: Fresh, folder: Path) -> tuple[dict[str, list[Found]], Tensor]:
    """Values by each way, of one run three times, and the truth by seeds."""
    of = each.federation
    folder = folder / of.name
    truths = truth_of(of, loaded(folder, "run", "1??"))
    runs = [kept for _, kept in loaded(folder, "run", "?")]
    drawn = "sampler" in each.loop()
    old = [kept for _, kept in loaded(folder, "before", "?")] if drawn else runs
    everybody = [kept for _, kept in loaded(folder, "all", "?")] if drawn else runs
    found: dict[str, list[Found]] = {
        "ShadowShapley, before": [before(run) for run in old],
        "ShadowShapley": [now(run) for run in runs],
        "flsv retrain, before": [retrained_before(everybody)],
        "flsv retrain": [retrained_now(runs)],
    }
    if truths.shape[1] > MOST_FOR_TWO:
        found["ShadowShapley, complements"] = [now(run, "complements") for run in runs]
        found["flsv retrain, complements"] = [retrained_now(runs, "complements")]
    return found, truths


def floors(truths: Tensor) -> dict[str, float]:
    """Percent misallocated by one seed of the exact game, and by half of the truth's seeds."""
    others = [(truths.sum(0) - one) / (len(truths) - 1) for one in truths]
    one = nanmean(100 * share_error(mine, rest) for mine, rest in zip(truths, others))
    return {"one seed of the truth": one, "half of it": 100 * share_error(truths[::2].mean(0), truths[1::2].mean(0))}


def table(wanted: Sequence[Fresh], folder: Path) -> str:
    """A table of federations, and one of means over those of a kind."""
    kinds = {"a sampler": lambda each: "sampler" in each.loop(),
             "13 to 20 clients": lambda each: len(each.federation.num_samples) > MOST_FOR_TWO,
             "5, 6 clients": lambda each: True}  # fmt: skip
    head = "misallocated, %", "rank", "values in brackets", "shares in brackets", "half width, %"
    lines, means = (
        [["federation", "way", *head]],
        [["federations", "way", *head, "least in brackets", "less than before"]],
    )
    rows: dict[str, dict[str, list[tuple[float, ...]]]] = {kind: {} for kind in (*kinds, "all")}
    for each in wanted:
        found, truths = ways(each, folder)
        kind = next(name for name, is_of in kinds.items() if is_of(each))
        for way, of_way in found.items():
            cells = score(of_way, truths.mean(0))
            lines.append([each.federation.name, way, f"{cells[0]:.1f}", *(f"{cell:.2f}" for cell in cells[1:])])
            for key in (kind, "all"):
                rows[key].setdefault(way, []).append(cells)
        if drawn := loaded(folder / each.federation.name, "before", "1??"):
            own = score(found["ShadowShapley, before"], truth_of(each.federation, drawn).mean(0))
            cells = [f"{own[0]:.1f}", *(f"{cell:.2f}" for cell in own[1:])]
            lines.append([each.federation.name, "ShadowShapley, before, against its own game", *cells])
        for name, percent in floors(truths).items():
            lines.append([each.federation.name, f"floor: {name}, of {len(truths)}", f"{percent:.1f}", *[""] * 4])
            for key in (kind, "all"):
                rows[key].setdefault(f"floor: {name}", []).append((percent, NAN, NAN, NAN, NAN))
    for kind, of_kind in rows.items():
        for way, cells in of_kind.items():
            errors = torch.tensor([each[0] for each in cells])
            less, earlier = "", of_kind.get(f"{way.removesuffix(', complements')}, before")
            if earlier is not None and len(errors) == len(earlier) > 1:
                gain = torch.tensor([each[0] for each in earlier]) - errors
                less = f"{gain.mean():+.1f} ± {t_quantile(LEVEL, len(gain) - 1) * gain.std() / len(gain) ** 0.5:.1f}"
            parts = [nanmean(each[place] for each in cells) for place in range(1, 5)]
            least = min(each[2] for each in cells)
            numbers = [f"{part:.2f}" for part in (*parts, least)]
            means.append([f"{kind}: {len(cells)}", way, f"{errors.mean():.1f}", *numbers, less])
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
