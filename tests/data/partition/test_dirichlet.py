"""Dirichlet label skew: its moments, its extremes, and what it says when it cannot be met."""

import re

import pytest
import torch

from flsv.data import DirichletPartitioner, partition_counts
from flsv.errors import ConfigurationError

LABELS = torch.arange(10).repeat_interleave(600)


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
def test_class_shares_have_the_moments_of_the_dirichlet(alpha):
    clients, seeds = 5, 150
    draws = [
        partition_counts(DirichletPartitioner(clients, alpha, seed=s)(LABELS, 10), LABELS, 10) for s in range(seeds)
    ]
    shares = torch.stack(draws).double() / 600
    # Redrawing while a client is empty hardly ever happens here; each share is Beta(alpha, (clients - 1) alpha).
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.mean((0, 2)).sub(1 / clients).abs().max() < 4 * (variance / (10 * seeds)) ** 0.5
    assert float(shares.var()) == pytest.approx(variance, rel=0.15)


def test_all_samples_are_used_and_the_minimum_is_met():
    parts = DirichletPartitioner(20, alpha=0.5, min_samples=100)(LABELS, 10)
    assert sum(map(len, parts)) == 6000
    assert min(map(len, parts)) >= 100


def test_large_alpha_is_close_to_even():
    counts = partition_counts(DirichletPartitioner(4, alpha=1e6)(LABELS, 10), LABELS, 10)
    assert (counts - 150).abs().max() <= 3


def test_classes_without_samples_are_no_trouble():
    parts = DirichletPartitioner(3, alpha=1.0)(LABELS, num_classes=15)
    assert sum(map(len, parts)) == 6000


def test_a_tiny_alpha_is_refused_with_what_to_do():
    with pytest.raises(ConfigurationError, match="in 1000 draws over 6000 samples.* raise alpha, which splits"):
        DirichletPartitioner(num_clients=100, alpha=0.01)(LABELS, 10)


def test_advice_tells_the_minimum_that_was_seen():
    with pytest.raises(ConfigurationError, match="Lower min_samples to that") as caught:
        DirichletPartitioner(num_clients=10, alpha=0.5, min_samples=550)(LABELS, 10)
    best = int(re.search(r"at best (\d+)", str(caught.value)).group(1))
    assert min(map(len, DirichletPartitioner(10, alpha=0.5, min_samples=best)(LABELS, 10))) >= best


@pytest.mark.parametrize("alpha", [1e-300, 1e-3])
def test_vanishing_alpha_puts_each_class_with_one_client(alpha):
    counts = partition_counts(DirichletPartitioner(2, alpha)(LABELS, 10), LABELS, 10)
    assert ((counts > 0).sum(0) == 1).sum() >= 9


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_alpha_must_be_positive(alpha):
    with pytest.raises(ConfigurationError, match="alpha=.*: expected a finite number above 0"):
        DirichletPartitioner(5, alpha)


def test_min_samples_must_be_positive():
    with pytest.raises(ConfigurationError, match="min_samples=0.: expected a whole number of at least 1"):
        DirichletPartitioner(5, 1.0, min_samples=0)
