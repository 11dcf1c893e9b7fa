"""Basis: the values, one per client, by which a report orders and pays clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flsv.functional.intervals import LEVEL, seed_freedom, t_quantile
from flsv.functional.joint_shares import ValueErrors, joint_intervals
from flsv.report.reading import Run, over_seeds
from flsv.results.text import WORDS, is_small_gain, joined, nearest_first, percent, titled
from flsv.utilities.csv_files import NAN, parse_numbers, read_rows
from flsv.utilities.display import CLIENTS
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import read_members

#: Prefixes of the further columns of shares in retrained.csv: shares without one of the seeds, or by another score.
WITHOUT_SEED, BY_SCORE = "share without seed ", "share by "
#: Name of the values by retraining.
RETRAINED = "retrained"
#: Columns of retrained.csv with the rows of the values' covariances between seeds and between validation samples.
SEED_COVARIANCE, CASE_COVARIANCE = "covariance of seeds", "covariance of cases"
#: Options of ``flsv retrain`` for which so few coalitions are trained that the values rank the clients but do not tell
#: how much each is worth.
RANKING_ONLY = ("singles", "leave-one-out")
#: Text in the column ``changed`` of retrained.csv if the run drew cohorts and the trainings of its coalitions do not.
ALL_TAKE_PART = "all members of a coalition train in every round"
#: Fraction of the validation set in one class from which on accuracy says little about each client's contribution.
MOSTLY = 0.7


@dataclass(frozen=True)
class Basis:
    """One value per client, by which clients are ordered and a budget is shared out."""

    #: The name of a metric, or `"retrained"`.
    key: str
    #: The values' name as the page shows it.
    title: str
    #: A description of the runs that the values come from: coalitions, seeds and rounds.
    of: str
    #: `[n]`, the clients' values, NaN for a client without one.
    values: Sequence[float]
    #: `[n]`, the lower ends of the values' intervals. For values of one seed from metrics that train no coalitions, all
    #: are NaN: such intervals are too narrow to contain the mean over many seeds often enough.
    low: Sequence[float]
    #: `[n]`, the upper ends of the intervals. NaN where `low` is NaN.
    high: Sequence[float]
    #: The name in `run.json` and `retrained.csv` of the performance whose change the values distribute among the
    #: clients, or "" if there is none.
    by: str = ""
    #: The number of seeds over which the values are averaged.
    seeds: int = 1
    #: The degrees of freedom of the intervals, which are Student's t. None: they are normal.
    freedom: int | None = None
    #: `[n, n]`, the values' covariance between seeds. None: only the intervals are known.
    seed_covariance: Tensor | None = None
    #: `[n, n]`, the values' covariance between draws of as many validation samples. None: it is not known.
    case_covariance: Tensor | None = None
    #: `{name: sentence}`, all that speaks against these values as a basis for payment, see `words.yaml`.
    against: Mapping[str, str] = field(default_factory=dict)

    def errors(self) -> list[ValueErrors]:
        """Return the sources of the values' errors: the seeds, and the validation samples if their part is known.

        With unknown intervals the covariance between seeds is NaN.
        """
        covariance = self.seed_covariance
        if covariance is None:
            half_widths = (torch.tensor(self.high) - torch.tensor(self.low)).double() / 2
            quantile = t_quantile(LEVEL, math.inf if self.freedom is None else self.freedom)
            covariance = (half_widths / quantile).square().diag()
        sources = [ValueErrors(covariance, self.freedom)]
        if self.case_covariance is not None:
            sources.append(ValueErrors(self.case_covariance))
        return sources

    @cached_property
    def with_other_cases(self) -> tuple[list[float], list[float]] | None:
        """The ends of the values' intervals for other validation samples and other seeds, ``[n]`` each. None if it is
        not known how much values depend on the validation samples.
        """
        if self.case_covariance is None or all(end != end for end in self.low):
            return None
        values = torch.tensor(self.values, dtype=torch.float64)
        low, high = joint_intervals(values, self.errors())
        return low.tolist(), high.tolist()

    @property
    def fitness(self) -> str:
        """Describe whether the values are suitable as a basis for payment."""
        if self.against:
            return " ".join([WORDS["not_payable"], *self.against.values()])
        return str(WORDS["payable"].format(self.seeds))


def ends_to_show(basis: Basis, to_pay_by: bool) -> tuple[Sequence[float], Sequence[float]]:
    """Return the ends of the intervals beside the values, ``[n]`` each.

    Where values are to pay by, they are for other cases and other seeds if those are known. Else they are for this
    validation set and other seeds.
    """
    if to_pay_by and basis.with_other_cases is not None:
        return basis.with_other_cases
    return basis.low, basis.high


def basis_of(run: Run, by: str | None = None) -> Basis:
    """Return the values by which to share a budget out: those named ``by``, or the only suitable ones.

    Raise ConfigurationError if no values or several are suitable.
    """
    if "of_rounds" in run.record:
        raise ConfigurationError(
            f"{run.folder} has values of single rounds, which {run.record['of_rounds']} ran. They are no basis for "
            "payment, because no coalition was trained. Run the federation with FederatedLoop, and ShadowShapley or "
            "flsv retrain."
        )
    known = _possible(run)
    suitable = [name for name in known if run.about(name)["to_pay_by"]]
    if any(run.retrained()):
        known, suitable = [*known, RETRAINED], [RETRAINED]
    key = _chosen(run, by, known, suitable)
    if key != RETRAINED:
        return _measured(run, key)
    basis = _retrained(run)
    if "ranking" in basis.against:
        raise ConfigurationError(
            f"{run.folder}, values by retraining ({basis.of}): {basis.against['ranking']}"
        )
    return basis


def _chosen(run: Run, by: str | None, known: Sequence[str], suitable: Sequence[str]) -> str:
    """Return the name of the values by which to share a budget out: ``by``, or the only name in ``suitable``."""
    if not known:
        raise ConfigurationError(
            f"{run.folder}: no contribution was measured, so there is nothing to share out by."
        )
    there = f"{run.folder} has values by {joined(known)}"
    if by is not None and by not in known:
        raise ConfigurationError(f"--by {by}: {there}. flsv retrain RUN adds {RETRAINED}.")
    if by is None and len(suitable) != 1:
        against = ", which the metrics' documentation advises against as a basis for payment. flsv retrain RUN adds "
        against += "suitable ones. To use these nevertheless"
        options = joined((f"--by {name}" for name in suitable or known), "or")
        raise ConfigurationError(f"{there}{'. Choose one' if suitable else against}: {options}.")
    return by or suitable[0]


def basis_shown(run: Run) -> Basis | None:
    """Return the values that a report without a budget shows: by retraining, else by the most suitable metric."""
    if any(run.retrained()):
        return _retrained(run)
    known = _possible(run)
    suitable = nearest_first(
        {name: run.about(name)["class"] for name in known if run.about(name)["to_pay_by"]}
    )
    first = next(iter([*suitable, *known, *run.metrics]), None)
    return None if first is None else _measured(run, first)


def _possible(run: Run) -> list[str]:
    """Return the metrics by which a budget could be shared out, without costs and values of pairs."""
    about = {name: run.about(name) for name in run.metrics}
    return [
        name
        for name, of in about.items()
        if of["higher_is_better"] is not False and not of["columns"]
    ]


def _measured(run: Run, metric: str) -> Basis:
    """Return a metric's values in a run, or their means over all runs of its ``flsv repeat``."""
    run = over_seeds(run)
    about, values = run.about(metric), run.final(metric)
    trained, by = (
        about["class"] == "ShadowShapley",
        run.record.get("paid_in", {}).get(metric, {}).get("by", ""),
    )
    found = [
        each.record["settings"].get("federation_seed") for each in run.runs
    ]  # other frameworks' rounds: none
    seeds = sorted(
        (str(seed) for seed in found if seed is not None), key=lambda seed: (len(seed), seed)
    )
    against = {
        "rounds": run.record.get("of_rounds"),
        "unsuitable": not about["to_pay_by"] and metric,
        "unfinished": not run.ended,
        "metric": not trained and about["to_pay_by"],
        "ranking": trained and _trained_alone(run),
        "one_seed": trained and run.seeds == 1,
        "judged": about.get("judges") == "clients",
        "small_gain": trained and is_small_gain(by, values),
    }
    return Basis(
        metric,
        f"{metric}, mean of {run.seeds} runs" if run.seeds > 1 else metric,
        ", ".join(
            _seeds_and_rounds(seeds, [each.rounds for each in run.runs], run.record["rounds"])
        ),
        values,
        *run.ends(metric),
        by=by,
        seeds=run.seeds,
        freedom=run.seeds - 1 if run.seeds > 1 else None,
        case_covariance=_case_covariance_of_runs(run.runs, metric),
        against=_sentences(against),
    )


