"""Folders of runs: made without a training, or left by a command; and whether two are the same to the bit."""

import csv
import json
import math
import re

import pandas
import torch
import yaml
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from flsv.cli import main
from flsv.results.record import RECORD_VERSION
from flsv.results.run_table import SCHEMA
from flsv.utilities.csv_files import save_csv

NAMES = ("Boston", "Lyon", "Graz", "Oslo", "Turin", "Kyoto", "Lima", "Quito")


def value_of_cell(client, column, round_index):
    """A value with digits that are nowhere else; column 0 is that of all classes."""
    last_value = math.sin(1.7 * client + 0.9 * column)
    part_reached = 1 - 0.5**round_index
    return round(last_value * part_reached + 0.0137 * client + 0.001, 6)


def names_of_clients(num_clients):
    if num_clients <= len(NAMES):
        return NAMES[:num_clients]
    return tuple(str(client) for client in range(num_clients))


def rows_of_client(client, round_index, num_clients, num_classes, stderr):
    """Rows of a client in a round: round, metric, client, class and value."""
    all_classes = ""
    value_of_all = value_of_cell(client, 0, round_index)
    rows = [[round_index, "cssv", client, all_classes, value_of_all]]
    for label in range(num_classes):
        value = value_of_cell(client, label, round_index)
        rows.append([round_index, "cssv", client, label, value])
    if stderr:
        standard_error = 0.01 + 0.00123 * client
        rows.append([round_index, "cssv/stderr", client, all_classes, standard_error])

    sum_of_client_numbers = num_clients * (num_clients + 1) / 2
    weight = round((client + 1) / sum_of_client_numbers, 6)
    rows.append([round_index, "weight", client, all_classes, weight])
    return rows


CSSV = {
    "class": "ClassSpecificShapley",
    "about": "Class-specific values.",
    "guide": {"unit": "cosine", "sign": "more is better."},
    "per_class": True,
    "columns": None,
    "higher_is_better": True,
    "to_pay_by": False,
}


def make_record(names, num_classes, rounds):
    """What ``run.json`` has before the end of a run."""
    clients = range(len(names))
    hashes = {str(client): f"{client:02d}" * 8 for client in clients}
    class_counts = []
    for client in clients:
        class_counts.append([1100 * (client + 1) + label for label in range(num_classes)])

    return {
        "version": RECORD_VERSION,
        "started": "2026-01-02T03:04:05+00:00",
        "first_round": 0,
        "packages": {"flsv": "0.0", "torch": "0.0"},
        "module": "ClassifierClient",
        "algorithm": {"aggregator": "ShapFedWA", "sampler": "FullParticipation"},
        "rounds": rounds,
        "clients": list(names),
        "classes": [f"class {label}" for label in range(num_classes)],
        "samples": [100 + 7 * client for client in clients],
        "class_counts": class_counts,
        "validation": None,
        "events": [],
        "metrics": {"cssv": CSSV},
        "settings": {
            "uploads": f"[SignFlip(clients={list(names[1:2])})]",
            "federation_seed": 77123,
        },
        "hashes": {"server": "feedfacefeedface", **hashes},
        "fingerprint": {},
    }


def make_run(folder, clients=4, classes=3, rounds=5, names=None, ended=True, stderr=True):
    """Make the folder of a run with one metric, ``cssv``."""
    folder.mkdir(parents=True, exist_ok=True)
    client_names = names_of_clients(clients) if names is None else names
    rows = []
    for round_index in range(rounds):
        for client in range(clients):
            rows += rows_of_client(client, round_index, clients, classes, stderr)
    write_rows(folder, rows, client_names)

    record = make_record(client_names, classes, rounds)
    if ended:
        record["ended"] = "2026-01-02T04:04:05+00:00"
        record["rounds_done"] = rounds
        record["logged"] = {"val_accuracy": 0.875}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def make_fault_event(client, times, num_rounds, failure="large_averaged"):
    """An event of ``run.json``: updates far too large, or another kind of invalid ones."""
    return {
        "client": client,
        "what": failure,
        "first": 0,
        "last": times - 1,
        "times": times,
        "of": num_rounds,
    }


def write_rows(folder, rows, names=NAMES):
    """``contributions.csv`` of rounds, metrics, clients, classes and values, with the clients' names."""
    lines = []
    for round_index, metric, client, label, value in rows:
        class_name = "" if label == "" else f"class {label}"
        no_interval = ["", ""]
        name = names[client]
        lines.append([round_index, metric, client, label, value, name, class_name, *no_interval])
    save_csv(folder / "contributions.csv", [SCHEMA, *lines])


def make_game(folder, values, initial=0.25, measure="accuracy", rounds=3, **facts):
    """A run whose metrics share out a performance that was ``initial``.

    Args:
        folder: of the run.
        values: by metric, what each client has after the last round; NaN is a client without a value.
        initial: the performance before the first round.
        measure: the name of the performance.
        rounds: in which values grow from 0 by equal steps.
        facts: parts of ``run.json``.
    """
    num_clients = len(next(iter(values.values())))
    make_run(folder, clients=num_clients, stderr=False)
    rows = []
    for round_index in range(rounds):
        part_of_rounds = (round_index + 1) / rounds
        rows += rows_of_game(values, round_index, part_of_rounds)
        for client in range(num_clients):
            rows.append([round_index, "weight", client, "", 1 / num_clients])
    write_rows(folder, rows, names_of_clients(num_clients))

    info = {**CUMULATIVE, "about": f"Of {measure}."}
    paid_in = {}
    for metric, values_of_clients in values.items():
        total = sum(value for value in values_of_clients if not math.isnan(value))
        end = initial + total
        paid_in[metric] = {"by": measure, "start": initial, "end": end, "sum": total}
    parts = {"metrics": dict.fromkeys(values, info), "paid_in": paid_in}
    return change_record(folder, **{**parts, **facts})


