"""A federation of three clients that commands run in a moment, and what they leave."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import DummyLogger

from flsv.cli import main

CONFIGS = Path(__file__).parents[1] / "configs"
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

    save_dir, name, version = None, "7", "of_run"


def written(path: Path, **sections: Any) -> Path:
    """A file of this federation with some sections in the place of its own."""
    path.write_text(yaml.safe_dump(yaml.safe_load(FEDERATION) | sections))
    return path


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """A table of clinics; how a configuration names it."""
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    return {"source": str(path), "labels": "ill", "groups": "clinic"}


def fitted(folder: Path, config: Path) -> Path:
    """The run's folder, as the command line leaves it."""
    assert main(["fit", "--config", str(config), f"--trainer.default_root_dir={folder}"]) == 0
    return next(folder.glob("lightning_logs/*"))


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
