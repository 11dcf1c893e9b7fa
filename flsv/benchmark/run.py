"""Runs metrics in the benchmark's federations, all metrics of a federation in one fit where possible."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchmetrics import Metric

from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.registry import Entry, WrongArguments, identity_of
from flsv.benchmark.scores import Results, Values
from flsv.benchmark.truth import Truth
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric, ShadowShapley
from flsv.results.folder import Reporting
from flsv.results.measured import overall
from flsv.utilities.seeding import isolated_rngs


def run(federation: Federation, entries: Mapping[str, Entry], seed: int) -> Values:
    """One fit of a federation with these metrics in it.

    A metric that the federation refuses is left out. Where a fit with all of them fails, each rides alone, so that one
    that fails fails alone. Metrics that have clients do more, or keep samples back, have a fit of their own. Without
    entries: the run by itself.

    Args:
        federation: where.
        entries: metrics by name.
        seed: of the run.

    Raises:
        ConfigurationError: the fit fails without any metric, too; a metric takes no such arguments.
    """
    if not entries:
        return _fit(federation, {}, seed)
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
            result.add(_fit(where, company, seed))
            continue
        except Exception as error:
            fault = error
        if len(company) > 1:
            for name, each in company.items():
                result.add(run(federation, {name: each}, seed))
        else:
            _fit(federation, {}, seed)  # whose fault is it?
            result.blame(next(iter(company)), fault)
    return result


def _trains(metric: Metric) -> str:
    """The coalitions that clients train for it."""
    return str(metric.coalitions) if isinstance(metric, ShadowShapley) else ""


def _asks(metric: Metric) -> bool:
    """Whether clients evaluate models for it, on samples that they keep back."""
    return isinstance(metric, ContributionMetric) and metric.evaluates


def _fit(federation: Federation, entries: Mapping[str, Entry], seed: int) -> Values:
    gc.collect()  # the trainer, module and data of the run before refer to each other, and are large
    metrics: dict[str, Any] = {name: each.build(federation) for name, each in entries.items()}
    # Names of columns are the user's; those of a loop's metrics have no brackets.
    keys = {name: f"metric_{place}" for place, name in enumerate(metrics)}
    given = next((each.options() for each in entries.values()), {})
    loop = FederatedLoop(
        metrics={keys[name]: metric for name, metric in metrics.items()},
        filters=[],
        uploads=[*federation.attackers()],
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
        found.values[name] = overall(metric, loop.contribution_metrics.contributions[keys[name]].detach().cpu())
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
        self.seconds, self._update = 0.0, loop.contribution_metrics.update
        loop.contribution_metrics.update = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any) -> None:
        start = time.process_time()
        self._update(*args)
        self.seconds += time.process_time() - start


def bench(
    federations: Mapping[str, tuple[Federation, Truth]],
    entries: Mapping[str, Entry],
    *,
    seeds: int = 3,
    folder: Path | None = None,
    say: Any = print,
) -> Results:
    """Run all metrics in all federations.

    Args:
        federations: by name, each with its truth.
        entries: metrics by name.
        seeds: runs of each federation.
        folder: where values are kept; what is there is not run again.
        say: is told of every fit.

    Returns:
        What is known.

    Raises:
        Exception: of a fit that fails whatever is measured in it; what was done before is kept.
    """
    results = Results(folder, identity_of({name: each for name, (each, _) in federations.items()}, entries))
    done, total = 0, seeds * len(federations)
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, (federation, _) in federations.items():
        for seed in range(seeds):
            done += 1
            todo = {m: each for m, each in entries.items() if (name, seed, m) not in results.values}
            if not todo:
                continue
            found = run(federation, todo, seed)
            results.add(name, seed, found)
            at = f"{done} of {total}: {name}, seed {seed}"
            say(f"{at}: {len(found.values)} metrics, {found.fit:.1f} s")
        federation.release()
    return results
