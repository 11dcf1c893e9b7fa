"""FederatedLoop(share=...) against the same loop written by hand over state_dicts."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, PartialFederatedShapley
from flsv.sampling import FixedCohort
from helpers import refused, warns
from helpers.data import CLASSES, toy_data
from helpers.fits import (
    assert_private_parts,
    client_tensors,
    fit,
    fit_and_save,
    make_loop_of_three_clients,
)
from helpers.loops_by_hand import (
    ROUNDS,
    assert_same_state,
    cohort_of_round,
    fedavg_by_hand,
    make_unequal_data,
    train_by_sgd,
)
from helpers.models import Plain, loop_of, network

pytestmark = pytest.mark.filterwarnings("ignore:.*tensors stay at their clients.*")
NORM = ["1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
HEAD = ["4.weight", "4.bias"]


def make_frozen_network():
    net = network()
    net[:2].requires_grad_(False)
    return net


def assert_private_entries_moved_at_clients_only(names, initial_state, global_state, private_parts):
    for name in names:
        initial = initial_state[name]
        assert torch.equal(global_state[name], initial)
        drifts = [(part[name] - initial).abs().max() for part in private_parts.values()]
        assert max(drifts) > 1e-3


def assert_clients_are_evaluated_with_their_own_part(federated, data, global_model, private_parts):
    """Who was in no cohort is evaluated with the initial part."""
    assert "accuracy" in federated.client_scores
    for client, accuracy in enumerate(federated.client_scores["accuracy"].tolist()):
        client_model = copy.deepcopy(global_model).eval()
        private_part = private_parts.get(client, {})
        client_model.load_state_dict({**client_model.state_dict(), **private_part})
        inputs, labels = zip(*data.client_loader(client, "test"))
        is_right = client_model(torch.cat(inputs)).argmax(-1) == torch.cat(labels)
        # A client tells its scores in three significant digits.
        assert accuracy == pytest.approx(float(is_right.float().mean()), rel=5e-3)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("share", "private"),
    [
        (["!norm"], NORM),  # FedBN
        (["!head"], HEAD),  # FedPer
        (lambda name, tensor: tensor.ndim == 2, ["4.bias", *NORM]),
    ],
)
def test_shared_and_private_parts_equal_those_of_the_loop_by_hand(tmp_path, share, private):
    net = network()
    assert set(private) <= net.state_dict().keys()
    expected, private_parts = fedavg_by_hand(net, train_by_sgd, private=private)
    federated = make_loop_of_three_clients(share=share, evaluation=ClientEvaluation(every=ROUNDS))
    module = Plain(copy.deepcopy(net))
    data = make_unequal_data()

    fit(federated, tmp_path, module, data, rounds=ROUNDS)

    assert_same_state(module.net, expected)
    assert_private_parts(federated, private_parts)
    assert_private_entries_moved_at_clients_only(
        private,
        initial_state=net.state_dict(),
        global_state=module.net.state_dict(),
        private_parts=private_parts,
    )
    assert_clients_are_evaluated_with_their_own_part(federated, data, expected, private_parts)


class PredictsItsOwnClass(Plain):
    """Whoever trains comes to predict the class of its own number, whatever it sees."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.shift = nn.Parameter(torch.zeros(CLASSES), requires_grad=False)

    def forward(self, x):
        outputs = super().forward(x)
        if self.training:
            return outputs
        return outputs + self.shift

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.shift[loop_of(self).current_client] = 100.0
        return super().training_step(batch, batch_idx)


class LooksAtTheServersModel(FedAvg):
    private = ("shift",)  # a strategy may say so, too
    needs = ("server_data",)

    def end_round(self, round):
        module_at_server = round.server_data.module(round.global_vector)
        self.shift_at_server = module_at_server.shift.clone()


def test_evaluation_never_uses_another_clients_private_part(tmp_path):
    """The last client of the cohort is still in the module when clients and games are evaluated."""
    aggregator = LooksAtTheServersModel()
    federated = FederatedLoop(
        aggregator, sampler=FixedCohort([0, 2]), evaluation=ClientEvaluation(every=1), seed=1
    )
    data = toy_data((2, 3, 2))
    module = PredictsItsOwnClass()
    fit(federated, tmp_path, module, data, rounds=1)

    def share_of_class(labels, label):
        return float((labels == label).float().mean())

    assert "accuracy" in federated.client_scores
    accuracies = federated.client_scores["accuracy"].tolist()
    for client in (0, 2):
        labels = data.client_labels(client, "test")
        share = share_of_class(labels, label=client)
        assert accuracies[client] == pytest.approx(share, rel=5e-3)

    # Client 1 was not drawn. It is evaluated without a shift, and so is better than any class alone by far.
    labels = data.client_labels(1, "test")
    shares = [share_of_class(labels, label) for label in range(CLASSES)]
    assert accuracies[1] > max(shares) + 0.2

    no_shift = [0.0] * CLASSES
    assert aggregator.shift_at_server.tolist() == no_shift
    assert module.shift.tolist() == no_shift


