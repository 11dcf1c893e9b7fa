"""The values that a page is about: one value per client, by which clients are ordered, drawn and paid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flsv.report.reading import Run, over_seeds
from flsv.results.text import WORDS, joined, nearest_first, percent, small_gain, titled
from flsv.utilities.csv_files import NAN, read_rows
from flsv.utilities.display import CLIENTS
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.result_file import read_members

#: Prefix of the further columns of shares in retrained.csv: shares by another score, or without one of the seeds.
SHARE_BY = "share"
WITHOUT_SEED, BY_SCORE = f"{SHARE_BY} without seed ", f"{SHARE_BY} by "
#: Name of the values by retraining.
RETRAINED = "retrained"
#: Options of ``flsv retrain`` for which so few coalitions are trained that the values rank the clients but do not tell
#: how much each is worth.
RANKING_ONLY = ("singles", "leave-one-out")
#: Text in the column ``changed`` of retrained.csv if the run drew cohorts and the trainings of its coalitions do not.
ALL_TAKE_PART = "all members of a coalition train in every round"


@dataclass(frozen=True)
class Basis:
    """One value per client, by which clients are ordered and a budget is shared out."""

    #: The name of a metric, or `"retrained"`.
    key: str
    #: The values' name as the page shows it.
    title: str
    #: A description of the runs that the values come from: seeds, rounds and date.
    of: str
    #: `[n]`, the clients' values, NaN for a client without one.
    values: Sequence[float]
    #: `[n]`, the lower ends of the values' intervals. For values of one seed from metrics that train no coalitions, all
    #: are NaN: such intervals are too narrow to contain the mean over many seeds often enough.
    low: Sequence[float]
    #: `[n]`, the upper ends of the intervals; NaN where `low` is NaN.
    high: Sequence[float]
    #: The name in `run.json` and `retrained.csv` of the performance whose change the values distribute among the
    #: clients; "" if there is none.
    by: str = ""
    #: False if the metric's documentation advises against payment by its values.
    to_pay_by: bool = True
    #: The number of seeds over which the values are averaged.
    seeds: int = 1
    #: Whether the values come from training coalitions, after the run or during it.
    trained: bool = False
    #: Whether models were scored on the clients' own validation samples instead of the server's.
    judged: bool = False
    #: Whether so few coalitions were trained that the values only rank the clients.
    ranks_only: bool = False
    #: The fraction of the validation set in its most frequent class; NaN unless `by` is the accuracy.
    majority: float = NAN
    #: A description of the coalitions that were trained; "" if none were, or if it is not known which.
    coalitions: str = ""

    @property
    def name(self) -> str:
        """Return the name of the values for use in a sentence: the metric's name, or "retraining"."""
        return "retraining" if self.key == RETRAINED else self.key

    @property
    def brackets(self) -> bool:
        """Return whether any client's value has an interval."""
        return any(end == end for end in self.low)


def basis_of(run: Run, by: str | None = None) -> Basis:
    """Return the values by which a budget is shared out: ``by``, or the only choice; raise if there is none."""
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
    if basis.ranks_only:
        raise ConfigurationError(
            f"{run.folder}: its values by retraining come from {basis.coalitions}. They rank clients, but do not say "
            "how much each is worth. Train more coalitions: flsv retrain RUN without --trainings; or share out by a "
            "metric of the run (--by)."
        )
    return basis


def basis_shown(run: Run) -> Basis | None:
    """Return the values of a page without a budget: by retraining, else by the most suitable metric; None without
    any."""
    if any(run.retrained()):
        return _retrained(run)
    known = _possible(run)
    suitable = nearest_first({name: run.about(name)["class"] for name in known if run.about(name)["to_pay_by"]})
    first = [*suitable, *known, *run.metrics][:1]
    return _measured(run, first[0]) if first else None


def _possible(run: Run) -> list[str]:
    """Return the metrics by which a budget could be shared out: no costs, and no metrics of pairs of clients."""
    about = {name: run.about(name) for name in run.metrics}
    return [name for name, of in about.items() if of["higher_is_better"] is not False and not of["columns"]]


def _chosen(run: Run, by: str | None, known: Sequence[str], suitable: Sequence[str]) -> str:
    """Return the name of the values to share out by: ``by``, or else the only name in ``suitable``."""
    if not known:
        raise ConfigurationError(f"{run.folder}: no contribution was measured, so there is nothing to share out by.")
    there = f"{run.folder} has values by {joined(known)}"
    if by is not None and by not in known:
        raise ConfigurationError(f"--by {by}: {there}. flsv retrain RUN adds {RETRAINED}.")
    if by is None and len(suitable) != 1:
        against = ", which the metrics' documentation advises against as a basis for payment. flsv retrain RUN adds "
        against += "suitable ones. To use these nevertheless"
        why = ". Choose one" if suitable else against
        options = joined((f"--by {name}" for name in suitable or known), "or")
        raise ConfigurationError(f"{there}{why}: {options}.")
    return by or suitable[0]


