"""Valuation against exact transport, across the trust boundary and at its edges; its rules and figures."""

from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.testing import assert_close

from flsv.core import Client, LocalData
from flsv.core.local_data import _open_data
from flsv.valuation import FedBary, clients_of, flag_samples, sample_values, server_of
from flsv.valuation.client_functions import deviations
from flsv.valuation.features import PCA, Features, Pixels
from helpers import make_generator, refused

CENTRES = 4 * torch.randn(3, 5, generator=make_generator(9))


def draw_samples(
    samples: int,
    seed: int,
    noise: float = 1.0,
) -> tuple[Tensor, Tensor]:
    generator = make_generator(seed)
    y = torch.arange(samples) % 3
    x = CENTRES[y] + noise * torch.randn(
        samples,
        5,
        generator=generator,
    )

    return x, y


def make_no_samples() -> tuple[Tensor, Tensor]:
    return torch.zeros(0, 5), torch.zeros(0).long()


def make_nan_inputs(samples: int) -> Tensor:
    return torch.full((samples, 5), torch.nan)


def value_clients(
    sets,
    validation=None,
    values_samples: bool = True,
    seed: int = 0,
    **options,
):
    """The valuation of these clients' samples, and the clients."""
    clients = clients_of(sets)
    server = None
    if validation is not None:
        server = server_of(*validation)

    generator = make_generator(seed)
    valuation = FedBary(**options).value(
        clients,
        server,
        generator,
        values_samples=values_samples,
    )

    return valuation, clients


@pytest.mark.slow
def test_valuation_does_not_depend_on_workers_or_other_clients():
    sets = [draw_samples(40, seed) for seed in (1, 2, 3)]
    server = draw_samples(30, 0)

    by_one_worker, _ = value_clients(sets, server, support=8, workers=1)
    by_three_workers, _ = value_clients(sets, server, support=8, workers=3)
    of_two_clients, _ = value_clients(sets[:2], server, support=8)
    of_another_seed, _ = value_clients(sets, server, support=8, seed=1)

    assert torch.equal(by_one_worker.distances, by_three_workers.distances)
    assert torch.equal(by_one_worker.flagged, by_three_workers.flagged)
    assert torch.equal(by_one_worker.distances[:2], of_two_clients.distances)
    assert not torch.equal(by_one_worker.distances, of_another_seed.distances)


# What is bad is found


def test_mislabeled_samples_have_the_largest_gradients_if_labels_have_weight():
    x, y = draw_samples(150, 1)
    mislabeled = torch.zeros(150, dtype=torch.bool)
    mislabeled[::10] = True
    sets = [
        (
            x,
            torch.where(mislabeled, (y + 1) % 3, y),
        ),
        draw_samples(90, 2),
    ]

    auroc = {}
    for weight in (0.0, 1.0):
        _, clients = value_clients(sets, draw_samples(90, 0), label_weight=weight)
        gradients = clients[0].request(sample_values).gradients
        auroc[weight] = roc_auc_score(mislabeled, gradients)

    assert auroc[1.0] > 0.99
    assert auroc[0.0] < 0.7


def test_calibrated_gradients_sum_to_zero_per_client_or_class():
    x, y = draw_samples(91, 1)
    one_class = [y == label for label in range(3)]
    all_samples = [y >= 0]
    for calibration, groups in [("client", all_samples), ("class", one_class)]:
        _, clients = value_clients(
            [(x, y), draw_samples(30, 2)],
            draw_samples(30, 0),
            calibration=calibration,
        )
        gradients = clients[0].request(sample_values).gradients
        for group in groups:
            total = gradients[group].sum()
            assert total.item() == pytest.approx(0, abs=1e-3)


# Who sees what


