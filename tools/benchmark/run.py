"""Functions that run metrics in the benchmark's federations."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.federation import Federation, quiet
from benchmark.registry import Entry, WrongArguments, identity_of
from benchmark.scores import BenchResults, RunResults
from benchmark.truth import Truth
from flsv.configuration.federation_config import Reporting
from flsv.federation import FederatedLoop
from flsv.metrics import ContributionMetric, ShadowShapley
from flsv.utilities.seeding import isolated_rngs


def run_metrics(federation: Federation, entries: Mapping[str, Entry], seed: int) -> RunResults:
    """Train a federation with the metrics, in as few training runs as possible. Return the metrics' values."""
    if not entries:
        return _fit(federation, {}, seed)
    result = RunResults()
    # Metrics that can share a training run.
    groups: dict[_Training, dict[str, Entry]] = {}
    for name, entry in entries.items():
        try:
            training = _training_of(entry, federation)
        except WrongArguments:
            raise
        except Exception as error:
            result.record_error(name, error)
        else:
            groups.setdefault(training, {})[name] = entry

    for training, group in sorted(groups.items(), key=itemgetter(0)):
        variant = federation
        if training.clients_evaluate:
            variant = federation.with_client_validation
        try:
            result.add(_fit(variant, group, seed))
            continue
        except Exception as error:
            group_error = error
        if len(group) > 1:  # an error concerns one metric alone
            for name, entry in group.items():
                result.add(run_metrics(federation, {name: entry}, seed))
        else:
            _fit(federation, {}, seed)  # raises unless the metric is to blame
            (name,) = group
            result.record_error(name, group_error)
    return result


class _Training(NamedTuple):
    """Description of a training run. Metrics with equal ones share the run."""

    #: The client algorithm's class path, or the coalitions that are trained after the run, or "".
    trained: str
    clients_evaluate: bool


def _training_of(entry: Entry, federation: Federation) -> _Training:
    metric = entry.build(federation)
    if entry.client_algorithm:
        trained = entry.client_algorithm
    elif isinstance(metric, ShadowShapley):
        trained = str(metric.coalitions)
    else:
        trained = ""

    clients_evaluate = False
    if isinstance(metric, ContributionMetric):
        metric.check(federation.num_samples)  # raises unless it suits the federation
        clients_evaluate = metric.evaluates
    return _Training(trained, clients_evaluate)


def _fit(federation: Federation, entries: Mapping[str, Entry], seed: int) -> RunResults:
    gc.collect()  # the trainer, module and data of the previous run refer to each other, and are large
    metrics: dict[str, Any] = {}
    options: dict[str, Any] = {}
    # Metrics' names in tables may have brackets, but names of metrics in a loop may not.
    keys = {}
    for position, (name, entry) in enumerate(entries.items()):
        metrics[name] = entry.build(federation)
        keys[name] = f"metric_{position}"
        options = options or entry.options()
    reporting = Reporting(figures=0, table=False, files=False)
    loop = FederatedLoop(
        metrics={keys[name]: metric for name, metric in metrics.items()},
        filters=[],
        uploads=[*federation.attackers()],
        local_epochs=federation.local_epochs,
        reporting=reporting,
        seed=seed,
        **options,
    )
    with isolated_rngs(seed, "benchmark"), quiet():
        trainer = federation.trainer(loop)
        start_time = time.process_time()
        trainer.fit(federation.module(), federation.datamodule())
        result = RunResults(fit_seconds=time.process_time() - start_time)

    for name, metric in metrics.items():
        values_of_clients = loop.contributions[keys[name]].cpu()
        if metric.higher_is_better is False:  # the truth is higher for better clients
            values_of_clients = -values_of_clients
        result.values[name] = values_of_clients
    return result


def bench(
    federations: Mapping[str, tuple[Federation, Truth]],
    entries: Mapping[str, Entry],
    *,
    seeds: int = 3,
    folder: Path,
    say: Any = print,
) -> BenchResults:
    """Run all metrics in all federations with several seeds. Values are stored in ``folder``, and reused."""
    federation_by_name = {}  # without the truths
    for name, (federation, _) in federations.items():
        federation_by_name[name] = federation
    results = BenchResults(folder, identity_of(federation_by_name, entries))
    run_number = 0
    num_runs = seeds * len(federations)
    # One federation after the other: the data of all of them at once are some gigabytes.
    for name, federation in federation_by_name.items():
        for seed in range(seeds):
            run_number += 1
            unfinished = {
                metric: entry
                for metric, entry in entries.items()
                if (name, seed, metric) not in results.values
            }
            if not unfinished:
                continue

            run = run_metrics(federation, unfinished, seed)
            results.add(name, seed, run)
            progress = f"{run_number} of {num_runs}: {name}, seed {seed}"
            say(f"{progress}: {len(run.values)} metrics, {run.fit_seconds:.1f} s")
        federation.release()
    return results
