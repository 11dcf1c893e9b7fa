"""Networks beside the trained one: teachers, averaged copies, and layers that are never called."""

import copy

import pytest
import torch
from torch import nn

from flsv.aggregation import ShapFedWA
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from helpers import refused
from helpers.data import CLASSES, FEATURES
from helpers.fits import fit, state_vector
from helpers.models import Plain


class WithTeacher(Plain):
    """Trains ``net``, and has a copy of it that no optimizer holds."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        target = self.teacher(x).detach()
        distance = nn.functional.mse_loss(self(x), target)
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * distance

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class WithFrozenTeacher(WithTeacher):
    """Its optimizer holds the teacher, which is frozen."""

    def __init__(self):
        super().__init__()
        self.teacher.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithMeanTeacher(WithTeacher):
    """Its teacher is the running mean of ``net``."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        means = self.teacher.parameters()
        for mean, parameter in zip(means, self.net.parameters()):
            mean.data.lerp_(parameter.data, 0.1)


class WithTrainedTeacher(WithTeacher):
    """Its optimizer holds the teacher, whose output is detached."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithUnusedLayer(Plain):
    """Its network is a convolution, and a linear layer after it is never called."""

    def __init__(self):
        net = nn.Sequential(
            nn.Unflatten(1, (FEATURES, 1)),
            nn.Conv1d(FEATURES, CLASSES, kernel_size=1),
            nn.Flatten(),
        )
        super().__init__(net=net)
        self.unused = nn.Linear(8, CLASSES)


def values_by(module, folder, head=None):
    metrics = {"cssv": ClassSpecificShapley(head=head)}
    loop = FederatedLoop(metrics=metrics, seed=1)
    fit(loop, folder, module)
    return loop.contributions["cssv"]


@pytest.mark.fast_rows
@pytest.mark.parametrize("make", [WithTeacher, WithFrozenTeacher, WithMeanTeacher])
def test_class_values_are_those_of_the_network_that_is_trained(tmp_path, make):
    values = values_by(make(), tmp_path / "default")

    expected_values = values_by(make(), tmp_path / "named", head="net.4")
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0)
    assert values.abs().min() > 0.01


def test_private_head_is_that_of_the_network_that_is_trained(tmp_path):
    loop = FederatedLoop(share=["!head"], seed=1)

    fit(loop, tmp_path, WithTeacher())

    assert loop.space.kept_names == ("net.4.weight", "net.4.bias")


def test_weights_by_classes_are_those_of_the_network_that_is_trained(tmp_path):
    models = {}
    for head in (None, "net.4"):
        metrics = {"cssv": ClassSpecificShapley(head=head)}
        loop = FederatedLoop(
            aggregator=ShapFedWA("cssv"),
            metrics=metrics,
            seed=1,
        )
        trainer = fit(loop, tmp_path / str(head), WithTeacher())
        models[head] = state_vector(trainer)

    torch.testing.assert_close(models[None], models["net.4"], rtol=0, atol=0)


def test_two_trained_networks_are_refused_before_training(tmp_path):
    with refused(
        r"need the module's classifier head, but each of its layers 'net.4', 'teacher.4' may"
    ):
        values_by(WithTrainedTeacher(), tmp_path)


def test_private_head_of_two_trained_networks_is_refused(tmp_path):
    loop = FederatedLoop(share=["!head"], seed=1)

    with refused("'head' is no layer of the module, since each of its layers 'net.4', 'teacher.4'"):
        fit(loop, tmp_path, WithTrainedTeacher())


def test_head_that_the_first_training_has_not_changed_is_refused(tmp_path):
    with refused(
        "read the classifier head 'unused', but no client's first training has changed it"
    ):
        values_by(WithUnusedLayer(), tmp_path)
