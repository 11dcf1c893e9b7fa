"""How far ``ShadowShapley``'s values lie from exact ones, in federations as people train them.

    python tools/studies/usual.py train [NAME...] [--seeds 6]    goes on where it was stopped
    python tools/studies/usual.py table [--csv FILE]    misallocated, ranks, and what brackets hold
    python tools/studies/usual.py examples --csv FILE    of copies and lies, after predicted.py train fashion_twins_6
    python tools/studies/usual.py signs choose|check    signs of a bad prediction, in one half of the federations

`train` fits each federation of ``usual_federations.py`` with the product's own loop and
``ShadowShapley(coalitions="all")``. It keeps the trained coalitions, and the metric's own values and brackets of some
of them: of each client alone, and of all but one, too. The truth for a seed is the mean of the exact values of the
*other* seeds.
"""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from common import be_quiet, grid, quiet_trainer, train_missing, write_csv
from predicted import DECIDABLE, against_others, interval, wrong_by
from torch import Tensor
from torch.utils.data import TensorDataset
from usual_federations import FEDERATIONS, UsualModule, dealt, half

from flsv import FederatedDataModule, FederatedLoop
from flsv.benchmark.scores import shares, spearman
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.intervals import t_quantile
from flsv.functional.shapley.exact import shapley_of_table
from flsv.metrics import ShadowShapley

#: The coalitions of which values are computed, from all that are trained.
DESIGNS: Any = ("singles", "both", "all")
#: The two predictions' difference from which on all but one should be trained, too; chosen before this study.
MOST_APART = 0.12
#: Methods, and the design of each.
METHODS = {
    "exact": "all",
    "alone, predicted": "singles",
    "alone and all but one, predicted": "both",
}
BY_SCORES: Any = {
    "alone, scores": "singles",
    "alone and all but one, scores": "both",
}
#: A federation of ``predicted.py``, whose second client has the first one's data.
TWINS = "fashion_twins_6"
BASELINES = ("equal pay", "counted samples")


class SeveralDesigns(ShadowShapley):
    """Trains all coalitions, and computes the values that each design would have with its own."""

    def complete(
        self,
        masks: Tensor,
        utilities: Tensor,
        outputs: Tensor | None = None,
        weights: Tensor | None = None,
        output_score: Any = None,
    ) -> dict[int, Tensor]:
        assert outputs is not None
        assert weights is not None
        # Only the last round is valued: [K] and [K, V, ...].
        all_utilities = torch.cat([self.ends[0].flatten(), utilities[0].flatten()])
        all_outputs = torch.cat([self.outputs[0], outputs[0]])
        self.record: dict[str, Any] = {
            "masks": masks,
            "utilities": all_utilities,
            "outputs": all_outputs,
            "sizes": weights,
            "untrained": self.starts.flatten(),
        }
        numbers = [tuple(mask) for mask in masks.tolist()]
        for design in DESIGNS:
            design_masks = few_coalitions(masks.shape[1], design)
            rows = [numbers.index(tuple(mask)) for mask in design_masks.tolist()]
            metric = copy.deepcopy(self)
            inner = torch.tensor(rows[2:]) - 2
            ShadowShapley.complete(
                metric,
                design_masks,
                utilities[:, inner],
                outputs=outputs[:, inner],
                weights=weights,
                output_score=output_score,
            )
            values = metric.compute().double()
            self.record[f"values, {design}"] = values
            self.record[f"errors, {design}"] = metric.errors.flatten().double()
            prediction = output_score.shapley(
                design_masks,
                all_utilities[rows],
                all_outputs[rows],
                weights,
            )
            self.record[f"disagreement, {design}"] = prediction.disagreement.flatten()
        return super().complete(masks, utilities, outputs, weights, output_score)


def fit(
    name: str,
    seed: int,
    metric: ShadowShapley,
) -> tuple[FederatedLoop, UsualModule]:
    """Train a federation, and the coalitions that a metric asks for."""
    federation = FEDERATIONS[name]
    samples = dealt(name)
    L.seed_everything(seed, verbose=False)
    module = UsualModule(federation, samples.validation[0])
    data = FederatedDataModule(
        clients={
            f"client {number}": TensorDataset(*client)
            for number, client in enumerate(samples.clients)
        },
        val=TensorDataset(*samples.validation),
        batch_size=federation.batch,
    )
    loop = FederatedLoop(metrics={"value": metric}, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, federation.rounds, [loop])
        trainer.fit(module, data)
    return loop, module


