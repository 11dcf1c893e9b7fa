"""Public projects' own LightningModules, unchanged, in a federation: does ``ShadowShapley`` value its clients?

    python tools/studies/public_projects.py CHECKOUTS [--only NAME ...]     the page's rows of projects
    python tools/studies/public_projects.py CHECKOUTS --precision 64-true   whether a difference is rounding

CHECKOUTS is a folder of git repositories at the commits that ``docs/results/public_projects.csv`` names, each in a
folder ``owner+name``; ``projects`` says how their modules are made. Three clients have one, two and three
parts of a small data set of the module's kind, and train for two rounds. A project's row says

- how coalitions were trained: rows, or fits and why, or what refused the module before training;
- whether the trained module's parameters and buffers are, with and without the metric, the same to the bit;
- the clients' values, by accuracy or by the value that the module logs in validation;
- how far the values of ``flsv.retrain`` with the same seed lie from these; a classifier's by its negative loss, which
  shows smaller differences than accuracies of a few samples do.

Each of the three trainings has a process of its own, so that none finds what another has left.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import grid
from projects import PROJECTS, Project
from torch import Tensor

import flsv
from flsv import FederatedLoop, Reporting
from flsv.data import FederatedDataModule, SizePartitioner, Splits
from flsv.metrics import ShadowShapley
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import ChildFailed, supervise

SEED, ROUNDS, PARTS, BATCH = 5, 2, [1, 2, 3], 16
TABLE = "Values of projects' modules"
HEAD = ["project", "module", "coalitions", "as without the metric", "values", "flsv.retrain"]


def metrics_of(project: Project) -> dict[str, ShadowShapley]:
    """Return the run's metrics: what the row shows first, what retraining is compared by last."""
    if project.by != "accuracy":
        return {"by": ShadowShapley(coalitions="all", performance=project.by, mode=project.mode)}
    return {f"by_{name}": ShadowShapley(coalitions="all", performance=name) for name in ("accuracy", "negative_loss")}


def trainer_of(project: Project, folder: str, metrics: dict[str, ShadowShapley] | None = None) -> L.Trainer:
    """Return a Trainer of the federation with some metrics."""
    loop = FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False))
    return L.Trainer(
        max_epochs=ROUNDS,
        callbacks=[loop],
        accelerator="cpu",
        devices=1,
        logger=L.pytorch.loggers.TensorBoardLogger(folder),
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        precision=project.precision,
    )


def data_of(project: Project) -> FederatedDataModule:
    """Return the project's small data set, dealt to three clients."""
    labels = None if project.by == "accuracy" else False
    given = project.data()
    batch = {} if isinstance(given, L.LightningDataModule) else {"batch_size": BATCH}
    splits = Splits() if isinstance(given, L.LightningDataModule) else Splits(server_val=0.25, seed=SEED)
    return FederatedDataModule(given, SizePartitioner(PARTS, seed=SEED), labels=labels, splits=splits, **batch)


def trained(project: Project, valued: bool) -> dict[str, Any]:
    """Train the federation, and return the module's state, the values and what was logged about coalitions."""
    metrics = metrics_of(project) if valued else {}
    with said() as lines, tempfile.TemporaryDirectory() as folder:
        L.seed_everything(SEED, verbose=False)
        module, data = project.make(), data_of(project)
        named = type(module).__name__
        trainer = trainer_of(project, folder, metrics)
        try:
            trainer.fit(module, data)
        except ConfigurationError as error:
            when = f"after {trainer.global_step} steps" if trainer.global_step else "before training"
            return {"module": named, "refused": f"refused {when}: {str(error).splitlines()[0]}"}
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    values = [metric.compute().tolist() for metric in metrics.values()]
    return {"module": named, "state": {k: v.detach() for k, v in state.items()}, "values": values, "way": way(lines)}


def retrained(project: Project) -> list[float]:
    """Return the values of ``flsv.retrain``."""
    by, mode = ("negative_loss", None) if project.by == "accuracy" else (project.by, project.mode)
    with said(), tempfile.TemporaryDirectory() as folder:
        trainer, data = trainer_of(project, folder), data_of(project)
        table = flsv.retrain(trainer, project.make, data, "all", metric=by, mode=mode, seeds=1, jobs=1)
    return table["value"].tolist()


