"""Coalitions trained alone: by an ordinary fit of the members that nothing in flsv scores."""

import copy

import torch
from torch import nn

from flsv import FederatedLoop, Reporting
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from helpers.data import toy_data
from helpers.fits import all_samples

SEED, ROUNDS = 5, 3


class GameByFits:
    """The game whose coalitions' models are ordinary fits: ``game(masks)`` has minus their validation losses, ``[K]``.

    Each coalition is trained once, by ``make_trainer(cohort)``. The empty one has the module as it is.
    """

    def __init__(self, make_trainer, module, data):
        self.make_trainer = make_trainer
        self.module = module
        self.data = data
        # {members: (logits [V, M], labels [V])}
        self.outputs_by_members = {}

    def __call__(self, masks):
        utilities = []
        for members in members_of(masks):
            logits, labels = self.outputs(members)
            utilities.append(-nn.functional.cross_entropy(logits, labels))
        return torch.stack(utilities)

    def recalls(self, masks):
        """The part of each class's samples that coalitions' models find, ``[K, M]``."""
        recalls_by_coalition = []
        for members in members_of(masks):
            logits, labels = self.outputs(members)
            recalls_by_coalition.append(recalls_of_classes(logits, labels))
        return torch.stack(recalls_by_coalition)

    def outputs(self, members):
        if members not in self.outputs_by_members:
            self.outputs_by_members[members] = self.new_outputs(members)
        return self.outputs_by_members[members]

    @torch.no_grad()
    def new_outputs(self, members):
        module = copy.deepcopy(self.module)
        if members:
            trainer = self.make_trainer(FixedCohort(members))
            with torch.enable_grad():
                trainer.fit(module, self.data)
        else:
            self.data.prepare_data()
            self.data.setup("fit")
        module.eval()
        inputs, labels = all_samples(self.data.val_dataloader())
        return module(inputs).double(), labels


def recalls_of_classes(logits, labels):
    """The part of each class's samples that are found, ``[M]``."""
    is_right = logits.argmax(1) == labels
    recalls = []
    for label in labels.unique():
        is_of_class = labels == label
        recalls.append(is_right[is_of_class].double().mean())
    return torch.stack(recalls)


def make_three_clients():
    return toy_data((4, 1, 2), server_val=0.3)


def make_shadow_loop(metric=None, metrics=None, **options):
    shadow = metric or ShadowShapley(coalitions="all")
    all_metrics = {"shadow": shadow, **(metrics or {})}
    usual_options = {"seed": SEED, "reporting": Reporting(table=False)}
    return FederatedLoop(metrics=all_metrics, **{**usual_options, **options})
