"""Runs metrics in the benchmark's federations, all metrics of a federation in one fit where possible.

A run is repeated under other conditions: clients that are absent, noise, another aggregator.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from flsv.aggregation import FedAvg, GeometricMedian
from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.registry import Entry, WrongArguments, identity_of
from flsv.benchmark.scores import Results, Values
from flsv.benchmark.truth import Truth
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric, ShadowShapley
from flsv.privacy import GaussianPrivacy
from flsv.report.folder import Reporting
from flsv.report.measured import overall
from flsv.sampling import ClientSampler, UniformSampler
from flsv.seeding import isolated_rngs
from flsv.strategy import Contributions

#: Name to what it is, in words.
CONDITIONS = {
    "base": "everybody takes part in every round, FedAvg",
    "partial": "two clients of a round's are absent, drawn anew every round",
    "dropout": "the most valuable client is gone after half of the rounds",
    "private": "updates are clipped to length 1 and get noise of standard deviation 0.01 an entry",
    "uniform": "the clients' models are averaged with equal weights",
    "median": "the geometric median of the clients' models",
}
AGGREGATORS = ("uniform", "median")


class Dropout(ClientSampler):
    """All clients take part, but one leaves after a given round.

    Args:
        client: who.
        after: rounds in which it takes part.

    Example:
        >>> Dropout(0, after=5).sample(3, {}, torch.Generator(), round_index=5)
        tensor([1, 2])
    """

    def __init__(self, client: int, after: int) -> None:
        self.client, self.after = client, after

    def sample(
        self, num_clients: int, contributions: Contributions, generator: torch.Generator, round_index: int = 0
    ) -> Tensor:
        return self.inclusion_probabilities(num_clients, contributions, round_index).nonzero().flatten()

    def inclusion_probabilities(self, num_clients: int, contributions: Contributions, round_index: int = 0) -> Tensor:
        chances = torch.ones(num_clients)
        if round_index >= self.after:
            chances[self.client] = 0
        return chances


def arguments(condition: str, federation: Federation, best: int) -> dict[str, Any]:
    """Arguments of :class:`flsv.FederatedLoop` under a condition, where ``best`` is the client of the largest true
    value."""
    made: dict[str, dict[str, Any]] = {
        "base": {},
        "partial": {"sampler": UniformSampler(cohort_size=max(2, len(federation.num_samples) - 2))},
        "dropout": {"sampler": Dropout(best, federation.rounds // 2)},
        "private": {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=0.01)]},
        "uniform": {"aggregator": FedAvg(weighting="uniform")},
        "median": {"aggregator": GeometricMedian()},
    }
    return made[condition]


def run(
    federation: Federation, entries: Mapping[str, Entry], seed: int, condition: str = "base", best: int = 0
) -> Values:
    """One fit of a federation with these metrics in it.

    A metric that the federation refuses is left out. Where a fit with all of them fails, each rides alone, so that one
    that fails fails alone. Metrics that have clients do more, or keep samples back, have a fit of their own. Without
    entries: the run by itself.

    Args:
        federation: where.
        entries: metrics by name.
        seed: of the run.
        condition: a name in :data:`flsv.benchmark.run.CONDITIONS`.
        best: the client of the largest true value.

    Raises:
        ConfigurationError: the fit fails without any metric, too; a metric takes no such arguments.
    """
    fit = partial(_fit, seed=seed, options=arguments(condition, federation, best))
    if not entries:
        return fit(federation, {})
    result = Values()
    companies: dict[tuple[str, bool], dict[str, Entry]] = {}
    for name, each in entries.items():
        try:
            made = each.build(federation)
            if isinstance(made, ContributionMetric):
                made.check(federation.num_samples)
            if isinstance(made, Metric):
                companies.setdefault((each.client_algorithm or _trains(made), _asks(made)), {})[name] = each
            else:
                data, start = federation.datamodule(), time.process_time()
                result.values[name] = made(data)
                result.seconds[name] = time.process_time() - start
        except WrongArguments:
            raise
        except Exception as error:
            result.blame(name, error)
    for key in sorted(companies):
        company = companies[key]
        where = federation.with_client_validation if key[1] else federation
        try:
            result.add(fit(where, company))
            continue
        except Exception as error:
            fault = error
        if len(company) > 1:
            for name, each in company.items():
                result.add(run(federation, {name: each}, seed, condition, best))
        else:
            fit(federation, {})  # whose fault is it?
            result.blame(next(iter(company)), fault)
    return result


def _trains(metric: Metric) -> str:
    """The coalitions that clients train for it."""
    return str(metric.coalitions) if isinstance(metric, ShadowShapley) else ""


def _asks(metric: Metric) -> bool:
    """Whether clients evaluate models for it, on samples that they keep back."""
    return isinstance(metric, ContributionMetric) and metric.evaluates


def _fit(federation: Federation, entries: Mapping[str, Entry], seed: int, options: Mapping[str, Any]) -> Values:
    gc.collect()  # the trainer, module and data of the run before refer to each other, and are large
    metrics: dict[str, Any] = {name: each.build(federation) for name, each in entries.items()}
    # Names of columns are the user's; those of a loop's metrics have no brackets.
    keys = {name: f"metric_{place}" for place, name in enumerate(metrics)}
    given = {**options, **next((each.options() for each in entries.values()), {})}
    loop = FederatedLoop(
        metrics={keys[name]: metric for name, metric in metrics.items()},
        filters=[],
        uploads=[*federation.attackers(), *given.pop("uploads", [])],
        local_epochs=federation.local_epochs,
        reporting=Reporting(per_class=False, figures=0, table=False, files=False),
        seed=seed,
        **given,
    )
    clock = _Clock(loop)
    with isolated_rngs(seed, "benchmark"), quiet():
        trainer = federation.trainer(loop)
        start = time.process_time()
        trainer.fit(federation.module(), federation.datamodule())
        found = Values(fit=time.process_time() - start)
    for name, metric in metrics.items():
        found.values[name] = overall(metric, loop.board.contributions[keys[name]].detach().cpu())
        found.evaluations[name] = int(getattr(metric, "evaluations", 0))
        if isinstance(metric, ContributionMetric):
            ends = metric.intervals(value=found.values[name])
            found.intervals |= {} if ends is None else {name: ends}
        if len(metrics) == 1:
            found.seconds[name] = clock.seconds
    return found


class _Clock:
    """How long a loop's metrics take, with all that they ask a round for: time of the processor, which does not depend
    on what else runs on the machine."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.seconds, self._update = 0.0, loop.board.update
        loop.board.update = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> None:
        start = time.process_time()
        self._update(*args)
        self.seconds += time.process_time() - start