class Sealed(Tensor):
    """Something that follows from a client's samples: any use outside of a response fails."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if _open_data.get() is None:
            raise AssertionError(
                f"{function} on what follows from a client's samples, outside of the client"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


class RecordsResponses(Client):
    """Makes plain tensors of the sealed ones in a response, and keeps a list of all that responses hold."""

    recorded_responses: list[Any]

    def request(self, function, *args, **kwargs):
        def respond_and_record(local):
            return self.unseal(function(local, *args, **kwargs))

        return super().request(respond_and_record)

    def unseal(self, response):
        if isinstance(response, tuple):
            return tuple(map(self.unseal, response))

        if isinstance(response, Tensor):
            # The copy is made here: as_subclass gives the same memory.
            plain = response.as_subclass(Tensor).clone()
            self.recorded_responses.append(plain)
            return plain

        if is_dataclass(response):
            for name, part in vars(response).items():
                object.__setattr__(response, name, self.unseal(part))  # it is frozen

        self.recorded_responses.append(response)
        return response


def no_model(batches):
    raise AssertionError("there is no model")


@pytest.mark.fast_rows
@pytest.mark.parametrize("with_validation", [True, False])
def test_server_reads_no_sample_of_a_client(with_validation):
    recorded_responses = []
    clients = []
    sets = [draw_samples(40, 1), draw_samples(40, 2)]
    for number, (x, y) in enumerate(sets):
        sealed_batches = [(x.as_subclass(Sealed), y.as_subclass(Sealed))]
        counts = torch.bincount(y)
        client_data = LocalData(
            f"client {number}",
            lambda split, batches=sealed_batches: batches,
            counts,
            2 * counts,
            no_model,
        )
        client = RecordsResponses(number, client_data)
        client.recorded_responses = recorded_responses
        clients.append(client)

    with pytest.raises(AssertionError, match="outside of the client"):
        _ = draw_samples(4, 1)[0].as_subclass(Sealed) + 1  # the seal holds
    with pytest.raises(PermissionError):
        _ = client_data.memory

    server = server_of(*draw_samples(30, 0)) if with_validation else None

    valuation = FedBary(
        PCA(3),
        support=7,
        iterations=3,
    ).value(clients, server, torch.Generator())

    assert valuation.distances.isfinite().all()

    tensors = [response for response in recorded_responses if isinstance(response, Tensor)]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    # Interpolants of 3 features with their class's mean and deviation, distances; moments where there is nothing at
    # the server to fit components on.
    expected = {(7, 9), ()}
    if not with_validation:
        expected |= {(5,), (5, 5)}

    assert shapes == expected

    plain_responses = [
        response for response in recorded_responses if not isinstance(response, Tensor)
    ]
    types_of_plain = {type(response).__name__ for response in plain_responses}
    assert types_of_plain <= {"FirstResponse", "NoneType", "int"}


def safe_support(num_samples: int) -> int:
    """The largest integer below half of the samples."""
    return (num_samples - 1) // 2


def test_default_support_is_the_safe_support_of_the_smallest_client():
    server = draw_samples(60, 0)
    sets = [draw_samples(300, 1), draw_samples(60, 2), make_no_samples()]

    by_default, _ = value_clients(sets, server, values_samples=False)
    support = safe_support(60)
    by_name, _ = value_clients(sets, server, values_samples=False, support=support)

    assert by_default.support == support
    distances = by_default.distances[:2]  # the third client has no samples
    assert torch.equal(distances, by_name.distances[:2])


def test_default_support_is_at_most_100():
    sets = [draw_samples(300, 1), draw_samples(203, 2)]
    assert safe_support(203) > 100

    valuation, _ = value_clients(sets, draw_samples(60, 0), values_samples=False)

    assert valuation.support == 100


def test_default_support_does_not_count_samples_that_are_not_finite():
    """They take no part, so that they hide nobody."""
    broken = draw_samples(60, 2)
    broken[0][:20] = torch.nan

    server = draw_samples(60, 0)
    valuation, _ = value_clients([draw_samples(300, 1), broken], server, values_samples=False)

    assert valuation.support == safe_support(60 - 20)


@pytest.mark.parametrize("validation", [draw_samples(30, 0), None])
def test_support_from_which_samples_could_be_reconstructed_is_refused(validation):
    sets = [draw_samples(90, 1), draw_samples(60, 2)]
    message = f"support=30: client 1 has only 60 samples.*support={safe_support(60)} or less"
    with refused(message):
        value_clients(sets, validation, support=30)


@pytest.mark.parametrize("validation", [draw_samples(30, 0), None])
def test_client_with_two_samples_is_refused(validation):
    assert safe_support(2) == 0
    with refused("client 1 has only 2 samples.*Exclude"):
        value_clients([draw_samples(90, 1), draw_samples(2, 2)], validation)


def test_fedbary_with_a_label_weight_of_0_is_refused():
    with refused("expected a label_weight above 0"):
        FedBary(part="labels", label_weight=0.0)


# Edges


def test_valuation_with_single_sample_or_missing_classes_is_finite():
    x, y = draw_samples(31, 1)
    labels = y.clone()
    labels[0] = 7  # the only sample of this class
    client_with_a_single_sample = (x, labels)
    x_of_all, y_of_all = draw_samples(30, 2)
    is_class_0 = y_of_all == 0
    client_of_one_class = (x_of_all[is_class_0], y_of_all[is_class_0])

    valuation, clients = value_clients(
        [client_with_a_single_sample, client_of_one_class],
        draw_samples(30, 0),
        support=4,
    )

    assert valuation.distances.isfinite().all()
    # A gradient is relative to the mean of its class, which here is the sample itself.
    gradient_of_single_sample = clients[0].request(sample_values).gradients[0]
    assert gradient_of_single_sample == 0
    assert valuation.distances[1] > valuation.distances[0]


def test_client_without_samples_has_nan_values_and_no_part_in_the_shares():
    server = draw_samples(20, 0)

    valuation, _ = value_clients(
        [draw_samples(20, 1), make_no_samples(), draw_samples(20, 2)], server
    )

    assert valuation.distances[1].isnan()
    assert valuation.shares[1].isnan()
    assert valuation.flagged_shares[1].isnan()
    assert valuation.shares[[0, 2]].sum().item() == pytest.approx(1)

    with refused("no client has a sample"):
        value_clients([make_no_samples(), make_no_samples()], server)


def test_samples_that_are_not_finite_are_flagged_and_change_nothing_else():
    x, y = draw_samples(40, 1)
    infinite = torch.full((1, 5), torch.inf)
    broken = torch.cat([x, make_nan_inputs(2), infinite])
    labels = torch.cat([y, torch.tensor([0, 1, 2])])
    client_1 = draw_samples(30, 2)
    server = draw_samples(30, 0)

    clean, _ = value_clients([(x, y), client_1], server)
    valuation, clients = value_clients([(broken, labels), client_1], server)

    assert torch.equal(valuation.distances, clean.distances)
    assert valuation.broken.tolist() == [3, 0]
    assert valuation.flagged[0] == clean.flagged[0] + 3

    values = clients[0].request(sample_values)
    assert values.flagged[40:].all()
    assert values.gradients[40:].isinf().all()


def make_nan_samples() -> tuple[Tensor, Tensor]:
    """Four samples, none of which is finite."""
    return make_nan_inputs(4), torch.tensor([0, 1, 2, 0])


def test_client_without_a_finite_sample_has_no_distance_and_all_its_samples_are_flagged():
    server = draw_samples(30, seed=0)
    client_1 = draw_samples(30, seed=2)

    valuation, clients = value_clients([make_nan_samples(), client_1], server)

    assert valuation.distances[0].isnan()
    assert valuation.flagged_shares[0] == 1
    assert clients[0].request(sample_values).flagged.all()


def test_server_needs_a_finite_sample_but_not_all_of_them():
    client = draw_samples(30, seed=2)
    x_of_server, y_of_server = draw_samples(30, seed=0)
    x_of_server[3, 2] = torch.nan

    valuation, _ = value_clients([client], (x_of_server, y_of_server))
    assert valuation.distances.isfinite().all()

    with refused("validation set is finite"):
        value_clients([client], make_nan_samples())


@pytest.mark.parametrize("at_server", [True, False])
def test_participants_with_different_feature_counts_are_refused_by_name(at_server):
    six_features = (torch.zeros(20, 6), torch.zeros(20).long())
    sets = [draw_samples(20, 1), draw_samples(20, 2)]
    server = None
    if at_server:
        server = six_features
        participant = "the server"
    else:
        sets[1] = six_features
        participant = "client 1"

    numbers = rf"client 0 has 5, .*{participant} has 6"
    message = rf"Pixels\(\): all samples need the same number of features, but {numbers}"
    with refused(message):
        value_clients(sets, server, support=9)


def test_fedbary_uses_custom_features_and_refuses_penultimate_ones_before_training():
    class Half(Features):
        def __call__(
            self,
            x: Tensor,
            module: nn.Module | None = None,
        ) -> Tensor:
            return x / 2

    server = draw_samples(30, 0)
    sets = [draw_samples(30, 1), draw_samples(30, 2)]

    of_halves, _ = value_clients(sets, server, features=Half())
    of_pixels, _ = value_clients(sets, server, features=Pixels())

    assert_close(of_halves.distances, of_pixels.distances / 2)

    with refused("there is none before training"):
        value_clients(sets, server, features="penultimate")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.45])
def test_outliers_are_flagged_whatever_their_share_each_class_by_its_own_center(share):
    num_samples = 900
    outlier_shift = 30  # standard deviations
    values = torch.randn(num_samples, generator=make_generator())
    order = torch.randperm(num_samples, generator=make_generator(1))
    is_outlier = order < num_samples * share
    values[is_outlier] += outlier_shift

    flagged = flag_samples(values - values.mean())

    assert flagged[is_outlier].all()
    assert flagged[~is_outlier].float().mean() < 0.02

    # Classes with centers of their own.
    y = torch.arange(num_samples) % 3
    class_centers = 100.0 * y
    values_around_centers = values + class_centers
    centered_values = values_around_centers - values_around_centers.mean()

    flagged_by_class = flag_samples(centered_values, y=y)
    flagged_together = flag_samples(centered_values)

    assert flagged_by_class[is_outlier & (centered_values > 0)].all()
    assert flagged_by_class[~is_outlier].float().mean() < 0.02
    assert not flagged_together[is_outlier & (y == 0)].any()  # hidden by the other classes


@pytest.mark.parametrize("values", [[], [-1.0, 1.0], [0.0] * 7])
def test_flag_samples_of_few_or_equal_values_flags_nothing(values):
    assert not flag_samples(torch.tensor(values)).any()


def test_flag_samples_flags_a_single_high_value():
    flagged = flag_samples(torch.tensor([0.0, 0.0, 0.0, 5.0]))
    flagged_positive = flag_samples(torch.tensor([-1.0, 1.0]), "positive")

    assert flagged.tolist() == [False, False, False, True]
    assert flagged_positive.tolist() == [False, True]


def test_deviations_take_the_larger_of_two_middle_distances():
    gradients = torch.tensor([-4.0, -1.0, 0.0, 0.0, 5.0])
    # The center is 0. Four gradients are not above it, at distances 4, 1, 0, 0, whose larger middle one is 1.
    expected = torch.tensor(5 / 1.4826)
    assert_close(deviations(gradients)[-1], expected)
