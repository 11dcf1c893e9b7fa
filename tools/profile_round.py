"""Which files of flsv one round crosses, and how often it goes from one to another.

Five clients, a metric that plays coalition games, contributions.csv; the second round of three is looked at. What a
newcomer has to open to follow a round is this list.

    python tools/profile_round.py [--changes]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from studies.common import quiet_trainer
from torch.utils.data import TensorDataset

import flsv
from flsv import ClassifierClient, FederatedDataModule
from flsv.data import IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.models import MLP

ROOT = Path(flsv.__file__).parent


class SecondRound(L.Callback):
    """Notes the file of every function of flsv that is called, from the first round's end to that of the second."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        sys.setprofile(self.note if trainer.current_epoch == 0 else None)

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            self.files.append(str(path.relative_to(ROOT)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", action="store_true", help="also list from where to where")
    options = parser.parse_args()
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(500, 1, 8, 8), torch.arange(500) % 5)
    data = FederatedDataModule(samples, IIDPartitioner(5), splits=Splits(server_val=0.1), batch_size=128)
    loop = flsv.FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=0)
    noted = SecondRound()
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, 3, [loop, noted], limit_val_batches=1.0)
        trainer.fit(ClassifierClient(MLP(num_classes=5, input_shape=(1, 8, 8))), data)
    calls = Counter(noted.files)
    changes = Counter((a, b) for a, b in zip(noted.files, noted.files[1:]) if a != b)
    for file, count in calls.most_common():
        print(f"{count:6d}  {file}")
    for (before, after), count in changes.most_common() if options.changes else ():
        print(f"{count:6d}  {before} -> {after}")
    print(f"{len(calls)} files, {changes.total()} changes of file, {calls.total()} calls in a round")


if __name__ == "__main__":
    main()