def test_metric_that_needs_an_unshared_frozen_head_is_refused(tmp_path):
    net = network()
    net[4].requires_grad_(False)

    with refused("each of its layers 'net.0', 'net.4' may be the head"):
        fit(
            make_loop_of_three_clients(share="trainable", metrics={"m": ClassSpecificShapley()}),
            tmp_path,
            Plain(net),
        )

    fit(
        make_loop_of_three_clients(share="trainable", metrics={"n": CosineGradientShapley()}),
        tmp_path,
        Plain(net),
        rounds=1,
    )


class HasATargetNetwork(Plain):
    """The target requires no gradient, and follows the last layer after each batch."""

    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.target = nn.Linear(8, CLASSES).requires_grad_(False)

    def on_train_batch_end(self, *args):
        for parameter, followed in zip(self.target.parameters(), self.net[4].parameters()):
            parameter.data = 0.9 * parameter.data + 0.1 * followed.data


def test_frozen_parameters_that_training_changes_are_refused_unless_private(tmp_path):
    message = r"'target.weight', 'target.bias' required no gradient .* but training changes them"
    loop = make_loop_of_three_clients(share="trainable")
    with refused(message):
        fit(loop, tmp_path, HasATargetNetwork(), make_unequal_data())

    federated = make_loop_of_three_clients(share=["trainable", "!target.*"])

    module = fit(federated, tmp_path, HasATargetNetwork(), make_unequal_data(), rounds=2)

    states = client_tensors(federated)
    clients_of_both_rounds = {*cohort_of_round(0), *cohort_of_round(1)}
    assert states.keys() == clients_of_both_rounds
    for state in states.values():
        assert state.keys() == {"module.target.weight", "module.target.bias"}
        assert not torch.equal(state["module.target.weight"], module.target.weight)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.net[:2], train_bn=False)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer)


def test_parameters_unfrozen_during_the_fit_are_refused_by_name(tmp_path):
    def make_optimizer(parameters):
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        return torch.optim.SGD(trainable, lr=0.1)

    module = Plain(optimizer=make_optimizer)
    loop = make_loop_of_three_clients(share="trainable")

    message = r"'net.0.weight' required no gradient when the fit began"
    with refused(message):
        fit(loop, tmp_path, module, callbacks=[Unfreezes()])


class Scaled(Plain):
    def __init__(self):
        super().__init__(network(batch_norm=False))
        self.scale = nn.Parameter(torch.ones(2))

    def training_step(self, batch, batch_idx):
        if loop_of(self).current_client == 2 and loop_of(self).round_index == 1:
            with torch.no_grad():
                self.scale.fill_(float("inf"))
        return super().training_step(batch, batch_idx)


def test_client_whose_private_part_is_not_finite_is_left_out(tmp_path):
    federated = FederatedLoop(share=["!scale"], seed=1)
    with warns("with NaN or infinite entries"):
        module = fit(federated, tmp_path, Scaled(), rounds=2)

    assert federated.participations.tolist() == [2, 2, 1]
    assert torch.equal(module.scale, torch.ones(2))
    assert all(
        state["module.scale"].tolist() == [1, 1] for state in client_tensors(federated).values()
    )


def test_games_are_refused_if_part_of_the_model_stays_at_clients(tmp_path):
    with refused("evaluate models on the server's"):
        fit(
            make_loop_of_three_clients(share=["!head"], metrics={"sv": PartialFederatedShapley()}),
            tmp_path,
        )


# ---- resumed


def test_other_frozen_layers_are_refused_on_resume(tmp_path):
    optimizer = lambda ps: torch.optim.SGD(list(ps), lr=0.1)  # noqa: E731
    path = fit_and_save(
        make_loop_of_three_clients(share="trainable"),
        tmp_path,
        Plain(make_frozen_network(), optimizer),
        make_unequal_data(),
        rounds=1,
    )

    unfrozen = Plain(network(), optimizer)
    # Weight and bias of the last layer and two statistics of BatchNorm were shared: three or four tensors more now.
    message = r"another shared part of the module \(shared 7 tensors .*was 4 tensors"
    loop = make_loop_of_three_clients(share="trainable")

    with refused(message):
        fit(loop, tmp_path, unfrozen, make_unequal_data(), ckpt_path=path)
