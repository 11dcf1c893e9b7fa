"""Coalition games: how good the model would be with only some clients.

Metrics compute the clients' values from these games.

The performance measures are listed in :mod:`flsv.games.performance`. This example values the clients that train an
autoencoder, by the autoencoder's own validation loss:

>>> import tempfile
>>> import lightning as L
>>> import torch
>>> from flsv import FederatedDataModule, FederatedLoop, Reporting
>>> from flsv.data import IIDPartitioner, Splits
>>> from flsv.metrics import PartialFederatedShapley
>>> class Autoencoder(L.LightningModule):
...     def __init__(self):
...         super().__init__()
...         self.net = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, 64))
...     def training_step(self, batch, batch_idx):
...         x = batch[0].flatten(1)
...         return torch.nn.functional.mse_loss(self.net(x), x)
...     def validation_step(self, batch, batch_idx):
...         self.log("val_loss", self.training_step(batch, batch_idx))
...     def configure_optimizers(self):
...         return torch.optim.Adam(self.parameters())
>>> value = PartialFederatedShapley(performance="val_loss", mode="min")
>>> loop = FederatedLoop(metrics={"sv": value}, reporting=Reporting(table=False))
>>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
>>> trainer = L.Trainer(max_epochs=1, callbacks=[loop], default_root_dir=tempfile.mkdtemp(), **quiet)
>>> data = FederatedDataModule("digits", partitioner=IIDPartitioner(num_clients=3), splits=Splits(max_samples=300))
>>> trainer.fit(Autoencoder(), data)
>>> loop.contributions["sv"].shape, bool(loop.contributions["sv"].isfinite().all())
(torch.Size([3]), True)
"""

from flsv.games.coalition_games import CoalitionGames
from flsv.games.coalition_utility import CoalitionTable, CoalitionUtility, Renormalized, Weighting
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.performance import ModelScore, performance_of
from flsv.games.validated_models import ValidatedModels
from flsv.games.vector_evaluator import METRICS, Scores, UtilityMetric, VectorEvaluator

__all__ = [
    "METRICS",
    "CoalitionGames",
    "CoalitionTable",
    "CoalitionUtility",
    "ModelEvaluator",
    "ModelScore",
    "Renormalized",
    "Scores",
    "UtilityMetric",
    "ValidatedModels",
    "VectorEvaluator",
    "Weighting",
    "performance_of",
]
