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
    """Every one is another, with digits that are nowhere else."""
    return round(
        math.sin(1.7 * client + 0.9 * column) * (1 - 0.5**round_index) + 0.0137 * client + 0.001, 6
    )


def make_run(
    folder,
    clients=4,
    classes=3,
    rounds=5,
    names=None,
    ended=True,
    stderr=True,
):
    """Make the folder of a run with one metric, ``cssv``."""
    folder.mkdir(parents=True, exist_ok=True)
    client_names = names
    if names is None:
        has_names = clients <= len(NAMES)
        client_names = NAMES[:clients] if has_names else tuple(map(str, range(clients)))

    rows = []
    for r in range(rounds):
        for i in range(clients):
            rows.append([r, "cssv", i, "", value_of_cell(i, 0, r)])
            rows += [[r, "cssv", i, j, value_of_cell(i, j, r)] for j in range(classes)]
            rows += [[r, "cssv/stderr", i, "", 0.01 + 0.00123 * i]] if stderr else []
            rows.append([r, "weight", i, "", round((i + 1) / (clients * (clients + 1) / 2), 6)])

    write_rows(folder, rows, client_names)
    record = {
        "version": RECORD_VERSION,
        "started": "2026-01-02T03:04:05+00:00",
        "first_round": 0,
        "packages": {"flsv": "0.0", "torch": "0.0"},
        "module": "ClassifierClient",
        "algorithm": {"aggregator": "ShapFedWA", "sampler": "FullParticipation"},
        "rounds": rounds,
        "clients": list(client_names),
        "classes": [f"class {j}" for j in range(classes)],
        "samples": [100 + 7 * i for i in range(clients)],
        "class_counts": [[1100 * (i + 1) + j for j in range(classes)] for i in range(clients)],
        "validation": None,
        "events": [],
        "metrics": {
            "cssv": {
                "class": "ClassSpecificShapley",
                "about": "Class-specific values.",
                "guide": {"unit": "cosine", "sign": "more is better."},
                "per_class": True,
                "columns": None,
                "higher_is_better": True,
                "to_pay_by": False,
            }
        },
        "settings": {
            "uploads": f"[SignFlip(clients={list(client_names[1:2])})]",
            "federation_seed": 77123,
        },
        "hashes": {
            "server": "feedfacefeedface",
            **{str(i): f"{i:02d}" * 8 for i in range(clients)},
        },
        "fingerprint": {},
    }
    if ended:
        record |= {
            "ended": "2026-01-02T04:04:05+00:00",
            "rounds_done": rounds,
            "logged": {"val_accuracy": 0.875},
        }

    (folder / "run.json").write_text(json.dumps(record))
    return folder


def make_fault_event(client, times, num_rounds, kind="large_averaged"):
    """An event of ``run.json``: updates far too large, or another kind of invalid ones."""
    return {
        "client": client,
        "what": kind,
        "first": 0,
        "last": times - 1,
        "times": times,
        "of": num_rounds,
    }


def write_rows(folder, rows, names=NAMES):
    """``contributions.csv`` of rounds, metrics, clients, classes and values, with the clients' names."""
    lines = []
    for *row, class_number, value in rows:
        class_name = "" if class_number == "" else f"class {class_number}"
        lines.append([*row, class_number, value, names[row[2]], class_name, "", ""])
    save_csv(folder / "contributions.csv", [SCHEMA, *lines])


def make_game(
    folder,
    values,
    initial=0.25,
    measure="accuracy",
    rounds=3,
    **facts,
):
    """A run whose metrics share out a performance that was ``initial``, with these last values; ``facts`` go into
    ``run.json``."""
    clients = len(next(iter(values.values())))
    make_run(folder, clients=clients, stderr=False)
    record = json.loads((folder / "run.json").read_text())
    rows = []
    for r in range(rounds):
        for name, row in values.items():
            rows += [
                [r, name, i, "", value * (r + 1) / rounds]
                for i, value in enumerate(row)
                if value == value
            ]
        weight = 1 / clients
        rows += [[r, "weight", i, "", weight] for i in range(clients)]

    write_rows(folder, rows, record["clients"])
    paid_in = {}
    for name, row in values.items():
        total = sum(value for value in row if value == value)
        paid_in[name] = {
            "by": measure,
            "start": initial,
            "end": initial + total,
            "sum": total,
        }

    guide = {"unit": "nats", "cost": "2^k"}
    kind = {
        "class": "CumulativeShapley",
        "about": f"Of {measure}.",
        "guide": guide,
        "to_pay_by": True,
    }
    record |= {
        "metrics": {
            name: {**kind, "per_class": False, "columns": None, "higher_is_better": True}
            for name in values
        },
        "paid_in": paid_in,
        **facts,
    }
    (folder / "run.json").write_text(json.dumps(record))

    return folder


def add_intervals(folder, metric, half_width):
    """The run, with intervals of this half width around a metric's values."""
    path = folder / "contributions.csv"
    table = pandas.read_csv(path)
    is_of_metric = table["metric"] == metric
    table.loc[is_of_metric, "low_over_seeds"] = table["value"] - half_width
    table.loc[is_of_metric, "high_over_seeds"] = table["value"] + half_width
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
    path.write_text(yaml.safe_dump(yaml.safe_load(FEDERATION) | sections))
    return path


def write_config_of_two_rounds(path, metrics=None, **sections):
    """A file of this federation with seed 3, by default without metrics."""
    return write_config(
        path,
        seed_everything=3,
        trainer={**yaml.safe_load(FEDERATION)["trainer"], "max_epochs": 2},
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
OWN = re.compile(
    r"'zero_grad'|scheduler_progress|progress'.*'current'|is_last_batch|\['(csv|folder)'\]|path|best_k_models"
)


def find_differences(a, b):
    """Compare two folders of runs: what their last checkpoints hold, what they logged, their CSVs."""
    leaves, other_leaves = (
        leaves_of(torch.load(folder / "last.ckpt", weights_only=True)) for folder in (a, b)
    )
    different = []
    for path in {**leaves, **other_leaves}:
        if leaves.get(path) != other_leaves.get(path):
            different.append(path)

    for name in ("contributions.csv", "coalitions.csv", "metrics.txt"):
        if not (a / name).is_file():
            continue
        if (a / name).read_bytes() != (b / name).read_bytes():
            different.append(name)

    return different


def leaves_of(checkpoint):
    leaves = {}
    for path, leaf in tree_flatten_with_path(checkpoint)[0]:
        name = keystr(path)
        if not OWN.search(name):
            leaves[name] = comparable_value(leaf)
    return leaves


def comparable_value(leaf):
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.numpy().tobytes()
    return repr(leaf)  # NaN is NaN
