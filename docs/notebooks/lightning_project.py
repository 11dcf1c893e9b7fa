# %% [markdown]
# # Your Lightning project
#
# A `LightningModule` and a `LightningDataModule` as in any project. We shall train them alone, then as a federation,
# without changing a line, and ask how much each client has lowered the validation loss.

# %%
import lightning as L
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Wines(L.LightningDataModule):
    def setup(self, stage):
        x, y = load_wine(return_X_y=True)
        x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order], torch.tensor(y)[order]
        self.train, self.val = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)


class Grower(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(13, 16), nn.ReLU(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}

# %% [markdown]
# Alone:

# %%
L.seed_everything(0)
trainer = L.Trainer(max_epochs=10, **quiet)
trainer.fit(Grower(), Wines())
print(f"alone: {trainer.callback_metrics['val_loss']:.3f}")

# %% [markdown]
# As a federation of four: a wrapper deals the training samples out, a callback is the server. The metric trains every
# coalition of clients, and measures each by what the module itself logs, `val_loss`; less is better.

# %%
from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.data import DirichletPartitioner
from flsv.metrics import ShadowShapley

L.seed_everything(0)
data = FederatedDataModule(
    Wines(), DirichletPartitioner(num_clients=4, alpha=0.5, min_samples=10, seed=2)
)
value = ShadowShapley(coalitions="all", performance="val_loss", mode="min")
loop = FederatedLoop(
    metrics={"value": value}, seed=0, reporting=Reporting(files=False, table=False)
)
trainer = L.Trainer(max_epochs=10, callbacks=[loop], **quiet)
trainer.fit(Grower(), data)
print(f"as a federation: {trainer.callback_metrics['val_loss']:.3f}")

# %% [markdown]
# The values are Shapley values over all coalitions, and sum to what the loss has fallen. Who has lowered it most, and
# does it follow the numbers of samples?

# %%
for name, samples, worth in zip(
    data.client_names, data.num_samples.tolist(), loop.contributions["value"].tolist()
):
    print(f"client {name}: {samples:3} samples, {worth:+.3f} nats")

# %%
loop.metrics["value"].plot()

# %% [markdown]
# **Try it.** Give `FederatedLoop` an `aggregator=ShapFedWA("cssv")` and the metric that it reads: [the
# tutorial](../tutorials/lightning.md) shows how.
