"""One run with everything in play, for the resume tests: ``python resume_run.py FOLDER --die R B``.

``--die R B`` kills the process, as kill -9 does, at batch B of round R.
"""

import argparse
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from toys import Plain, adam, fit, network, toy_data

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.personalization import Personalizer
from flsv.sampling import UniformSampler


class Mixture(Personalizer):
    """Half the global model, half the client's own."""

    def personalize(self, round: Any, contributions: Any, models: Any) -> dict[int, Tensor]:
        return {i: (x + round.server_vector) / 2 for i, x in zip(round.client_ids.tolist(), round.client_vectors)}


class Noisy(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_noise", torch.rand(()))

    def on_train_epoch_start(self) -> None:
        self.log("epoch_noise", torch.rand(()))


class Stop(Callback):
    """Ends the run in the middle of a round: by SIGKILL, or by an exception."""

    def __init__(self, round_index: int, batch: int, error: type[BaseException] | None = None) -> None:
        self.round_index, self.batch, self.error = round_index, batch, error

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.current_epoch == self.round_index and trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            if self.error is not None:
                raise self.error("stopped by the test")
            os.kill(os.getpid(), signal.SIGKILL)


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "checkpoints", filename="last", enable_version_counter=False)


def run(
    folder: Path, rounds: int = 5, callbacks: Sequence[Callback] = (), ckpt_path: Any = None
) -> tuple[FederatedLoop, L.LightningModule]:
    loop = FederatedLoop(
        ShapFedWA("cssv"), {"cssv": ClassSpecificShapley(momentum=0.7)}, personalizer=Mixture(),
        sampler=UniformSampler(3), optimizer_state="persist", evaluation=ClientEvaluation(every=2),
        reporting=Reporting(figures=4), local_epochs=2, seed=11,
    )  # fmt: skip
    steps = partial(torch.optim.lr_scheduler.StepLR, step_size=7, gamma=0.8)
    module = Noisy(network(dropout=0.3), adam, steps, interval="step")
    options: dict[str, Any] = {
        "logger": TensorBoardLogger(folder, name="", version="log"), "enable_checkpointing": True,
        "callbacks": [*callbacks, EarlyStopping("val_acc", mode="max", patience=100), checkpoints(folder)],
    }  # fmt: skip
    fit(loop, folder, module, toy_data((4, 2, 3, 3, 2)), rounds, ckpt_path, **options)
    return loop, module


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", type=int, nargs=2, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run(arguments.folder, callbacks=[Stop(*arguments.die)])