def _measured(run: Run, metric: str) -> Basis:
    """Return a metric's values as a basis: those of the run or, if ``flsv repeat`` made it, the means over all its
    runs."""
    run = over_seeds(run)
    about, trained = run.about(metric), run.about(metric)["class"] == "ShadowShapley"
    return Basis(
        metric,
        f"{metric}, mean of {run.seeds} runs" if run.seeds > 1 else metric,
        _of(run.runs),
        run.final(metric),
        *run.ends(metric),
        by=run.record.get("paid_in", {}).get(metric, {}).get("by", ""),
        to_pay_by=about["to_pay_by"],
        seeds=run.seeds,
        trained=trained,
        judged=about.get("judges") == "clients",
        ranks_only=trained and _trained_alone(run),
    )


def _trained_alone(run: Run) -> bool:
    """Return whether a run of three or more clients has trained only coalitions of one client."""
    path = run.folder / "coalitions.csv"
    known = read_rows(path, {"coalition": read_members}, skip=1) if path.is_file() else ()
    return run.num_clients > 2 and {len(row["coalition"]) for _, row in known} == {1}


def _retrained(run: Run) -> Basis:
    rows = run.retrained()
    first = next(row for row in rows if row)
    value, low, high = ([row.get(name, NAN) for row in rows] for name in ("value", "low", "high"))
    seeds = first["seeds"].split()
    return Basis(
        RETRAINED,
        f"retraining, measured by {titled(first['by'])}",
        ", ".join(filter(None, (*trained_from(first, run.record["rounds"]), _day(run)))),
        value,
        low,
        high,
        by=first["by"],
        seeds=len(seeds),
        trained=True,
        judged=by_partners(first["by"]),
        ranks_only=first.get("trainings") in RANKING_ONLY,
        majority=first["majority"],
        coalitions=WORDS["trainings"].get(first.get("trainings"), ""),
    )


#: Fraction of the validation set in one class from which on accuracy says little about each client's contribution.
MOSTLY = 0.7
#: Verdicts on values that may become a basis for payment.
PAYABLE = ("unfinished", "metric", "one_class", "one_seed", "judged", "seeds")


def verdict(run: Run, basis: Basis) -> str:
    """Return the name of the sentence on whether the values of ``basis`` are suitable for payment: of the first thing
    that speaks against it, or ``"judged"`` or ``"seeds"`` if nothing does."""
    reasons = {
        "rounds": "of_rounds" in run.record,
        "unsuitable": not basis.to_pay_by,
        "ranking": basis.ranks_only,
        "unfinished": not run.ended and basis.key != RETRAINED,
        "metric": not basis.trained,
        "one_class": basis.majority >= MOSTLY,
        "one_seed": basis.seeds == 1,
        "judged": basis.judged,
    }
    return next((name for name, here in reasons.items() if here), "seeds")


def fitness(run: Run, basis: Basis) -> str:
    """Return a sentence on whether the values of ``basis`` are suitable as a basis for payment, and one on a small
    gain."""
    name = verdict(run, basis)
    facts = {
        "rounds": run.record.get("of_rounds"),
        "unsuitable": basis.key,
        "one_class": percent(basis.majority),
    }
    return " ".join([WORDS["fitness"][name].format(facts.get(name, basis.seeds)), *small_gain_of(basis)])


def small_gain_of(basis: Basis) -> list[str]:
    """Return the sentence of :func:`flsv.results.text.small_gain` if the values come from trained coalitions."""
    return small_gain(basis.by, math.fsum(x for x in basis.values if x == x)) if basis.trained else []


def by_partners(by: str) -> bool:
    """Return whether the clients score the models on their own validation samples for the performance called ``by``."""
    return by.startswith(CLIENTS)


def trained_from(row: Mapping[str, Any], planned: int | None) -> tuple[str, str, str]:
    """Return texts on the seeds and rounds of values by retraining, and on changed settings ("" if there are none)."""
    return _seeds(row["seeds"].split()), _rounds([row["rounds"]], planned), row.get("changed") or ""


def retrained_from(row: Mapping[str, Any], planned: int | None) -> str:
    """Return one text about the trainings from which values by retraining come: which coalitions were trained, then the
    three texts of :func:`trained_from`."""
    return ", ".join(filter(None, (WORDS["trainings"].get(row.get("trainings")), *trained_from(row, planned))))


def _of(runs: Sequence[Run]) -> str:
    found = [run.record["settings"].get("federation_seed") for run in runs]  # rounds of other frameworks have none
    seeds = sorted((str(seed) for seed in found if seed is not None), key=lambda seed: (len(seed), seed))
    rounds = _rounds([run.rounds for run in runs], runs[0].record["rounds"])
    return ", ".join([*([_seeds(seeds)] if seeds else ()), rounds, _day(runs[0])])


def _seeds(seeds: Sequence[str]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {joined(seeds)}"


def _rounds(rounds: Sequence[float], planned: int | None) -> str:
    """Return a text such as "18 to 20 of 20 rounds": the smallest and the largest number in ``rounds``, and the number
    ``planned``."""
    of = f" of {planned}" if planned and planned > 0 else ""
    had = " to ".join(f"{count:g}" for count in sorted({min(rounds), max(rounds)}))
    return f"{had}{of} rounds"


def _day(run: Run) -> str:
    return f"run of {run.record['started'][:10]}"