def _case_covariance_of_runs(runs: Sequence[Run], metric: str) -> Tensor | None:
    """Return the mean over all runs of the values' covariance between draws of validation samples, or None."""
    covariances = []
    for run in runs:
        game = run.record.get("paid_in", {}).get(metric, {})
        covariance = _matrix_of(game.get("case_covariance") or [])
        if covariance is None:
            return None
        covariances.append(covariance)
    # The runs have the same validation samples, so that a mean over runs varies as much as one of them.
    return torch.stack(covariances).mean(0)


def _matrix_of(rows: Sequence[str]) -> Tensor | None:
    """Parse the rows of a matrix ``[n, n]``, or return None if there are none."""
    if not rows or not all(rows):
        return None
    return torch.tensor([parse_numbers(row) for row in rows], dtype=torch.float64)


def _trained_alone(run: Run) -> bool:
    """Return whether a run of three or more clients has trained only coalitions of one client."""
    path = run.folder / "coalitions.csv"
    known = read_rows(path, {"coalition": read_members}, skip=1) if path.is_file() else ()
    return run.num_clients > 2 and {len(row["coalition"]) for _, row in known} == {1}


def _retrained(run: Run) -> Basis:
    rows = run.retrained()
    first = next(row for row in rows if row)
    seeds = len(first["seeds"].split())
    value, low, high = ([row.get(name, NAN) for row in rows] for name in ("value", "low", "high"))
    return Basis(
        RETRAINED,
        f"retraining, measured by {titled(first['by'])}",
        retrained_from(first, run.record["rounds"]),
        value,
        low,
        high,
        by=first["by"],
        seeds=seeds,
        freedom=seed_freedom(seeds),
        seed_covariance=_matrix_of([row.get(SEED_COVARIANCE, "") for row in rows]),
        case_covariance=_matrix_of([row.get(CASE_COVARIANCE, "") for row in rows]),
        against=against_retrained([row for row in rows if row]),
    )


