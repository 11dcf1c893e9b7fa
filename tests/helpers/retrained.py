"""Values by retraining: what flsv retrain has trained, and the table that it leaves."""

import json
import math
from dataclasses import replace

from flsv.retraining import coalitions as coalitions_of_run
from flsv.retraining.copied_fits import CopiedFits
from flsv.values.coalition_files import read_coalitions
from flsv.values.designs import BySize
from helpers.runs import SCHEMA, change_record, read_rows, save_csv

CLASS = {
    "class": "ShadowShapley",
    "about": "Values by retraining.",
    "guide": {},
    "per_class": False,
    "columns": None,
    "higher_is_better": True,
    "to_pay_by": True,
}


def add_retrained_runs(
    folder,
    values,
    other_values=None,
    *,
    half_width=0.02,
    measure="accuracy",
    seeds=(0, 1, 2),
    rounds=3,
    **facts,
):
    """A run, with runs of flsv retrain that have these values with each seed, by this measure and by others. A client
    without a value has NaN. ``facts`` are those of ``run.json`` on the values."""
    measures = {"value": measure}
    values_by_metric = {"value": values}
    for other_measure, values_by_other in (other_values or {}).items():
        metric = f"by_{other_measure}"
        measures[metric] = other_measure
        values_by_metric[metric] = values_by_other

    record = json.loads((folder / "run.json").read_text())
    record |= {"events": [], "metrics": {}, "paid_in": {}}
    evaluators = "clients" if measure.startswith("clients'") else "server"
    for metric, values_of_clients in values_by_metric.items():
        record["metrics"][metric] = {**CLASS, "evaluators": evaluators}
        record["paid_in"][metric] = {
            "by": measures[metric],
            "start": 0.1,
            "end": 0.1 + sum(values_of_clients),
            "source": "outputs",
            "stderr": [0.0] * len(values_of_clients),
            **facts,
        }
    last_round = rounds - 1
    rows = rows_with_intervals(values_by_metric, record["clients"], last_round, half_width)
    write_retrained_runs(folder / "retrained", record, rows, seeds)
    return folder


def write_retrained_runs(folder, record, rows, seeds):
    """Write a run of each seed, and the list of them."""
    lines = ["run,folder"]
    for seed in seeds:
        run = folder / f"seed_{seed}"
        run.mkdir(parents=True)
        settings = {**record["settings"], "federation_seed": seed}
        (run / "run.json").write_text(json.dumps({**record, "settings": settings}))
        save_csv(run / "contributions.csv", [SCHEMA, *rows])
        lines.append(f"seed_{seed},seed_{seed}")
    (folder / "runs.csv").write_text("\n".join(lines) + "\n")


def rows_with_intervals(values_by_metric, names, round_index, half_width):
    """Rows of ``contributions.csv``, with an interval of this half width around each value."""
    rows = []
    for metric, values_of_clients in values_by_metric.items():
        for client, value in enumerate(values_of_clients):
            if not math.isnan(value):
                label = class_name = ""  # of all classes
                low = value - half_width
                high = value + half_width
                name = names[client]
                row = [round_index, metric, client, label, value, name, class_name, low, high]
                rows.append(row)
    return rows


def make_trained(folder, evaluators="server", **game):
    """A run by ``make_game``, whose first metric alone is left, with values of trained coalitions."""
    record = json.loads((folder / "run.json").read_text())
    metric, performance = next(iter(record["paid_in"].items()))
    facts = {"start": 0.1, "end": 0.6, "majority": 0.2, "cases": 100, "source": "outputs"}
    return change_record(
        folder,
        metrics={metric: {**CLASS, "evaluators": evaluators}},
        paid_in={metric: {**performance, **facts, **game}},
    )


def retrained_rows(run, metric="value"):
    """The rows of the clients' mean values, or of those by another score."""
    rows = read_rows(run / "retrained" / "repeat.csv")
    return [row for row in rows if row["metric"] == metric]


def retrained_values(run):
    return [float(row["mean"]) for row in retrained_rows(run)]


def stored_coalitions(run):
    """The coalitions whose models are stored in a run's folder, without the empty one and the run's own."""
    trainings = read_coalitions(run / "coalitions")
    coalitions = {training.members for training in trainings if training.members}
    grand_coalition = max(coalitions, key=len, default=())
    return coalitions - {grand_coalition}


def record_fits(monkeypatch):
    """The coalitions whose fits are begun from now on."""
    trained: set[tuple[int, ...]] = set()
    train = CopiedFits.train

    def record_and_train(fits, jobs):
        trained.update(job.members for job in jobs)
        return train(fits, jobs)

    monkeypatch.setattr(CopiedFits, "train", record_and_train)
    return trained


def choose_differently_with_each_seed(monkeypatch):
    """Let the first run that names no coalitions train all of three clients, and the second each client alone."""
    designs = iter(["both", "singles"])
    choose = coalitions_of_run.choose

    def choose_next(request, prices):
        if request.design is None:
            request = replace(request, design=BySize(next(designs)))
        return choose(request, prices)

    monkeypatch.setattr(coalitions_of_run, "choose", choose_next)
