# %% [markdown]
# # Quickstart
#
# Five clients hold handwritten digits, each with other classes. They train one model, and after every round we ask
# what each has contributed to each class. Nothing is downloaded, and it takes some seconds.

# %%
from functools import partial

import lightning as L
import torch

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import DirichletPartitioner
from flsv.metrics import ClassSpecificShapley

L.seed_everything(0)
data = FederatedDataModule("digits", DirichletPartitioner(num_clients=5, alpha=0.3, seed=0))
data.setup("fit")
data

# %% [markdown]
# `alpha` says how unequal the clients are: with 100 each has all digits, with 0.1 most have two or three. Look
# for a client that lacks a digit; we shall meet it again below.

# %%
from flsv.data import plot_partition

plot_partition(data.class_counts, data.class_names, data.client_names)

# %% [markdown]
# One callback is the server. A contribution metric has a name of yours and is updated every round; an epoch of the
# trainer is a round.

# %%
loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=0, reporting=Reporting(files=False))
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = L.Trainer(max_epochs=8, callbacks=[loop], **quiet)
trainer.fit(ClassifierClient("mlp", optimizer=partial(torch.optim.SGD, lr=0.1)), data)

# %% [markdown]
# The first table has a number per client, the second one per client and class. Near 1 a client pulls a class the way
# the federation goes; near 0 it has nothing to say. As a picture:

# %%
loop.metrics["cssv"].plot()

# %% [markdown]
# **Try it.** Find the client and the digit that were missing in the first picture. Then set `alpha=100` and run all
# again: what happens to the differences between clients?