def against_retrained(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the reasons against paying by the values in ``retrained.csv``, as ``{reason: sentence}``."""
    first = rows[0]
    against = {
        "ranking": first.get("trainings") in RANKING_ONLY,
        "one_class": first["majority"] >= MOSTLY and percent(first["majority"]),
        "one_seed": len(first["seeds"].split()) == 1,
        "judged": first["by"].startswith(CLIENTS),
        "small_gain": is_small_gain(first["by"], [row["value"] for row in rows]),
    }
    return _sentences(against)


def _sentences(against: Mapping[str, Any]) -> dict[str, str]:
    """Return ``{reason: sentence}`` for the true values in ``against``, which are inserted into the sentences."""
    return {name: WORDS["against"][name].format(what) for name, what in against.items() if what}


def retrained_from(row: Mapping[str, Any], planned: int | None) -> str:
    """Describe how the values in a row of ``retrained.csv`` arose: coalitions, seeds, rounds and changed settings."""
    parts = [*_seeds_and_rounds(row["seeds"].split(), [row["rounds"]], planned), row.get("changed")]
    return ", ".join(filter(None, [WORDS["trainings"].get(row.get("trainings")), *parts]))


def _seeds_and_rounds(
    seeds: Sequence[str], rounds: Sequence[float], planned: int | None
) -> list[str]:
    """Describe seeds and rounds, as in "seeds 0 and 1" and "18 to 20 of 20 rounds"."""
    of = f" of {planned}" if planned and planned > 0 else ""
    had = " to ".join(f"{count:g}" for count in sorted({min(rounds), max(rounds)}))
    return [
        *([f"seed{'s' * (len(seeds) > 1)} {joined(seeds)}"] if seeds else ()),
        f"{had}{of} rounds",
    ]
