"""Valuation against exact transport, across the trust boundary and at its edges; its rules and figures."""

from typing import Any

import numpy as np
import ot
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from flsv.core import Client, LocalData
from flsv.core.local_data import _answering
from flsv.utilities.errors import ConfigurationError
from flsv.valuation import FedBary, clients_of, flag_samples, sample_values, server_of
from flsv.valuation.features import PCA, Features, Pixels
from flsv.valuation.fedbary import draw_contributions, histograms_of
from flsv.valuation.questions import BINS

CENTRES = 4 * torch.randn(3, 5, generator=torch.Generator().manual_seed(9))


def draw(samples: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(samples) % 3
    return CENTRES[y] + noise * torch.randn(samples, 5, generator=generator), y


def value(
    sets: Any, validation: Any = None, judge: bool = True, seed: int = 0, **options: Any
) -> Any:
    clients = clients_of(sets)
    server = None if validation is None else server_of(*validation)
    generator = torch.Generator().manual_seed(seed)
    return FedBary(**options).value(clients, server, generator, judge=judge), clients


def exact(a: Any, b: Any, weight: float) -> float:
    """POT on the paper's stacked vectors [x; m_y; s_y], in NumPy."""
    stacked = []
    for x, y in (a, b):
        x, y = x.double().numpy(), y.numpy()
        mean = np.stack([x[y == label].mean(0) for label in y])
        deviation = np.stack([x[y == label].std(0) for label in y])
        stacked.append(np.concatenate([x, weight**0.5 * mean, weight**0.5 * deviation], 1))
    cost = ((stacked[0][:, None] - stacked[1][None]) ** 2).sum(-1)
    return ot.emd2(ot.unif(len(cost)), ot.unif(cost.shape[1]), cost) ** 0.5


@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_distances_with_as_many_points_as_samples_are_exact(weight: float) -> None:
    server, sets = draw(45, 0), [draw(45, 1), draw(45, 2, 3.0)]
    exactly = {"support": 45, "allow_reconstruction": True}
    found, _ = value(sets, server, label_weight=weight, iterations=20, judge=False, **exactly)
    wanted = torch.tensor([exact(each, server, weight) for each in sets]).float()
    torch.testing.assert_close(found.distances, wanted, rtol=1e-3, atol=0)
    inverse = 1 / wanted
    torch.testing.assert_close(found.shares, inverse / inverse.sum(), rtol=1e-3, atol=0)
    assert found.verdicts == (None, None)


def test_valuation_does_not_depend_on_workers_or_other_clients() -> None:
    sets, server = [draw(40, seed) for seed in (1, 2, 3)], draw(30, 0)
    one, _ = value(sets, server, support=8, workers=1)
    three, _ = value(sets, server, support=8, workers=3)
    assert torch.equal(one.distances, three.distances)
    assert torch.equal(one.flagged, three.flagged)
    assert torch.equal(one.distances[:2], value(sets[:2], server, support=8)[0].distances)
    other, _ = value(sets, server, support=8, seed=1)
    assert not torch.equal(one.distances, other.distances)


# What is bad is found


def test_mislabeled_samples_have_the_largest_gradients_if_labels_have_weight() -> None:
    x, y = draw(150, 1)
    wrong = torch.zeros(150, dtype=torch.bool)
    wrong[::10] = True
    flipped = torch.where(wrong, (y + 1) % 3, y)
    score = {}
    for weight in (0.0, 1.0):
        _, clients = value([(x, flipped), draw(90, 2)], draw(90, 0), label_weight=weight)
        score[weight] = roc_auc_score(wrong, clients[0].ask(sample_values).gradients)
    assert score[1.0] > 0.99
    assert score[0.0] < 0.7


def test_noisy_samples_are_flagged_and_counted() -> None:
    x, y = draw(150, 1)
    noisy = torch.arange(150) < 30
    x[noisy] += 4 * torch.randn(30, 5, generator=torch.Generator().manual_seed(4))
    found, clients = value([(x, y), draw(90, 2)], draw(90, 0), label_weight=0.0)
    values = clients[0].ask(sample_values)
    assert roc_auc_score(noisy, values.gradients) > 0.95
    assert (values.flagged & noisy).sum() >= 24
    assert (values.flagged & ~noisy).sum() <= 12
    assert found.flagged[0] == values.flagged.sum()
    verdict = found.verdicts[0]
    assert verdict.counts.sum() == 150
    numbers, _ = np.histogram(values.gradients.numpy(), verdict.edges.numpy())
    assert numbers.tolist() == verdict.counts.tolist()


def test_calibrated_gradients_sum_to_zero_per_client_or_class() -> None:
    x, y = draw(91, 1)
    for calibration, groups in (("client", [y >= 0]), ("class", [y == c for c in range(3)])):
        _, clients = value([(x, y), draw(30, 2)], draw(30, 0), calibration=calibration)
        gradients = clients[0].ask(sample_values).gradients
        assert all(gradients[group].sum().item() == pytest.approx(0, abs=1e-3) for group in groups)


# Who sees what


class Sealed(Tensor):
    """Something that follows from a client's samples: any use outside of an answer fails."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _answering.get() is None:
            raise AssertionError(
                f"{function} on what follows from a client's samples, outside of the client"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


class Customs(Client):
    """Opens the seal of what a question returns, and keeps a list of it."""

    crossed: list[Any]

    def ask(self, question: Any, *args: Any, **kwargs: Any) -> Any:
        def inspected(local: Any) -> Any:
            return self.open(question(local, *args, **kwargs))

        return super().ask(inspected)

    def open(self, answer: Any) -> Any:
        if isinstance(answer, tuple):
            return tuple(map(self.open, answer))
        for name, part in vars(answer).items() if hasattr(answer, "__dataclass_fields__") else ():
            object.__setattr__(answer, name, self.open(part))
        if isinstance(answer, Tensor):
            answer = answer.as_subclass(Tensor).clone()
        self.crossed.append(answer)
        return answer


def no_model(batches: Any) -> Any:
    raise AssertionError("there is no model")


@pytest.mark.parametrize("with_validation", [True, False])
def test_server_reads_no_sample_of_a_client(with_validation: bool) -> None:
    crossed: list[Any] = []
    clients, held = [], []
    for number, (x, y) in enumerate((draw(40, 1), draw(40, 2))):
        sealed, counts = [(x.as_subclass(Sealed), y.as_subclass(Sealed))], torch.bincount(y)
        held.append(
            LocalData(
                f"client {number}",
                lambda split, sealed=sealed: sealed,
                counts,
                2 * counts,
                no_model,
            )
        )
        clients.append(Customs(number, held[-1]))
        clients[-1].crossed = crossed
    with pytest.raises(AssertionError, match="outside of the client"):
        _ = draw(4, 1)[0].as_subclass(Sealed) + 1  # the seal holds
    with pytest.raises(PermissionError):
        _ = held[0].memory
    server = server_of(*draw(30, 0)) if with_validation else None
    found = FedBary(PCA(3), support=7, iterations=3).value(clients, server, torch.Generator())
    assert found.distances.isfinite().all()
    shapes = {tuple(each.shape) for each in crossed if isinstance(each, Tensor)}
    # Interpolants of 3 features with their class's mean and deviation, distances, a histogram; moments where there is
    # nothing at the server to fit components on.
    moments = set() if with_validation else {(5,), (5, 5)}
    assert shapes == {(7, 9), (), (BINS,), (BINS + 1,)} | moments
    rest = [each for each in crossed if not isinstance(each, Tensor)]
    assert {type(each).__name__ for each in rest} <= {"FirstAnswer", "Verdict", "NoneType", "int"}


def test_default_support_is_the_safe_support_of_the_smallest_client() -> None:
    server, sets = (
        draw(60, 0),
        [draw(300, 1), draw(60, 2), (torch.zeros(0, 5), torch.zeros(0).long())],
    )
    default, _ = value(sets, server, judge=False)
    named, _ = value(sets, server, judge=False, support=29)
    assert default.support == 29
    assert torch.equal(default.distances[:2], named.distances[:2])
    assert value([draw(300, 1), draw(203, 2)], server, judge=False)[0].support == 100
    # Samples that are not finite take no part, so they hide nobody.
    broken = draw(60, 2)
    broken[0][:20] = torch.nan
    assert value([draw(300, 1), broken], server, judge=False)[0].support == 19


@pytest.mark.parametrize("validation", [draw(30, 0), None])
def test_support_from_which_samples_could_be_reconstructed_is_refused(validation: Any) -> None:
    sets = [draw(90, 1), draw(60, 2)]
    with pytest.raises(
        ConfigurationError, match="support=30: client 1 has 60 samples.*support=29 or less"
    ):
        value(sets, validation, support=30)
    allowed, _ = value(sets, validation, support=60, judge=False, allow_reconstruction=True)
    assert allowed.support == 60
    with pytest.raises(ConfigurationError, match="expected a label_weight above 0"):
        FedBary(part="labels", label_weight=0.0)
    with pytest.raises(ConfigurationError, match="client 1 has 2 samples.*Leave it out"):
        value([draw(90, 1), draw(2, 2)], validation)


# Edges


def test_valuation_with_single_sample_or_missing_classes_is_finite() -> None:
    x, y = draw(31, 1)
    alone = y.clone()
    alone[0] = 7
    only = draw(30, 2)
    sets = [(x, alone), (only[0][only[1] == 0], only[1][only[1] == 0])]
    found, clients = value(sets, draw(30, 0), support=4)
    assert found.distances.isfinite().all()
    assert clients[0].ask(sample_values).gradients[0] == 0
    assert found.distances[1] > found.distances[0]


def test_client_without_samples_has_nan_values_and_no_part_in_the_shares() -> None:
    found, clients = value(
        [draw(20, 1), (torch.zeros(0, 5), torch.zeros(0).long()), draw(20, 2)], draw(20, 0)
    )
    assert found.distances[1].isnan()
    assert found.shares[1].isnan()
    assert found.flagged_shares[1].isnan()
    assert found.shares[[0, 2]].sum().item() == pytest.approx(1)
    with pytest.raises(ConfigurationError, match="no client has a sample"):
        value([(torch.zeros(0, 5), torch.zeros(0).long())] * 2, draw(20, 0))


def test_samples_that_are_not_finite_are_flagged_and_change_nothing_else() -> None:
    x, y = draw(40, 1)
    broken = torch.cat([x, torch.full((2, 5), torch.nan), torch.full((1, 5), torch.inf)])
    labels = torch.cat([y, torch.tensor([0, 1, 2])])
    other = draw(30, 2)
    clean, _ = value([(x, y), other], draw(30, 0))
    found, clients = value([(broken, labels), other], draw(30, 0))
    assert torch.equal(found.distances, clean.distances)
    assert found.broken.tolist() == [3, 0]
    assert found.flagged[0] == clean.flagged[0] + 3
    values = clients[0].ask(sample_values)
    assert values.flagged[40:].all()
    assert values.gradients[40:].isinf().all()
    nothing, clients = value([(torch.full((4, 5), torch.nan), y[:4]), other], draw(30, 0))
    assert nothing.distances[0].isnan()
    assert nothing.flagged_shares[0] == 1
    assert clients[0].ask(sample_values).flagged.all()
    dirty = draw(30, 0)
    dirty[0][3, 2] = torch.nan
    assert value([other], dirty)[0].distances.isfinite().all()
    with pytest.raises(ConfigurationError, match="validation set is finite"):
        value([other], (torch.full((4, 5), torch.nan), y[:4]))


@pytest.mark.parametrize("at_server", [True, False])
def test_participants_with_different_feature_counts_are_refused_by_name(at_server: bool) -> None:
    odd = (torch.zeros(20, 6), torch.zeros(20).long())
    sets = [draw(20, 1), draw(20, 2) if at_server else odd]
    who = "the server" if at_server else "client 1"
    with pytest.raises(
        ConfigurationError, match=rf"Pixels\(\): client 0 has 5, .*{who} has 6 features"
    ):
        value(sets, odd if at_server else None, support=9)


def test_fedbary_uses_custom_features_and_refuses_penultimate_ones_before_training() -> None:
    class Half(Features):
        def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
            return x / 2

    server, sets = draw(30, 0), [draw(30, 1), draw(30, 2)]
    halved, whole = (value(sets, server, features=features)[0] for features in (Half(), Pixels()))
    torch.testing.assert_close(halved.distances, whole.distances / 2)
    with pytest.raises(ConfigurationError, match="there is none before training"):
        value(sets, server, features="penultimate")


@pytest.mark.parametrize("share", [0.0, 0.05, 0.45])
def test_outliers_are_flagged_whatever_their_share_each_class_by_its_own_center(
    share: float,
) -> None:
    values = torch.randn(900, generator=torch.Generator().manual_seed(0))
    bad, y = (
        torch.randperm(900, generator=torch.Generator().manual_seed(1)) < 900 * share,
        torch.arange(900) % 3,
    )
    values[bad] += 30
    flagged = flag_samples(values - values.mean())
    assert flagged[bad].all()
    assert flagged[~bad].float().mean() < 0.02
    apart = values + 100.0 * y
    apart -= apart.mean()
    alone, together = flag_samples(apart, y=y), flag_samples(apart)
    assert alone[bad & (apart > 0)].all()
    assert alone[~bad].float().mean() < 0.02
    assert not together[bad & (y == 0)].any()  # hidden by the other classes


def test_flag_samples_of_few_or_equal_values_flags_nothing() -> None:
    for values in (torch.zeros(0), torch.tensor([-1.0, 1.0]), torch.zeros(7)):
        assert not flag_samples(values).any()
    assert flag_samples(torch.tensor([0.0, 0.0, 0.0, 5.0])).tolist() == [False, False, False, True]
    assert flag_samples(torch.tensor([-1.0, 1.0]), "positive").tolist() == [False, True]


def test_figures_of_a_valuation_show_every_client() -> None:
    found, _ = value(
        [draw(30, 1), draw(20, 2), (torch.zeros(0, 5), torch.zeros(0).long())],
        draw(20, 0),
        support=9,
    )
    bars, shares = draw_contributions(found).axes
    assert [bar.get_height() for bar in bars.patches] == pytest.approx(
        found.distances.tolist(), nan_ok=True
    )
    assert sum(bar.get_height() for bar in shares.patches[:2]) == pytest.approx(1)
    panels = [axis for axis in histograms_of(found).axes if axis.get_title().startswith("client")]
    assert [len(axis.patches) for axis in panels] == [1, 1, 0]
