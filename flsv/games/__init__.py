"""Coalition games: the performance of the models that only some of the clients would have trained.

Metrics compute clients' values in these games, by a measure of :mod:`flsv.scores.performance`. In this example it is
an autoencoder's own loss:

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
>>> loop = FederatedLoop(metrics={"sv": value}, reporting=Reporting(table=False, files=False))
>>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
>>> trainer = L.Trainer(max_epochs=1, callbacks=[loop], enable_checkpointing=False, **quiet)
>>> data = FederatedDataModule("digits", partitioner=IIDPartitioner(num_clients=3), splits=Splits(max_samples=300))
>>> trainer.fit(Autoencoder(), data)
>>> loop.contributions["sv"].shape, bool(loop.contributions["sv"].isfinite().all())
(torch.Size([3]), True)

Tier: provisional.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