def play(
    name: str,
    seed: int,
) -> dict[str, Any]:
    """Return all that is kept of one seed of a federation."""
    federation = FEDERATIONS[name]
    began = time.monotonic()
    metric = SeveralDesigns(
        coalitions="all",
        performance=federation.performance,
        every=federation.rounds,
    )
    loop, _ = fit(name, seed, metric)
    record: Any = loop.metrics["value"]
    samples = dealt(name)
    return {
        **record.record,
        "labels": samples.validation[1],
        "classes": [labels.unique().tolist() for _, labels in samples.clients],
        "seconds": time.monotonic() - began,
    }


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records of each federation's seeds."""
    by_name = {}
    for name in FEDERATIONS:
        paths = sorted((folder / name).glob("*.pt"))
        by_name[name] = [torch.load(path) for path in paths]
    return by_name


def values_of(
    method: str,
    seeds: Sequence[dict[str, Any]],
) -> Tensor:
    """Each seed's values by one method, ``[seeds, n]``."""
    values = []
    for record in seeds:
        sizes = record["sizes"].double()
        if method == "equal pay":
            values.append(torch.ones_like(sizes))
        elif method == "counted samples":
            values.append(sizes)
        elif method in BY_SCORES:
            values.append(values_by_scores(BY_SCORES[method], record))
        else:
            design = METHODS[method]
            values.append(record[f"values, {design}"])
    return torch.stack(values)


def values_by_scores(
    design: Any,
    record: dict[str, Any],
) -> Tensor:
    """Values from the scores of a design's coalitions."""
    num_clients = len(record["sizes"])
    masks = few_coalitions(num_clients, design)
    numbers = [tuple(mask) for mask in record["masks"].tolist()]
    rows = [numbers.index(tuple(mask)) for mask in masks.tolist()]
    estimate = few_coalitions_shapley(masks, record["utilities"][rows])
    return estimate.values


def misallocated(
    method: str,
    seeds: Sequence[dict[str, Any]],
) -> float:
    """Percent misallocated by one seed, against the mean of the others."""
    exact = values_of("exact", seeds)
    values = values_of(method, seeds)
    return wrong_by(values, exact)


def rank_correlation(
    method: str,
    seeds: Sequence[dict[str, Any]],
) -> float:
    """Spearman's correlation of one seed's values with the mean of the others' exact ones."""
    exact = values_of("exact", seeds)
    values = values_of(method, seeds)
    return against_others(spearman, values, exact, 1)


def coverage(
    method: str,
    seeds: Sequence[dict[str, Any]],
) -> float:
    """The part of the others' means that one seed's brackets hold, widened by those means' own error."""
    exact = values_of("exact", seeds)
    values = values_of(method, seeds)
    quantile = t_quantile(0.9)
    num_others = len(seeds) - 1
    variance_of_truth = exact.var(0).mean() / num_others

    fractions = []
    for seed, record in enumerate(seeds):
        stderr = record[f"errors, {METHODS[method]}"]
        half_widths = quantile * (stderr.square() + variance_of_truth).sqrt()
        truth = (exact.sum(0) - exact[seed]) / num_others
        distances = (values[seed] - truth).abs()
        fractions.append((distances <= half_widths).double().mean())
    return float(torch.stack(fractions).mean())


@dataclass(frozen=True)
class Measured:
    """How far one method's values lie from the truth in one federation."""

    wrong: float
    over_exact: float
    rank: float
    coverage: float


def measure(
    method: str,
    seeds: Sequence[dict[str, Any]],
) -> Measured:
    """Measure one method in one federation."""
    wrong = misallocated(method, seeds)
    covered = math.nan
    if method in METHODS:
        covered = coverage(method, seeds)
    return Measured(
        wrong=wrong,
        over_exact=wrong - misallocated("exact", seeds),
        rank=rank_correlation(method, seeds),
        coverage=covered,
    )


def is_decidable(
    seeds: Sequence[dict[str, Any]],
) -> bool:
    """Return whether one exact seed misallocates at most 15 %."""
    return misallocated("exact", seeds) <= DECIDABLE


