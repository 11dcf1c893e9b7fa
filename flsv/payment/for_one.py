"""for_one_client: what a participant may see. Everything on the page for one participant comes from here.

The page has the participant's own values, and nothing that reveals another participant's. Its content is selected, not
filtered: names, values, settings and hashes of other participants are never read for it, nor seeds, from which the
others' parts of the data can be derived. Numbers computed from all participants (a mean, a share of a sum, the joint
model's performance) appear only with at least :data:`MIN_CLIENTS_OF_MEANS` clients and in a run that has ended, because
the difference between two rounds' means could be the value of a single client. Means have two digits. A mean reveals
the sum of the others' values, so participants who combine their pages learn no single value as long as two others do
not join. Spreads, ranks, extremes and means per class or round would reveal more, and do not appear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pandas import Series

from flsv.payment.html import Table, table_of_texts
from flsv.payment.sections import (
    bases_beside,
    class_count_heatmap,
    class_heatmaps,
    guide_table,
    logged,
    notes_on_values,
    packages,
    sentences_on_intervals,
    sentences_on_untrained,
)
from flsv.payment.shares import Shares, findings
from flsv.results.basis import Basis
from flsv.results.reading import Run
from flsv.results.text import MESSAGES, NO_NUMBER, format_number, titled, with_intervals
from flsv.results.verdict import Verdict

#: With fewer clients, no number computed from all of them is shown to one of them.
MIN_CLIENTS_OF_MEANS = 5


def for_one_client(
    run: Run,
    client: int,
    basis: Basis | None,
    verdict: Verdict | None,
    shares: Shares | None,
) -> dict[str, Any]:
    """Return the content of the page for one client."""
    if basis is not None:
        basis = basis.for_one_client()
    heading = "What you contributed"
    if shares is not None:
        heading = f"Your share of {shares.title}"
    return {
        "title": f"Contribution of {run.label(client)}",
        "heading": heading,
        "verdict": None if verdict is None else verdict.for_one_client(),
        "front": _front_for_one(run, client, basis, shares),
        "appendix": _appendix_for_one(run, client, basis, shows_shares=shares is not None),
    }


def _front_for_one(
    run: Run,
    client: int,
    basis: Basis | None,
    shares: Shares | None,
) -> list[str | Table | None]:
    front: list[str | Table | None] = []
    if basis is None:
        front.append(MESSAGES["no_metric"])
    else:
        misses_value = math.isnan(basis.values[client])
        front.append(_values_for_one(run, client, basis, shares))
        front += notes_on_values(basis, shares, misses_value)
        front.append(_choices(run, basis))
        front += sentences_on_untrained(run, basis)

    finding = findings(run, for_one_client=True)[client]
    front.append(_participation(run, client, finding))
    if finding:
        front.append(MESSAGES["findings"])
    front.append(class_count_heatmap(run, [client], ["samples"]))
    return front


def _appendix_for_one(
    run: Run,
    client: int,
    basis: Basis | None,
    shows_shares: bool,
) -> dict[str, Any]:
    bases = bases_beside(run, basis)
    # Columns that are not classes may be other clients.
    class_metrics = filter(run.columns_are_classes, run.metrics)
    values_as_if_each_had_one = [0.0] * run.num_clients
    shows_means = _may_see_means(run, values_as_if_each_had_one)
    return {
        "Other measurements": [
            _other_measurements(run, client, bases),
            *sentences_on_intervals(bases),
        ],
        "Class by class": class_heatmaps(run, class_metrics, [client], ["you"]),
        "How to read the values": [guide_table(run, basis)],
        "What this page reveals": _sentences_on_privacy(run, shows_means, shows_shares),
        "The run": [_settings_for_one(run, client, shows_means)],
    }


def _other_measurements(
    run: Run,
    client: int,
    other_bases: Sequence[Basis],
) -> Table | str:
    """Return a table of a client's values by the other metrics."""
    rows = []
    for basis in other_bases:
        cells = with_intervals(basis.estimates.loc[[client]], " to ")
        rows.append([basis.key, *cells, _mean(run, basis.values)])
    if not rows:
        return ""
    return Table(["", "your value", "mean of all"], rows)


def _sentences_on_privacy(run: Run, shows_means: bool, has_shares: bool) -> list[str]:
    """Return sentences that say what a client's page reveals about the others."""
    if shows_means:
        return [MESSAGES["public"], MESSAGES["own_value_reveals"]]
    if run.ended:
        reason = f"this run has {run.num_clients} participants"
    else:
        reason = "this run has not ended"
    sentences = [MESSAGES["private"].format(fewest=MIN_CLIENTS_OF_MEANS, reason=reason)]
    if has_shares:
        sentences.append(MESSAGES["share_reveals"])
    sentences.append(MESSAGES["own_value_reveals"])
    return sentences


