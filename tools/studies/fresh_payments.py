"""How much of a payment goes to the wrong clients, and what brackets hold, before choices and after them, on
federations made after the choices.

    python tools/studies/fresh_payments.py train [NAME...] [--truths 6] [--folder runs/fresh_payments]
    python tools/studies/fresh_payments.py table [NAME...] [--folder runs/fresh_payments]
    python tools/studies/fresh_payments.py sums [NAME...] [--folder runs/fresh_payments]

`train` fits each federation as a user does, by a FederatedLoop with ShadowShapley, keeps what all of its coalitions
came to in the last three rounds, and goes on where it was stopped; `table` is arithmetic on that. Three seeds are runs,
and together `flsv retrain`; the others are the truth. *Before* are brackets of 3.5 % of the gain, and for 8 to 10
clients a kernel with a third part; `table` ends with what that part gains, each seed and each three of them once the
runs. `sums` compares, where a sampler draws the clients, values of single rounds' games with the truth: as they are,
and times E[T]/T, with T the rounds in which a client was drawn.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from common import be_quiet, grid
from fresh_federations import Fresh, catalogue
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.benchmark.federation import quiet
from flsv.benchmark.scores import nanmean, share_error, spearman
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley import few_coalitions as estimator
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.functional.shapley.few_coalitions import retrained_shapley
from flsv.functional.shapley.one_seed import SEED_DEVIATION, one_seed_stderr
from flsv.metrics import CosineGradientShapley, CumulativeShapley, GradientAgreement, ShadowShapley
from flsv.metrics.shadow import RECENT
from flsv.utilities.seeding import isolated_rngs

RUNS, TRUTH, LEVEL = (0, 1, 2), 100, 0.9
#: The largest number of clients of whom all coalitions were trained by default.
MOST_FOR_ALL = 7
#: What seeds were said to differ by before, as a fraction of the sum of all positive values.
BEFORE = 0.035
Kept = Mapping[str, Tensor]
#: Values and half their brackets.
Found = tuple[Tensor, Tensor]


class Game(ShadowShapley):
    """ShadowShapley that keeps the games after the last rounds."""

    def update(self, client_ids: Tensor, coalitions: Tensor, utility: Any, round_index: int = 0) -> None:
        if self._last is None or round_index > self._last - RECENT:
            super().update(client_ids, coalitions, utility, round_index)

    def _share_out(self, masks: Tensor, utilities: Tensor) -> None:
        vars(self).setdefault("games", []).append(utilities.double().cpu().flatten())
        vars(self)["masks"] = masks


def fit(each: Fresh, seed: int, metrics: Mapping[str, Any]) -> None:
    with isolated_rngs(seed, "fresh"), quiet():
        loop = FederatedLoop(
            metrics=metrics, seed=seed, reporting=Reporting(table=False, figures=0, files=False), **each.loop()
        )
        each.federation.trainer(loop).fit(each.federation.module(), each.federation.datamodule())


def play(each: Fresh, seed: int, masks: Tensor) -> dict[str, Tensor]:
    """What coalitions come to in the last rounds with a seed, ``[rounds, K]``, and untrained models."""
    of, members = each.federation, [mask.nonzero().flatten().tolist() for mask in masks]
    wanted = [some for some in members if 0 < len(some) < masks.shape[1]]
    metric = Game(coalitions=wanted, performance=of.performance, mode=of.mode)
    fit(each, seed, {"value": metric})
    kept: Any = vars(metric)
    return {"masks": kept["masks"], "utilities": torch.stack(kept["games"]), "starts": metric.starts[:, 0]}


def train(wanted: Sequence[Fresh], folder: Path, truths: int) -> None:
    """All federations' coalitions, seed after seed."""
    for seed in (*RUNS, *range(TRUTH, TRUTH + truths)):
        for each in wanted:
            path, began = folder / each.federation.name / f"{seed}.pt", time.process_time()
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                torch.save(play(each, seed, all_coalitions(len(each.federation.num_samples))), path)
                print(f"{path.parent.name}: {path.stem}, {time.process_time() - began:.0f} s", flush=True)