def bench(
    federations: Mapping[str, tuple[Federation, Truth]],
    entries: Mapping[str, Entry],
    *,
    seeds: int = 3,
    conditions: Sequence[str] = tuple(CONDITIONS),
    folder: Path | None = None,
    say: Any = print,
) -> Results:
    """Run all metrics in all federations: ``seeds`` times as they are, and once under every other condition.

    Args:
        federations: by name, each with its truth.
        entries: metrics by name.
        seeds: runs of each federation as it is.
        conditions: names in :data:`flsv.benchmark.run.CONDITIONS`; ``"base"`` is always among them.
        folder: where values are kept; what is there is not run again.
        say: is told of every fit.

    Returns:
        What is known.

    Raises:
        Exception: of a fit that fails whatever is measured in it; what was done before is kept.
    """
    results = Results(folder, identity_of({name: each for name, (each, _) in federations.items()}, entries))
    runs = [("base", seed) for seed in range(seeds)] + [(other, 0) for other in conditions if other != "base"]
    done, total = 0, len(runs) * len(federations)
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, (federation, truth) in federations.items():
        for condition, seed in runs:
            done += 1
            todo = {m: each for m, each in entries.items() if not results.known(name, condition, seed, m)}
            if not todo:
                continue
            found = run(federation, todo, seed, condition, int(truth.mean.argmax()))
            results.add(name, condition, seed, found, [m for m, each in todo.items() if each.own])
            at = f"{done} of {total}: {name}, {condition}, seed {seed}"
            say(f"{at}: {len(found.values)} metrics, {found.fit:.1f} s")
        federation.release()
    return results