def _participation(run: Run, client: int, finding: str) -> Table | None:
    """Return a table of one client's rounds and samples, and the ``finding`` about its updates and data."""
    num_samples = run.record["samples"]
    num_rounds = run.taken_part()
    texts = {
        "rounds with your update": f"{num_rounds[client]} of {run.rounds}",
        "your training samples": str(num_samples[client]),
    }
    left_out = _left_out_of_training(run, client)
    if left_out:
        texts["your samples left out of training"] = left_out
    if _may_see_means(run, num_samples):  # from a fraction the sum follows
        fraction = num_samples[client] / max(sum(num_samples), 1)
        texts["of all training samples"] = f"{100 * fraction:.0f} %"
    if finding:
        texts["finding"] = finding
    return table_of_texts(texts)


def _left_out_of_training(run: Run, client: int) -> str:
    """Return how many of a client's samples it did not train on, with the reasons, "" if there are none."""
    reasons: Mapping[str, str] = MESSAGES["left_out"]
    texts = []
    for option, numbers in run.record.get("left_out", {}).items():
        if numbers[client]:
            texts.append(f"{numbers[client]} {reasons[option]}")
    return ", ".join(texts)


def _choices(run: Run, basis: Basis) -> str:
    """Return a sentence that says who chose the score and the validation samples, "" without a score."""
    if not basis.by:
        return ""
    sentences: Mapping[str, str] = MESSAGES["chosen"]
    if basis.inputs.evaluated_by_clients:
        return sentences["by clients"].format(score=titled(basis.by))
    validation = run.record["validation"]
    if not validation:
        return sentences["score"].format(score=titled(basis.by))
    samples = validation["of"]
    values_as_if_each_had_one = [0.0] * run.num_clients
    # From the number of a part of all samples, the number of all follows.
    if validation["rows"] is not None and _may_see_means(run, values_as_if_each_had_one):
        samples = f"{validation['rows']:,} samples, {samples}"
    return sentences["score and samples"].format(score=titled(basis.by), samples=samples)


def _columns_used(run: Run) -> dict[str, str]:
    """Return the columns of the participants' tables that models read, predict and do not read, by title."""
    dictionary = run.record.get("dictionary")
    if dictionary is None:
        return {}
    texts = {"columns used": ", ".join(dictionary["columns"])}
    if dictionary.get("target"):
        texts["column to predict"] = dictionary["target"]
    if dictionary.get("excluded"):
        texts["columns not used"] = ", ".join(dictionary["excluded"])
    return texts


def _settings_for_one(run: Run, client: int, shows_means: bool) -> Table | None:
    """Return a table of the classes of strategies and metrics, without arguments, which may name other clients."""
    texts = {**_columns_used(run), **run.record["algorithm"]}
    for metric in run.metrics:
        texts[metric] = run.metric_info(metric)["class"]
    if shows_means:
        # Names of values that a model logs may contain a client's name.
        client_names = [name for name in run.client_names if not name.isdigit()]
        for value_name, value in logged(run).items():
            if not any(name in value_name for name in client_names):
                texts[value_name] = value
    texts |= packages(run)

    data_hash = run.record["hashes"].get(str(client))
    if data_hash:
        texts["hash of your samples and labels"] = data_hash
    return table_of_texts(texts)


def _values_for_one(
    run: Run,
    client: int,
    basis: Basis,
    shares: Shares | None,
) -> Table:
    """Return the main table of a client's page: its value and share, beside the mean of all."""
    estimate = basis.estimates.loc[[client]]  # a table of one row
    value_texts = with_intervals(estimate, between=" to ")
    text_of_head = {
        "": basis.title,
        "your value": value_texts[0],
        "mean of all": _mean(run, basis.values),
    }
    if shares is not None:
        share_text, amount_text = shares.cells(client)
        text_of_head["share"] = share_text
        text_of_head["amount"] = amount_text
    row = list(text_of_head.values())
    return Table(list(text_of_head), [row])


def _may_see_means(run: Run, values: Sequence[float]) -> bool:
    """Return whether the run has ended, and five clients have a value."""
    num_values = sum(not math.isnan(value) for value in values)
    return run.ended and num_values >= MIN_CLIENTS_OF_MEANS


def _mean(run: Run, values: Sequence[float]) -> str:
    """Format the mean of all clients' values, a dash if it is hidden."""
    # With more digits, the values of others could be derived from several pages.
    if not _may_see_means(run, values):
        return NO_NUMBER
    return format_number(Series(values).mean(), digits=2)
