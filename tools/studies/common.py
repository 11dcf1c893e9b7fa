"""What tables and benchmarks share."""

from __future__ import annotations

import copy
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

# Studies import the package benchmark, which is beside their folder.
sys.path.append(str(Path(__file__).parents[1]))


def be_quiet() -> None:
    """For a process that measures: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def quiet_trainer(
    folder: str,
    rounds: int,
    callbacks: Sequence[L.Callback],
    accelerator: str = "cpu",
    **arguments: Any,
) -> L.Trainer:
    """A trainer that neither prints, saves nor validates."""
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "devices": 1,
        **arguments,
    }
    return L.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )


class RoundTimer(L.Callback):
    """Seconds from a round's end to the next's, of the wall clock and of the processor; it stands after the loop."""

    def on_train_start(self, *hook: Any) -> None:
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.since = time.perf_counter(), time.process_time()
        self.processor_at_start = self.since[1]

    def on_train_epoch_end(self, *hook: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        self.wall.append(now[0] - self.since[0])
        self.processor.append(now[1] - self.since[1])
        self.since = now


def plain_rounds(
    server: nn.Module,
    x: Tensor,
    y: Tensor,
    clients: Sequence[Tensor],
    rounds: int,
    lr: float,
    batch: int = 32,
) -> list[tuple[float, float]]:
    """Federated averaging of clients with these rows and nothing else; seconds of the clock and processor of every
    round."""
    spent = []
    for _ in range(rounds):
        start, total = (time.perf_counter(), time.process_time()), dict[str, Tensor]()
        for own in clients:
            model = copy.deepcopy(server)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            for rows in own[torch.randperm(len(own))].to(x.device).split(batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] = total.get(name, 0) + value / len(clients)
        server.load_state_dict(total)
        if x.is_cuda:
            torch.cuda.synchronize()
        spent.append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return spent


def in_turns(
    ways: Mapping[str, Callable[[], Iterable[float]]], repeats: int
) -> dict[str, list[float]]:
    """The seconds of every way, turn by turn in one process; a first turn and each run's first round warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            measured = list(way())
            seconds[name] += measured[1:] if repeat else []
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], unit: str = "s/round") -> str:
    """Medians, least and largest, and the ratio of each median to the first's."""
    base = statistics.median(next(iter(seconds.values())))
    rows = [["", f"median {unit}", "min", "max", "ratio"]]
    for name, each in seconds.items():
        middle = statistics.median(each)
        numbers = [f"{number:.4f}" for number in (middle, min(each), max(each))]
        rows.append([name, *numbers, f"{middle / base:.3f}"])
    return grid(rows)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