@contextmanager
def said() -> Iterator[list[str]]:
    """Yield the list of lines that Lightning's log and warnings have."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)  # whatever has made it quiet
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield lines
    lines.extend(str(warning.message) for warning in found)


def way(lines: list[str]) -> str:
    """Return how coalitions were trained, of a run's lines: its last word about them."""
    missing = [line for line in lines if "there are no values" in line]
    if missing:
        return f"none: {missing[-1]}"
    told = [line for line in lines if " coalitions are trained " in line]
    if not told or "Reason: " not in told[-1]:
        return "rows" if told else "nothing was said"
    return "fits: " + told[-1].partition("Reason: ")[2].partition(". To train them during")[0]


def in_a_process(task: Callable[[], Any]) -> Any:
    """Return a task's answer, or how it failed, from a fork of this process."""
    return next(iter(supervise([("task", task)])))[1]


def row(project: Project, place: Path) -> list[str]:
    """Train a project in the three ways in its folder, and return its row."""
    sys.path[:0] = [str(place / project.path), str(place)]
    os.chdir(place)
    name = f"{project.repository}, {project.version}"
    with_metric = in_a_process(lambda: trained(project, True))
    without = in_a_process(lambda: trained(project, False))
    if isinstance(with_metric, ChildFailed) or "refused" in with_metric:
        failed = isinstance(with_metric, ChildFailed)
        why = f"failed: {with_metric}" if failed else with_metric["refused"]
        plain = f"failed: {without}" if isinstance(without, ChildFailed) else without.get("refused", "trains")
        title = project.make.__name__ if failed else with_metric["module"]
        return [name, title + project.note, why, f"without the metric: {plain}", "", ""]
    again = in_a_process(lambda: retrained(project))
    values = torch.tensor(with_metric["values"][-1])
    numbers = ", ".join(f"{value:.3g}" for value in with_metric["values"][0])
    if isinstance(again, ChildFailed):
        found = f"failed: {again}"
    else:
        off = float((torch.tensor(again) - values).abs().max())
        found = f"the same values, to {off:.0e}" if off else "the same values"
        found = found if off <= 1e-5 * max(1.0, float(values.abs().max())) else f"{off:.2g} off"
    title = f"{with_metric['module']}{project.note}"
    by = f"{numbers} ({project.by})"
    return [name, title, with_metric["way"], same(with_metric["state"], without), by, found]


def same(state: dict[str, Tensor], without: Any) -> str:
    """Say whether a module's state is that of the training without the metric."""
    if isinstance(without, ChildFailed):
        return f"without it: failed: {without}"
    other = without["state"]
    if state.keys() != other.keys():
        return f"no: it has other parameters or buffers ({', '.join(sorted(state.keys() ^ other.keys()))})"
    moved = [k for k, v in state.items() if not torch.equal(v.nan_to_num(), other[k].nan_to_num())]
    return f"to the bit ({len(state)} tensors)" if not moved else f"no: {', '.join(moved[:5])} of {len(state)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="+", help="parts of the names of projects or of the adapters' functions")
    parser.add_argument(
        "--csv", type=Path, help="a file to which each project's cells are added, as the page's CSV has them"
    )
    parser.add_argument("--precision", default="32-true", help="64-true shows whether a difference is rounding")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [HEAD]
    for project in (replace(project, precision=given.precision) for project in PROJECTS):
        title = f"{project.repository} {project.make.__name__}"
        place = given.checkouts.resolve() / (project.repository.replace("/", "+") * (not project.package))
        if not place.is_dir() or (given.only and not any(part.lower() in title.lower() for part in given.only)):
            continue
        found = in_a_process(lambda project=project, place=place: row(project, place))
        rows.append(found if isinstance(found, list) else [project.repository, title, str(found), "", "", ""])
        print(f"{title}: {' | '.join(rows[-1][1:])}", file=sys.stderr, flush=True)
        if given.csv:
            name, module, *cells = rows[-1]
            with given.csv.open("a", newline="") as file:
                csv.writer(file).writerows([TABLE, f"{name}, {module}", *cell] for cell in zip(HEAD[2:], cells))
    print(grid([[cell.replace("|", "/").replace("\n", " ") for cell in each] for each in rows]))


if __name__ == "__main__":
    main()
