# %% [markdown]
# # A class on Shapley values
#
# Three people own gloves: Ann a left one, Bob and Cy a right one each. A pair sells for 1. Who should get how much?

# %%
import torch


def worth(masks):
    """What a coalition can sell: masks bool [K, 3] to [K]."""
    return (masks[:, 0] & masks[:, 1:].any(1)).float()


everybody = torch.tensor([[True, True, True]])
without_bob = torch.tensor([[True, False, True]])
print("all:", worth(everybody).item(), "without Bob:", worth(without_bob).item())

# %% [markdown]
# **Leave one out** says: nothing is lost without Bob, since Cy has the same glove; nor without Cy. So both get 0,
# although without both of them nothing can be sold. Shapley's answer (1953): let the three arrive in a random order,
# pay each what it adds on arrival, and take the mean over all orders.

# %%
from itertools import permutations

names, total = ["Ann", "Bob", "Cy"], torch.zeros(3)
for order in permutations(range(3)):
    present, before = torch.zeros(1, 3, dtype=torch.bool), 0.0
    for player in order:
        present[0, player] = True
        now = worth(present).item()
        total[player] += now - before
        before = now
dict(zip(names, (total / 6).tolist()))

# %% [markdown]
# flsv does the same by coalitions. It is the only rule with four properties: the values sum to what all have
# (**efficiency**), who adds the same gets the same (**symmetry**), who never adds anything gets 0 (**null player**),
# and values of two games add (**additivity**). Check the first three:

# %%
from flsv.functional import exact_shapley

values = exact_shapley(worth, 3).values
print(values.tolist(), "sum", values.sum().item())
print(
    "a fourth who owns nothing:",
    exact_shapley(lambda masks: worth(masks[:, :3]), 4).values.tolist(),
)

# %% [markdown]
# n players have 2^n coalitions. From random orders one gets estimates; how fast do they become good? The error falls
# with the square root of the number of evaluations.

# %%
from flsv.functional import permutation_shapley

weights = torch.linspace(1, 3, 10)


def game(masks):
    return (masks.float() @ weights).sqrt()


exact = exact_shapley(game, 10).values
for budget in (25, 100, 400):
    errors = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        errors.append(
            (permutation_shapley(game, 10, budget=budget, generator=generator).values - exact)
            .abs()
            .mean()
        )
    print(f"{budget:5} evaluations: mean error {torch.stack(errors).mean():.4f}")

# %% [markdown]
# ## In federated learning
#
# The players are clients, and a coalition is worth the performance of the average of its members' updates. Exact for
# five clients, in every round. It shows how such a game is played; by its values
# [32 % of a payment](../benchmark.md) would go to the wrong clients:

# %%
from functools import partial

import lightning as L

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import SizePartitioner
from flsv.metrics import CumulativeShapley

L.seed_everything(0)
loop = FederatedLoop(
    metrics={"value": CumulativeShapley(weighting="samples")},
    seed=0,
    reporting=Reporting(files=False, table=False),
)
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = L.Trainer(max_epochs=6, callbacks=[loop], **quiet)
trainer.fit(
    ClassifierClient("mlp", optimizer=partial(torch.optim.SGD, lr=0.1)),
    FederatedDataModule("digits", SizePartitioner([8, 4, 2, 1, 1])),
)
value = loop.contributions["value"]
print("values:", [round(v, 3) for v in value.tolist()])
print(f"sum {value.sum():.3f}, accuracy at the end {trainer.callback_metrics['val_accuracy']:.3f}")

# %%
loop.metrics["value"].plot()

# %% [markdown]
# **Questions for the class.** Clients 3 and 4 have equally many samples: why are their values not the same? What
# happens to client 0's value if it joins twice under two names? Which of the
# four properties would you give up first? And is this the game that you want to pay by, or the one in which every
# coalition trains by itself? The latter are *retraining-based Shapley values*: `ShadowShapley`, `flsv retrain`.
