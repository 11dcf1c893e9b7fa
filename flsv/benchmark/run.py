"""Functions that run metrics in the benchmark's federations."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flsv.benchmark.federation import Federation, quiet
from flsv.benchmark.registry import Entry, WrongArguments, identity_of
from flsv.benchmark.scores import BenchResults, Values
from flsv.benchmark.truth import Truth
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric, ShadowShapley
from flsv.results.folder import Reporting
from flsv.results.rows import overall
from flsv.utilities.seeding import isolated_rngs


def run_metrics(federation: Federation, entries: Mapping[str, Entry], seed: int) -> Values:
    """Train a federation with the metrics, in as few training runs as possible. Return the metrics' values."""
    if not entries:
        return _fit(federation, {}, seed)
    result = Values()
    companies: dict[tuple[str, bool], dict[str, Entry]] = {}
    for name, each in entries.items():
        try:
            made = each.build(federation)
            if isinstance(made, ContributionMetric):
                made.check(federation.num_samples)
            coalitions = str(made.coalitions) if isinstance(made, ShadowShapley) else ""
            by_clients = isinstance(made, ContributionMetric) and made.evaluates
            companies.setdefault((each.client_algorithm or coalitions, by_clients), {})[name] = each
        except WrongArguments:
            raise
        except Exception as error:
            result.record_error(name, error)
    for key in sorted(companies):
        company = companies[key]
        where = federation.with_client_validation if key[1] else federation
        try:
            result.add(_fit(where, company, seed))
            continue
        except Exception as error:
            fault = error
        if len(company) > 1:  # an error concerns one metric alone
            for name, each in company.items():
                result.add(run_metrics(federation, {name: each}, seed))
        else:
            _fit(federation, {}, seed)  # raises unless the metric is to blame
            result.record_error(next(iter(company)), fault)
    return result


def _fit(federation: Federation, entries: Mapping[str, Entry], seed: int) -> Values:
    gc.collect()  # the trainer, module and data of the previous run refer to each other, and are large
    metrics: dict[str, Any] = {name: each.build(federation) for name, each in entries.items()}
    # Metrics' names in tables may have brackets, but names of metrics in a loop may not.
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
        found.values[name] = overall(
            metric, loop.contribution_metrics.contributions[keys[name]].detach().cpu()
        )
        found.evaluations[name] = int(getattr(metric, "evaluations", 0))
        if len(metrics) == 1:
            found.seconds[name] = clock.seconds
    return found


class _Clock:
    """Stopwatch of the processor time that a loop's metrics take, including evaluations."""

    def __init__(self, loop: FederatedLoop) -> None:
        self.seconds, self._update = 0.0, loop.contribution_metrics.update
        loop.contribution_metrics.update = self  # type: ignore[method-assign, assignment]  # wrapped on purpose

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
) -> BenchResults:
    """Run all metrics in all federations with several seeds. Values stored in ``folder`` are reused."""
    results = BenchResults(
        folder, identity_of({name: each for name, (each, _) in federations.items()}, entries)
    )
    done, total = 0, seeds * len(federations)
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, (federation, _) in federations.items():
        for seed in range(seeds):
            done += 1
            todo = {m: each for m, each in entries.items() if (name, seed, m) not in results.values}
            if not todo:
                continue
            found = run_metrics(federation, todo, seed)
            results.add(name, seed, found)
            at = f"{done} of {total}: {name}, seed {seed}"
            say(f"{at}: {len(found.values)} metrics, {found.fit:.1f} s")
        federation.release()
    return results
