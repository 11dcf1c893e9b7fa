"""Runs metrics in the benchmark's federations, all metrics of a federation in one fit where possible.

A run is repeated under other conditions: clients that are absent, noise, another aggregator.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
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
from flsv.errors import ConfigurationError
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
#: In the place of a metric's name: what fails is the fit itself.
FIT = ""


def why(error: Exception) -> str:
    """What a user is told of an error: its text, where the configuration is to blame, else where it happened, too."""
    return str(error) if isinstance(error, ConfigurationError) else "".join(traceback.format_exception(error))


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

    def check(self, num_clients: int) -> None:
        if not 0 <= self.client < num_clients or num_clients < 2:
            raise ConfigurationError(f"Dropout(client={self.client}): there are {num_clients} clients.")


def arguments(condition: str, federation: Federation, best: int) -> dict[str, Any]:
    """Arguments of :class:`flsv.FederatedLoop`.

    Args:
        condition: a name in :data:`CONDITIONS`.
        federation: where.
        best: the client of the largest true value.

    Raises:
        ConfigurationError: there is no such condition.
    """
    clients = len(federation.num_samples)
    if condition == "partial":
        return {"sampler": UniformSampler(cohort_size=max(2, clients - 2))}
    if condition == "dropout":
        return {"sampler": Dropout(best, federation.rounds // 2)}
    if condition == "private":
        return {"uploads": [GaussianPrivacy(clip=1.0, noise_multiplier=0.01)]}
    if condition == "uniform":
        return {"aggregator": FedAvg(weighting="uniform")}
    if condition == "median":
        return {"aggregator": GeometricMedian()}
    if condition != "base":
        raise ConfigurationError(f"there is no condition {condition!r}: expected one of {list(CONDITIONS)}.")
    return {}


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
    metrics, result = _made(federation, entries)
    if entries and not metrics:
        return result

    def apart(companies: Sequence[Sequence[str]]) -> Values:
        each = ({name: entries[name] for name in names} for names in companies)
        return _joined(result, [run(federation, some, seed, condition, best) for some in each])

    companies = _companies(entries, metrics)
    if len(companies) > 1:
        return apart(companies)
    asked = [metric for metric in metrics.values() if isinstance(metric, ContributionMetric) and metric.evaluates]
    where = federation.with_client_validation if asked else federation
    theirs = next((entries[name].options() for name in metrics), {})
    fault: Exception | None = None
    try:
        result = _joined(result, [_fit(where, metrics, seed, condition, best, theirs)])
    except Exception as error:
        if not metrics:
            raise
        fault = error
    if fault is not None and len(metrics) > 1:
        return apart([[name] for name in metrics])
    if fault is not None:
        (name,) = metrics
        _fit(federation, {}, seed, condition, best, {})  # whose fault is it?
        told = result.refused if isinstance(fault, ConfigurationError) else result.failed
        told[name] = why(fault)
    return result


def _made(federation: Federation, entries: Mapping[str, Entry]) -> tuple[dict[str, Metric], Values]:
    """New metrics, and what is known of the others: values of the data alone, or why there are none."""
    metrics: dict[str, Metric] = {}
    result = Values({}, {}, {}, {}, 0.0)
    for name, each in entries.items():
        try:
            made = each.build(federation)
            if isinstance(made, Metric):
                if isinstance(made, ContributionMetric):
                    made.check(federation.num_samples)
                metrics[name] = made
            else:
                data = federation.datamodule()
                start = time.process_time()
                result.values[name] = made(data)
                result.seconds[name] = time.process_time() - start
        except WrongArguments:
            raise
        except ConfigurationError as error:
            result.refused[name] = str(error)
        except Exception:
            result.failed[name] = traceback.format_exc()
    return metrics, result


def _companies(entries: Mapping[str, Entry], metrics: Mapping[str, Metric]) -> list[list[str]]:
    """Who may ride in one fit; those of the run as it is come first."""
    found: dict[tuple[str, bool], list[str]] = {}
    for name, metric in metrics.items():
        asks = isinstance(metric, ContributionMetric) and metric.evaluates
        trains = f"{metric.coalitions} {metric.part}" if isinstance(metric, ShadowShapley) else ""
        found.setdefault((entries[name].client_algorithm or trains, asks), []).append(name)
    return [found[key] for key in sorted(found)]


def _joined(result: Values, parts: Sequence[Values]) -> Values:
    for part in parts:
        for name in ("values", "refused", "failed", "seconds", "evaluations", "intervals"):
            getattr(result, name).update(getattr(part, name))
    return replace(result, fit=sum(part.fit for part in parts))


def _fit(
    federation: Federation,
    metrics: Mapping[str, Metric],
    seed: int,
    condition: str,
    best: int,
    options: Mapping[str, Any],
) -> Values:
    gc.collect()  # the trainer, module and data of the run before refer to each other, and are large
    # Names of columns are the user's; those of a loop's metrics have no brackets.
    inside = {f"metric_{place}": metric for place, metric in enumerate(metrics.values())}
    given = {**arguments(condition, federation, best), **options}
    loop = FederatedLoop(
        metrics=inside,  # type: ignore[arg-type]
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
        seconds = time.process_time() - start
    values, evaluations, intervals = {}, {}, {}
    for (name, metric), key in zip(metrics.items(), inside):
        values[name] = overall(metric, loop.contributions[key].detach().cpu())
        evaluations[name] = int(getattr(metric, "evaluations", 0))
        ends = metric.intervals(value=values[name]) if isinstance(metric, ContributionMetric) else None
        if ends is not None:
            intervals[name] = ends
    alone = dict.fromkeys(metrics, clock.seconds) if len(metrics) == 1 else {}
    return Values(values, {}, alone, evaluations, seconds, intervals)


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
        What is known. A fit that fails whatever metrics are in it is among ``failed``, under :data:`FIT` in the place
        of a metric, and the others go on.

    Raises:
        ConfigurationError: an unknown condition.
    """
    for condition in conditions:
        if condition not in CONDITIONS:
            raise ConfigurationError(f"there is no condition {condition!r}: expected one of {list(CONDITIONS)}.")
    results = Results(folder, identity_of({name: each for name, (each, _) in federations.items()}, entries))
    runs = [("base", seed) for seed in range(seeds)] + [(other, 0) for other in conditions if other != "base"]
    tasks = [(name, condition, seed) for name in federations for condition, seed in runs]
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, theirs in groupby(tasks, key=itemgetter(0)):
        federation, truth = federations[name]
        for _, condition, seed in theirs:
            todo = {m: each for m, each in entries.items() if not results.known(name, condition, seed, m)}
            if not todo:
                continue
            try:
                found = run(federation, todo, seed, condition, int(truth.mean.argmax()))
            except WrongArguments:
                raise
            except Exception as error:
                results.failed[name, condition, seed, FIT] = why(error)
                say(f"{name}, {condition}, seed {seed}: the fit fails, {type(error).__name__}")
                continue
            results.add(name, condition, seed, found, [m for m, each in todo.items() if each.own])
            say(f"{name}, {condition}, seed {seed}: {len(found.values)} metrics, {found.fit:.1f} s of the processor")
        federation.release()
    return results
