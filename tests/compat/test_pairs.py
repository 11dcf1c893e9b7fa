"""A Trainer's features two by two: what each means alone (``test_trainer.py``) it means beside each of the others.

The rows of the table are chosen so that every two levels of two features meet in one of them, greedily, after D. M.
Cohen, S. R. Dalal, M. L. Fredman, G. C. Patton, "The AETG System", IEEE Transactions on Software Engineering, 1997.
Each row is trained in a federation and by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from compat.by_hand import fedavg
from compat.kinds.base import Kind, federated, images
from compat.kinds.small import Small
from compat.runs import Pair, Remembers, run
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sifted import slow_except
from torch.optim import lr_scheduler

from flsv import read_run
from flsv.csv_files import read_csv
from flsv.metrics import CosineGradientShapley

Row = Mapping[str, str]
#: Feature to its levels.
LEVELS: dict[str, Sequence[str]] = {
    "precision": ("64-true", "32-true", "bf16-mixed"),
    "accumulation": ("none", "2", "by callback"),
    "clipping": ("none", "norm", "value"),
    "schedule": ("none", "step", "epoch"),
    "checkpoint": ("none", "by contribution"),
    "stopping": ("none", "never", "after round 2"),
    "loggers": ("none", "one", "two"),
    "fits": ("once", "twice"),
}
MONITOR = "cgsv/client_0"
#: To which models are equal: rounding, which BatchNorm and a rate of 0.1 make larger from step to step.
TOLERANCES = {"64-true": 1e-12, "32-true": 1e-5, "bf16-mixed": 1e-5}
ROUNDS = 2


def all_pairs(levels: Mapping[str, Sequence[str]]) -> list[Row]:
    """Rows in which every two levels of two features meet: each time the one with most pairs that are still to come."""

    def pairs(row: Row) -> set[frozenset[tuple[str, str]]]:
        return set(map(frozenset, itertools.combinations(row.items(), 2)))

    every = [dict(zip(levels, choice)) for choice in itertools.product(*levels.values())]
    left, rows = set().union(*map(pairs, every)), []
    while left:
        rows.append(max(every, key=lambda row: len(left & pairs(row))))
        left -= pairs(rows[-1])
    return rows


ROWS = all_pairs(LEVELS)


def test_every_pair_is_in_the_table() -> None:
    for (a, of_a), (b, of_b) in itertools.combinations(LEVELS.items(), 2):
        assert {(row[a], row[b]) for row in ROWS} == set(itertools.product(of_a, of_b))
    assert len(ROWS) < 20


def options(row: Row) -> dict[str, Any]:
    """Of both Trainers."""
    given: dict[str, Any] = {"precision": row["precision"]}
    if row["accumulation"] == "2":
        given["accumulate_grad_batches"] = 2
    if row["clipping"] != "none":
        given |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": row["clipping"]}
    if row["stopping"] == "after round 2":
        given["max_epochs"] = ROUNDS + 1
    return given


def shared_callbacks(row: Row) -> list[L.Callback]:
    """Of both."""
    return [cb.GradientAccumulationScheduler({0: 2, 1: 1})] if row["accumulation"] == "by callback" else []


def watching(row: Row, folder: Path) -> list[L.Callback]:
    """The federation's own."""
    found: list[L.Callback] = []
    if row["checkpoint"] != "none":
        found.append(cb.ModelCheckpoint(folder, "{epoch}", monitor=MONITOR, mode="max", save_top_k=-1))
    if row["stopping"] != "none":
        # The first round is the best, as nothing is better by so much; the second is one without progress.
        patience = 1 if row["stopping"] == "after round 2" else 9
        found.append(cb.EarlyStopping(MONITOR, mode="max", min_delta=1e9, patience=patience))
    return found


def module_of(row: Row, state: Mapping[str, Any] | None = None) -> Small:
    make = None if row["schedule"] == "none" else lambda optimizer, trainer: lr_scheduler.ExponentialLR(optimizer, 0.5)
    module = Small(make, "step" if make is None else row["schedule"])
    if state is not None:
        module.load_state_dict(state)
    return module


def contributions(folder: Path) -> list[float]:
    """Client 0's, round by round, as the run has written them."""
    (file,) = folder.rglob("contributions.csv")
    frame = read_run(file)
    mine = frame[(frame["metric"] == "cgsv") & (frame["client"] == 0)]
    return mine.set_index("round")["value"].reindex(range(ROUNDS)).ffill().tolist()


#: Every level of every option is in a fast row.
FAST = list({(name, level): place for place, row in enumerate(ROWS) for name, level in row.items()}.values())


def test_every_level_is_in_a_fast_row() -> None:
    for name, levels in LEVELS.items():
        assert {ROWS[place][name] for place in FAST} == set(levels)


@pytest.mark.parametrize("place", slow_except(FAST, range(len(ROWS))), ids=[", ".join(row.values()) for row in ROWS])
def test_two_by_two_as_by_hand(place: int, tmp_path: Path) -> None:
    row = ROWS[place]
    state: dict[str, Any] | None = None
    for number in range(2 if row["fits"] == "twice" else 1):
        folder = tmp_path / str(number)
        loggers = [CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="tb", version="")]
        loggers = loggers[: ("none", "one", "two").index(row["loggers"])]
        saves = row["checkpoint"] != "none"
        own = watching(row, folder / "saved")
        kind = Kind(
            partial(module_of, row, state),
            images,
            partial(list, [*shared_callbacks(row), *own]),
            {**options(row), "logger": loggers or False, "enable_checkpointing": saves},
            tolerance=TOLERANCES[row["precision"]],
            clients=(2, 3),
        )
        metrics = {"cgsv": CosineGradientShapley()}
        module, loop = run(kind, folder, ROUNDS, aggregator=Remembers(), metrics=metrics)
        expected, history = fedavg(
            module_of(row, state),
            images(),
            federated(kind),
            folder,
            ROUNDS,
            partial(shared_callbacks, row),
            **options(row),
        )
        assert loop.round_index == ROUNDS
        Pair(kind, module, loop, expected, history).check()
        values = contributions(folder)
        for logger in loggers[:1]:
            rows = [row for _, row in read_csv(Path(logger.log_dir) / "metrics.csv", {})]
            assert [float(row[MONITOR]) for row in rows if row[MONITOR]] == pytest.approx(values)
        for callback in own:
            if isinstance(callback, cb.ModelCheckpoint):
                assert float(callback.best_model_score) == pytest.approx(max(values))
                best = torch.load(callback.best_model_path, weights_only=True)["state_dict"]
                after = [*(each.start for each in history[1:]), expected][values.index(max(values))].state_dict()
                for name, value in after.items():
                    torch.testing.assert_close(best[name], value, rtol=kind.tolerance, atol=kind.tolerance)
            elif isinstance(callback, cb.EarlyStopping):
                assert callback.stopped_epoch == (ROUNDS - 1 if row["stopping"] == "after round 2" else 0)
        state = module.state_dict()