def some_of(kept: Kept) -> tuple[Tensor, Tensor]:
    """The default's coalitions, and their utilities ``[rounds, K]``."""
    places = {tuple(mask): place for place, mask in enumerate(kept["masks"].tolist())}
    n = kept["masks"].shape[1]
    masks = few_coalitions(
        n, "all" if n <= MOST_FOR_ALL else f"pairs+leave-{'two' if n in (10, 11, 12) else 'one'}-out"
    )
    return masks, kept["utilities"][:, [places[tuple(mask)] for mask in masks.tolist()]]


def near(inside: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """exp(-d / 4), with d the number of players by which two coalitions differ."""
    return torch.exp(-(left + right - 2 * inside) / 4)


@contextmanager
def third_part(there: bool) -> Iterator[None]:
    """With a third part of the kernel, or without it."""
    own = estimator.PARTS
    estimator.PARTS = (*own, near) if there else own
    try:
        yield
    finally:
        estimator.PARTS = own


def one_run(kept: Kept, deviation: float, third: bool) -> Found:
    """One seed's values and brackets."""
    masks, utilities = some_of(kept)
    with third_part(third):
        by_round = [few_coalitions_shapley(masks, of_round) for of_round in utilities]
    recent = torch.stack([each.values for each in by_round]) if len(by_round) == RECENT else None
    values = by_round[-1].values
    variance = one_seed_stderr(values, by_round[-1].stderr, kept["starts"], recent).square()
    variance += (deviation**2 - SEED_DEVIATION**2) * values.clamp_min(0).sum().square()
    return values, t_quantile(LEVEL) * variance.sqrt()


def some_runs(runs: Sequence[Kept], third: bool) -> Found:
    """Several seeds' values and brackets."""
    games = torch.stack([some_of(run)[1][-1] for run in runs])
    with third_part(third):
        return retrained_shapley(some_of(runs[0])[0], games)


def gains(wanted: Sequence[Fresh], folder: Path) -> str:
    """What the third part of the kernel takes off the misallocation, by one seed and by three."""
    lines = [["federation", "seeds", "with a third part", "without", "less with it"]]
    for count in (1, 3):
        less = []
        for each in wanted:
            kept = [*loaded(each, folder, "?"), *loaded(each, folder, "1??")]
            values = exact(kept)
            wrong = []
            for some in combinations(range(len(kept)), count):
                rest = values[[seed for seed in range(len(kept)) if seed not in some]].mean(0)
                runs = [kept[seed] for seed in some]
                wrong.append([100 * share_error(some_runs(runs, third)[0], rest) for third in (True, False)])
            cells = torch.tensor(wrong).mean(0)
            less.append(cells[1] - cells[0])
            lines.append([each.federation.name, str(count), *(f"{cell:.1f}" for cell in cells), f"{less[-1]:+.1f}"])
        lines.append([f"{len(wanted)}", str(count), "", "", gain_of(torch.stack(less))])
    return grid(lines)


def gain_of(gain: Tensor) -> str:
    """A mean over federations, with half its interval."""
    return f"{gain.mean():+.1f} ± {t_quantile(LEVEL, len(gain) - 1) * gain.std() / len(gain) ** 0.5:.1f}"


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
    inside = [float(((values - truth).abs() <= half).double().mean()) for values, half in found]
    of_shares = [share_inside(values, half, truth) for values, half in found]
    width = [100 * float(half.mean() / values.clamp_min(0).sum()) for values, half in found]
    return wrong, rank, *(sum(part) / len(part) for part in (inside, of_shares, width))


def loaded(each: Fresh, folder: Path, seeds: str) -> list[Kept]:
    return [torch.load(path) for path in sorted((folder / each.federation.name).glob(f"{seeds}.pt"))]


def exact(kept: Sequence[Kept]) -> Tensor:
    """The exact values of each seed, ``[seeds, n]``."""
    return torch.stack([few_coalitions_shapley(of["masks"], of["utilities"][-1]).values for of in kept])


def floors(truths: Tensor) -> dict[str, float]:
    """Percent misallocated by one seed of the exact game, and by half of the truth's seeds."""
    others = [(truths.sum(0) - one) / (len(truths) - 1) for one in truths]
    one = nanmean(100 * share_error(mine, rest) for mine, rest in zip(truths, others))
    return {"one seed of the truth": one, "half of it": 100 * share_error(truths[::2].mean(0), truths[1::2].mean(0))}


def table(wanted: Sequence[Fresh], folder: Path) -> str:
    """A table of federations, and one of means over those of a kind."""
    head = ["misallocated, %", "rank", "values in brackets", "shares in brackets", "half width, %"]
    lines, rows = [["federation", "way", *head]], dict[str, dict[str, list[tuple[float, ...]]]]()
    for each in wanted:
        truths, runs = exact(loaded(each, folder, "1??")), loaded(each, folder, "?")
        few = truths.shape[1] > MOST_FOR_ALL
        kind = "8 to 10 clients" if few else "a sampler" if "sampler" in each.loop() else "5, 6 clients"
        ways: dict[str, list[Found]] = {
            "ShadowShapley, before": [one_run(run, BEFORE, few) for run in runs],
            "ShadowShapley": [one_run(run, SEED_DEVIATION, False) for run in runs],
            "flsv retrain, before": [some_runs(runs, few)],
            "flsv retrain": [some_runs(runs, False)],
        }
        for way, found in ways.items():
            cells = score(found, truths.mean(0))
            lines.append([each.federation.name, way, f"{cells[0]:.1f}", *(f"{cell:.2f}" for cell in cells[1:])])
            for key in (kind, "all"):
                rows.setdefault(key, {}).setdefault(way, []).append(cells)
        for name, percent in floors(truths).items():
            lines.append([each.federation.name, f"floor: {name}, of {len(truths)}", f"{percent:.1f}", *[""] * 4])
    means = [["federations", "way", *head, "least in brackets", "less than before"]]
    for kind, of_kind in rows.items():
        for way, cells in of_kind.items():
            middle = torch.tensor(cells).mean(0).tolist()
            numbers = [f"{middle[0]:.1f}", *(f"{part:.2f}" for part in middle[1:])]
            less, earlier = "", of_kind.get(f"{way}, before")
            if earlier is not None and len(cells) > 1:
                less = gain_of(torch.tensor([old[0] - new[0] for old, new in zip(earlier, cells)]))
            means.append([f"{kind}: {len(cells)}", way, *numbers, f"{min(cell[2] for cell in cells):.2f}", less])
    many = [each for each in wanted if len(each.federation.num_samples) > MOST_FOR_ALL]
    return "\n\n".join([grid(lines), grid(means), gains(many, folder)])


def sums(wanted: Sequence[Fresh], folder: Path) -> str:
    """Percent misallocated by values of single rounds' games, as they are, and times E[T]/T."""
    lines = [["federation", "values", "misallocated, %", "times E[T]/T"]]
    for each in wanted:
        if "sampler" not in each.loop():
            continue
        truth = exact(loaded(each, folder, "1??")).mean(0)
        chances = each.loop()["sampler"].inclusion_probabilities(len(truth), {}).double()
        wrong: dict[str, list[tuple[float, float]]] = {}
        for seed in RUNS:
            metrics = {
                "CumulativeShapley, accuracy": (drawn := CumulativeShapley()),
                "CumulativeShapley, loss": CumulativeShapley(performance="negative_loss"),
                "CumulativeShapley, loss, fixed weights": CumulativeShapley(
                    performance="negative_loss", weighting="fixed"
                ),
                "GradientAgreement": GradientAgreement(),
                "CosineGradientShapley": CosineGradientShapley(),
            }
            fit(each, seed, metrics)
            expected = each.federation.rounds * chances / drawn.seen
            for name, metric in metrics.items():
                values = metric.per_client(metric.compute()).double()
                both = share_error(values, truth), share_error(values * expected, truth)
                wrong.setdefault(name, []).append(both)
        for name, pairs in wrong.items():
            cells = (100 * torch.tensor(pairs).mean(0)).tolist()
            lines.append([each.federation.name, name, *(f"{cell:.1f}" for cell in cells)])
    return grid(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "table", "sums"))
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
        print((table if options.what == "table" else sums)(wanted, options.folder))


if __name__ == "__main__":
    main()