def rows_of_game(values, round_index, part_of_rounds):
    all_classes = ""
    rows = []
    for metric, values_of_clients in values.items():
        for client, value in enumerate(values_of_clients):
            if not math.isnan(value):
                rows.append([round_index, metric, client, all_classes, value * part_of_rounds])
    return rows


CUMULATIVE = {
    "class": "CumulativeShapley",
    "guide": {"unit": "nats", "cost": "2^k"},
    "to_pay_by": True,
    "per_class": False,
    "columns": None,
    "higher_is_better": True,
}


def add_intervals(folder, metric, half_width):
    """The run, with intervals of this half width around a metric's values."""
    path = folder / "contributions.csv"
    table = pandas.read_csv(path)
    is_of_metric = table["metric"] == metric
    values = table.loc[is_of_metric, "value"]
    table.loc[is_of_metric, "low_over_seeds"] = values - half_width
    table.loc[is_of_metric, "high_over_seeds"] = values + half_width
    table.to_csv(path, index=False)
    return folder


def make_repeated_runs(folder, *values):
    """The folder of runs of ``flsv repeat``, a seed each, with these values of ``sv``."""
    for seed, row in enumerate(values):
        make_game(folder / f"seed_{seed}", {"sv": row}, settings={"federation_seed": seed})
    rows = "".join(f"{seed},seed_{seed}\n" for seed in range(len(values)))
    (folder / "runs.csv").write_text(f"run,folder\n{rows}")
    return folder


def change_record(folder, **changes):
    """The run, with these parts of its ``run.json``."""
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, **changes}))
    return folder


QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
FEDERATION = """
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
model:
  class_path: flsv.ClassifierClient
  init_args:
    network: softmax
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
data:
  source: digits
  partitioner: {class_path: flsv.data.SizePartitioner, init_args: {proportions: [1, 2, 4], seed: 0}}
  splits: {server_val: 0.2, seed: 0}
  batch_size: 64
federation:
  metrics: {cssv: ClassSpecificShapley}
  reporting: {table: false, figures: 0}
"""


class Tracker(DummyLogger):
    """As MLflow's with a database: its runs have no folder."""

    save_dir = None
    name = "7"
    version = "of_run"


def write_config(path, **sections):
    """A file of this federation with some sections in the place of its own."""
    config = {**yaml.safe_load(FEDERATION), **sections}
    path.write_text(yaml.safe_dump(config))
    return path


def write_config_of_two_rounds(path, metrics=None, **sections):
    """A file of this federation with seed 3, by default without metrics."""
    trainer = yaml.safe_load(FEDERATION)["trainer"]
    return write_config(
        path,
        seed_everything=3,
        trainer={**trainer, "max_epochs": 2},
        federation={"metrics": metrics or {}, "reporting": {"table": False, "figures": 0}},
        **sections,
    )


def write_table(path, rows):
    """A table of clinics; how a configuration names it."""
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return {"source": str(path), "labels": "ill", "groups": "clinic"}


def fit_by_command(folder, config, *options):
    """The run's folder, as the command line leaves it."""
    arguments = ["fit", "--config", str(config), f"--trainer.default_root_dir={folder}"]
    assert main([*arguments, *options]) == 0
    return next(folder.glob("lightning_logs/*"))


def read_output(capsys):
    """Return what has been printed, in one line: in a narrow terminal its lines are broken."""
    return " ".join(capsys.readouterr().out.split())


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


#: Of a process alone: Lightning's counts of its own batches, beside the totals that all have, and where it writes.
OF_ONE_PROCESS = re.compile(
    r"'zero_grad'|scheduler_progress|progress'.*'current'|is_last_batch|\['(csv|folder)'\]|path|best_k_models"
)


def find_differences(folder, other_folder):
    """Compare two folders of runs: what their last checkpoints hold, what they logged, their CSVs."""
    leaves = leaves_of_checkpoint(folder)
    other_leaves = leaves_of_checkpoint(other_folder)
    names = sorted(leaves.keys() | other_leaves.keys())
    differences = [name for name in names if leaves.get(name) != other_leaves.get(name)]

    for file_name in ("contributions.csv", "coalitions.csv", "metrics.txt"):
        file = folder / file_name
        other_file = other_folder / file_name
        if file.is_file() and file.read_bytes() != other_file.read_bytes():
            differences.append(file_name)
    return differences


def leaves_of_checkpoint(folder):
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    leaves = {}
    leaves_with_paths, _ = tree_flatten_with_path(checkpoint)
    for path, leaf in leaves_with_paths:
        name = keystr(path)
        if not OF_ONE_PROCESS.search(name):
            leaves[name] = comparable_value(leaf)
    return leaves


def comparable_value(leaf):
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.numpy().tobytes()
    return repr(leaf)  # NaN is NaN
