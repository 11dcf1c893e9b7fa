"""Which files of flsv one round crosses, and how often it goes from one to another.

Five clients, a metric that plays coalition games, contributions.csv and TensorBoard; the second round of three is
looked at. What a newcomer has to open to follow a round is this list.

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
from torch.utils.data import TensorDataset

import flsv
from flsv import ClassifierClient
from flsv.data import FederatedDataModule, IIDPartitioner, Splits
from flsv.metrics import ClassSpecificShapley
from flsv.models import MLP

ROOT = Path(flsv.__file__).parent
LOOKED_AT = 1


class RoundProfile:
    """Counts calls of functions of flsv by file, and calls and returns that change the file.

    Attributes:
        calls: by file.
        changes: from a file to another, by the pair.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.changes: Counter[tuple[str, str]] = Counter()
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        path = frame.f_code.co_filename
        if not path.startswith(str(ROOT)):
            return
        file = str(Path(path).relative_to(ROOT))
        self.calls[file] += 1
        if self._last and file != self._last:
            self.changes[self._last, file] += 1
        self._last = file


class OfOneRound(L.Callback):
    """Looks from the end of the round before to the end of the one that is looked at."""

    def __init__(self, profile: RoundProfile) -> None:
        self.profile = profile

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == LOOKED_AT - 1:
            sys.setprofile(self.profile)
        else:
            sys.setprofile(None)


def profiled() -> RoundProfile:
    """A small federation's round."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(500, 1, 8, 8), torch.arange(500) % 5)
    folder = tempfile.mkdtemp()
    profile = RoundProfile()
    loop = flsv.FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=0)
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=[loop, OfOneRound(profile)],
        default_root_dir=folder,
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    federated = FederatedDataModule(data, partitioner=IIDPartitioner(5), splits=Splits(server_val=0.1), batch_size=128)
    trainer.fit(ClassifierClient(MLP(num_classes=5, input_shape=(1, 8, 8))), federated)
    sys.setprofile(None)
    return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", action="store_true", help="also list from where to where")
    asked = parser.parse_args()
    profile = profiled()
    for file, calls in profile.calls.most_common():
        print(f"{calls:6d}  {file}")
    if asked.changes:
        for (before, after), times in profile.changes.most_common():
            print(f"{times:6d}  {before} -> {after}")
    calls, changes = profile.calls.total(), profile.changes.total()
    print(f"{len(profile.calls)} files, {changes} changes of file, {calls} calls in a round")


if __name__ == "__main__":
    main()
