"""Every number and every word that a message names as a way out: the message is provoked, what it says is done, and it
works."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

from flsv.aggregation import TrimmedMean
from flsv.data import DirichletPartitioner, ProportionPartitioner, Splits
from flsv.data.federated_data import check_full_batches
from flsv.data.sources.base import SourceData
from flsv.data.splits import split_federation
from flsv.filters import MultiKrum
from flsv.functional import ESTIMATORS
from flsv.functional.transport.cost import check_support, label_embedding
from flsv.privacy import GaussianPrivacy
from flsv.sampling import BernoulliSampler, UniformSampler

MOST = {"server_val": 0, "client_test": 0.9}


def total(total: int) -> None:
    ProportionPartitioner([[9] + [1] * 9] * 2, of="client", total=total)(
        torch.arange(10).repeat_interleave(60), 10
    )


def federation(clients: int) -> Any:
    return SimpleNamespace(
        num_clients=clients, client_names=(), split_sizes={"train": torch.ones(clients)}
    )


def trim(trim: float, clients: int) -> None:
    TrimmedMean(trim).begin(federation(clients))


def krum(clients: int, byzantine: int, keep: int | None = None) -> None:
    MultiKrum(byzantine, keep).resume(federation(clients))


def split(samples: int = 30, clients: int = 3, min_samples: int = 1, **options: float) -> Any:
    samples = max(samples, 2 * clients * min_samples)
    labels = torch.zeros(samples, dtype=torch.long)
    partitioner = DirichletPartitioner(clients, alpha=100, min_samples=min_samples)
    return split_federation(labels, 1, None, torch.arange(samples), partitioner, Splits(**options))


def full_batches(batch_size: int) -> None:
    train_options = {"batch_size": batch_size, "drop_last": True}
    source = SourceData(TensorDataset(torch.zeros(0)), train_options=train_options)
    check_full_batches(split(server_val=0), source)


def estimate(name: str, budget: int) -> None:
    weights = torch.arange(1.0, 7.0)
    ESTIMATORS[name](
        lambda masks: (masks * weights).sum(1) ** 2, 6, budget=budget, generator=torch.Generator()
    )


def embedding(features: int, covariance: Any = "full") -> None:
    x = torch.rand(60, features, generator=torch.Generator().manual_seed(0))
    label_embedding(x, torch.arange(60) % 2, covariance=covariance)


def sample(kind: type, clients: int, **arguments: Any) -> None:
    kind(**arguments).check(clients)


SAMPLED = ("permutation", "surrogate", "difference", "gtg")
#: What is done, with what it fails, and the ways out: for each argument its value, or the words before it.
CASES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (total, {"total": 600}, {"total": "At most total="}),
    (trim, {"trim": 0.01, "clients": 6}, {"trim": "The least trim that does is"}),
    (trim, {"trim": 0.4, "clients": 2}, {"clients": "It takes"}),
    (
        krum,
        {"clients": 6, "byzantine": 2},
        {"byzantine": "say byzantine=", "clients": "for which it takes"},
    ),
    (krum, {"clients": 9, "byzantine": 2, "keep": 8}, {"keep": "Say keep="}),
    (
        sample,
        {"kind": UniformSampler, "clients": 4, "cohort_size": 5},
        {"cohort_size": "cohort_size to"},
    ),
    (
        sample,
        {"kind": BernoulliSampler, "clients": 4, "expected_cohort": 5},
        {"expected_cohort": "at most"},
    ),
    (
        sample,
        {"kind": BernoulliSampler, "clients": 900, "expected_cohort": 0.01},
        {"expected_cohort": "example to"},
    ),
    (split, {"samples": 4, "clients": 2, "server_val": 0.05}, {"server_val": "set it to"}),
    (split, {"samples": 12, "clients": 6, **MOST}, {"client_test": 0}),
    (full_batches, {"batch_size": 16}, {"batch_size": "Lower batch_size to"}),
    (embedding, {"features": 70}, {"features": "PCA to", "covariance": "diag"}),
    (check_support, {"support": 30, "samples": 60}, {"support": "Take support="}),
    *((estimate, {"name": name, "budget": 2}, {"budget": "minimum of"}) for name in SAMPLED),
    (
        GaussianPrivacy,
        {"clip": 1.0, "noise_multiplier": 0.5, "max_epsilon": 1.0},
        {"noise_multiplier": "such as to"},
    ),
    (
        GaussianPrivacy,
        {"clip": 1.0, "noise_multiplier": 0.0, "max_epsilon": 3.0},
        {"noise_multiplier": "such as to"},
    ),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("attempt", "arguments", "remedies"),
    CASES,
)
def test_remedy_that_an_error_message_names_works(attempt, arguments, remedies):
    with pytest.raises((ValueError, UserWarning)) as caught:
        attempt(**arguments)

    message = str(caught.value)
    for argument, remedy in remedies.items():
        value = value_of_remedy(remedy, message)
        attempt(**{**arguments, argument: value})


def value_of_remedy(remedy: Any, message: str) -> Any:
    """The value that a message advises: the number after words, or the remedy itself, which may be None or a word."""
    if remedy is None:
        return None

    assert str(remedy) in message
    if not isinstance(remedy, str):
        return remedy
    number = re.search(f"{remedy} ?([\\d.]*\\d)", message)
    if number is None:
        return remedy
    return yaml.safe_load(number[1])