def table(
    folder: Path,
    path: Path | None,
) -> str:
    """Percent misallocated by one seed, ranks, and what brackets hold."""
    by_name = records(folder)
    kinds = {
        "all": [*by_name],
        "decidable": [name for name in by_name if is_decidable(by_name[name])],
        "one class each": [name for name in by_name if name.startswith("one_class")],
        "other": [name for name in by_name if not name.startswith("one_class")],
    }
    header = ["method", "rank", "brackets hold"]
    for kind, names in kinds.items():
        header += [f"{kind}: {len(names)}", "over exact"]

    rows = [header]
    lines = [["federation", "half", "seeds", "method", "misallocated_percent", "rank", "held"]]
    for method in (*BASELINES, *BY_SCORES, *METHODS):
        measured = {name: measure(method, seeds) for name, seeds in by_name.items()}
        ranks = [federation.rank for federation in measured.values()]
        covered = [federation.coverage for federation in measured.values()]
        cells = [method, f"{np.mean(ranks):.2f}", f"{np.mean(covered):.2f}"]
        for names in kinds.values():
            wrong = [measured[name].wrong for name in names]
            over_exact = [measured[name].over_exact for name in names]
            cells += [f"{np.mean(wrong):.2f}", interval(over_exact)]
        rows.append(cells)
        for name, federation in measured.items():
            facts = [name, half(name), str(len(by_name[name])), method]
            numbers = [federation.wrong, federation.rank, federation.coverage]
            lines.append([*facts, *(f"{number:.3f}" for number in numbers)])
    write_csv(lines, path)
    return grid(rows)


def signs(
    folder: Path,
    which_half: str,
) -> str:
    """Measure what all but one brings in one half of the federations, where the two predictions are far apart."""
    brought: dict[str, list[float]] = {"far apart": [], "near": []}
    rows = [["federation", "predictions apart, %", "exact", "alone", "alone and all but one"]]
    for name, seeds in records(folder).items():
        if half(name) != which_half:
            continue
        apart = np.mean([share_apart(record) for record in seeds])
        exact, alone, all_but_one = [misallocated(method, seeds) for method in METHODS]
        numbers = [100 * apart, exact, alone, all_but_one]
        rows.append([name, *(f"{number:.1f}" for number in numbers)])
        title = "near"
        if apart > MOST_APART:
            title = "far apart"
        brought[title].append(alone - all_but_one)
    lines = [grid(rows)]
    for title, gains in brought.items():
        lines.append(f"{title}: {len(gains)}, all but one brings {interval(gains)}")
    return "\n".join(lines)


def examples(folder: Path, path: Path) -> str:
    """Measure what a copy and a client with random labels are paid, in percent of a payment."""
    twins = [torch.load(file) for file in sorted(Path("runs/predicted").glob(f"{TWINS}/?.pt"))]
    utilities = torch.stack([record["utilities"] for record in twins]).mean(0)
    has_no_copy = (torch.arange(len(utilities)) >> 1) % 2 == 0
    alone_of_both = utilities[has_no_copy]
    liar_seeds = records(folder)["digits_liars"]
    exact = values_of("exact", liar_seeds)
    predicted = values_of("alone, predicted", liar_seeds)
    paid = {
        "a client and its copy": shapley_of_table(utilities[:, None])[:, 0],
        "the client without its copy": shapley_of_table(alone_of_both[:, None])[:, 0],
        "random labels, exact": exact.mean(0),
        "random labels, alone": predicted.mean(0),
    }
    rows = [["example", "percent"]]
    for example, values in paid.items():
        rows.append([example, f"{100 * float(shares(values)[0]):.1f}"])
    write_csv(rows, path)
    return grid(rows)


def share_apart(
    record: dict[str, Any],
) -> float:
    """The difference of the two predictions, as a fraction of a payment."""
    gains = record["values, singles"].clamp_min(0).sum()
    apart = record["disagreement, singles"].abs().sum() / 2
    return min(1.0, float(apart / gains.clamp_min(1e-12)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["train", "table", "signs", "examples"])
    parser.add_argument("names", nargs="*", help="federations, or one half")
    parser.add_argument("--folder", type=Path, default=Path("runs/usual"))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    if options.what == "train":
        names = options.names or [*FEDERATIONS]
        train_missing(play, options.folder, names, options.seeds)
    elif options.what == "signs":
        print(signs(options.folder, options.names[0]))
    elif options.what == "examples":
        print(examples(options.folder, options.csv))
    else:
        print(table(options.folder, options.csv))


if __name__ == "__main__":
    main()
