# %% [markdown]
# # Payment
#
# Four hospitals share 10,000 euros by what each has contributed to a model of tumours. A third of Quito's diagnoses
# are wrong, which it does not know. We shall run the federation five times and ask how sure the amounts are.

# %%
from functools import partial

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting, allocate
from flsv.data import ClosedSetLabelNoise
from flsv.metrics import CumulativeShapley

found = load_breast_cancer()
x = ((found.data - found.data.min(0)) / (found.data.max(0) - found.data.min(0))).astype("float32")
y = found.target_names[found.target]
names = ["Boston", "Lyon", "Osaka", "Quito"]
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def values(seed):
    L.seed_everything(seed)
    order = np.random.default_rng(seed).permutation(len(y))
    parts = dict(zip(names, np.split(order[:360], [160, 240, 280])))
    data = FederatedDataModule(
        clients={name: (x[rows], y[rows]) for name, rows in parts.items()},
        val=(x[order[360:]], y[order[360:]]),
        batch_size=16,
        corruptions=[ClosedSetLabelNoise(rate=1 / 3, clients=[3])],
    )
    module = ClassifierClient("mlp", {"hidden": [16]}, optimizer=partial(torch.optim.SGD, lr=0.1))
    value = CumulativeShapley(performance="negative_loss", weighting="samples")
    loop = FederatedLoop(metrics={"value": value}, reporting=Reporting(files=False, table=False))
    L.Trainer(max_epochs=10, callbacks=[loop], **quiet).fit(module, data)
    return loop.payable["value"]


runs = torch.stack([values(seed) for seed in range(5)])
for name, mean, spread in zip(names, runs.mean(0).tolist(), runs.std(0).tolist()):
    print(f"{name:8} {mean:+.3f} ± {spread:.3f} nats")

# %% [markdown]
# Each seed deals out other patients, so the spread includes the choice of patients. Values may be negative: the
# common model would have been better without Quito's updates. What then? There is no right rule, so agree on one
# **before** you look:

# %%
for rule in ("zero", "shift", "softmax"):
    euros = allocate(runs.mean(0), budget=10_000, negatives=rule, missing="zero", unit=0.01)
    print(f"{rule:8}", dict(zip(names, euros.tolist())))

# %% [markdown]
# Who is first and last in each run? If that changes, the order is not established, and no amount should depend on it.

# %%
order = runs.argsort(dim=1, descending=True)
print("first:", [names[client] for client in order[:, 0].tolist()])
print("last: ", [names[client] for client in order[:, -1].tolist()])

# %%
from flsv.plots import beeswarm

beeswarm(runs, names)

# %% [markdown]
# **Try it.** Leave out the corruption. Does Quito, with as many patients as Lyon, come to the same? How many runs do
# you need to be sure? From the command line: [from a run to a payment](../tutorials/payment.md).
