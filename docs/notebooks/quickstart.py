# %% [markdown]
# # Quickstart
#
# Five clients hold handwritten digits, each with other classes. They train one model, and we ask how much each has
# added to its accuracy, and to which classes. Nothing is downloaded, and it takes some seconds.

# %%
from functools import partial

import lightning as L
import torch

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import DirichletPartitioner
from flsv.metrics import ClassSpecificShapley, ShadowShapley

L.seed_everything(0)
data = FederatedDataModule("digits", DirichletPartitioner(num_clients=5, alpha=0.3, seed=0))
data.setup("fit")

# %% [markdown]
# `alpha` says how unequal the clients are: with 100 each has all digits, with 0.1 most have two or three. Look
# for a client that lacks a digit; we shall meet it again below.

# %%
from flsv.data import plot_partition

plot_partition(data.class_counts, data.class_names, data.client_names)

# %% [markdown]
# One callback is the server. A contribution metric has a name of yours and is updated every round; an epoch of the
# trainer is a round. `ShadowShapley` trains every group of clients, too.

# %%
metrics = {"value": ShadowShapley(), "cssv": ClassSpecificShapley()}
loop = FederatedLoop(metrics=metrics, seed=0, reporting=Reporting(files=False))
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = L.Trainer(max_epochs=20, callbacks=[loop], **quiet)
model = ClassifierClient(
    "mlp", network_args={"hidden": [64]}, optimizer=partial(torch.optim.SGD, lr=0.1)
)
trainer.fit(model, data)

# %% [markdown]
# `value` is how much accuracy each client adds, its Shapley value over all coalitions, and `share` its part in the sum
# of these. As a picture:

# %%
loop.metrics["value"].plot()

# %% [markdown]
# Which classes? `cssv` is the cosine of each client's update for a digit with the joint update: near 1 both point the
# same way, near 0 the client's update says nothing about the digit. Do not pay by it.

# %%
loop.metrics["cssv"].plot()

# %% [markdown]
# **Try it.** Find the client and the digit that were missing in the first picture. Then set `alpha=100` and run all
# again: what happens to the differences between clients?
