# %% [markdown]
# # A metric of your own
#
# *How much does a client still move the model?* Nobody has published that as a contribution, and it takes ten lines.
# We shall write it, test it by hand, run it beside a published one, and see that it is fooled.

# %%
from functools import partial

import lightning as L
import torch

from flsv.metrics.base import ContributionMetric, latest


class UpdateNorm(ContributionMetric):
    """How far each client moved in its last round, [num_clients]."""

    per_class = False

    def init_states(self, num_clients, num_classes):
        self.add_state("norms", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def update(self, client_ids, client_updates):
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)

    def compute(self):
        return self.norms


# %% [markdown]
# The names of `update`'s arguments say what the metric reads of a round: the cohort, and each client's update.
# Alone it is an ordinary torchmetric. Client 1 was never seen, so it is NaN, not 0:

# %%
metric = UpdateNorm(num_clients=3)
metric.update(torch.tensor([0, 2]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
metric.compute()

# %% [markdown]
# Now in a federation, in which client 0 sends random numbers instead of an update, beside leave-one-out values:

# %%
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.attacks import GradientPoisoning
from flsv.metrics import LeaveOneOut

L.seed_everything(0)
loop = FederatedLoop(
    metrics={
        "norm": UpdateNorm(),
        "left_out": LeaveOneOut(performance="negative_loss", weighting="samples"),
    },
    uploads=[GradientPoisoning(clients=[0])],
    seed=0,
    reporting=Reporting(files=False, table=False),
)
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = L.Trainer(max_epochs=5, callbacks=[loop], **quiet)
trainer.fit(
    ClassifierClient("mlp", optimizer=partial(torch.optim.SGD, lr=0.1)),
    FederatedDataModule("digits"),
)
{name: values.tolist() for name, values in loop.contributions.items()}

# %%
loop.metrics["norm"].plot()

# %% [markdown]
# Random numbers move the model as far as any update, so by the norm client 0 contributes as much as the others.
# Leave it out of the last round, and next to nothing changes.
#
# A metric is a claim about useful clients. To hold yours against others, `python tools/bench.py --metric
# my_package.UpdateNorm`, in a checkout of the repository, compares it with coalitions that were really trained. [The
# guide](../howto/own_metric.md) says how to share it as a package.
