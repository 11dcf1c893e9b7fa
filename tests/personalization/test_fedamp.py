"""FedAMP and HeurFedAMP: the attention, and what clients start from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import fit, toy_data

from flsv.loop import FederatedLoop
from flsv.personalization import FedAMP, HeurFedAMP
from flsv.sampling import UniformSampler


def test_fedamps_attention() -> None:
    w = np.random.default_rng(0).normal(size=(4, 7))
    alpha, sigma = 2.0, 9.0
    expected = np.zeros((4, 4))
    for i in range(4):
        for j in set(range(4)) - {i}:
            expected[i, j] = alpha * math.exp(-((w[i] - w[j]) ** 2).sum() / sigma) / sigma
        assert expected[i].sum() < 1
        expected[i, i] = 1 - expected[i].sum()
    np.testing.assert_allclose(FedAMP(alpha, sigma).attention(torch.from_numpy(w)), expected)


def test_it_is_a_gradient_step_on_the_attention_inducing_function() -> None:
    """Equation 4 against autograd: U = W - alpha times the gradient of sum over pairs of A(|w_i - w_j|^2) / 2."""
    w = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    amp = FedAMP(alpha=0.7, sigma=5.0)
    squared = ((w[:, None] - w[None]) ** 2).sum(-1)
    (gradient,) = torch.autograd.grad((1 - torch.exp(-squared / 5.0)).sum() / 4, w)
    torch.testing.assert_close(amp.attention(w.detach()) @ w.detach(), w.detach() - 0.7 * gradient)


def test_heurfedamps_attention() -> None:
    w = np.random.default_rng(1).normal(size=(4, 7))
    expected = np.zeros((4, 4))
    for i in range(4):
        cos = {j: w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in range(4) if j != i}
        total = sum(math.exp(3.0 * c) for c in cos.values())
        for j, c in cos.items():
            expected[i, j] = 0.6 * math.exp(3.0 * c) / total
        expected[i, i] = 0.4
    np.testing.assert_allclose(HeurFedAMP(0.4, 3.0).attention(torch.from_numpy(w)), expected)
    assert HeurFedAMP().attention(torch.ones(1, 2)).tolist() == [[1.0]]


@pytest.mark.parametrize("amp", [FedAMP(2.0, 5.0), HeurFedAMP(0.6, 5.0)])
def test_clients_start_from_the_mixture_of_the_last_uploads(tmp_path: Path, amp: FedAMP) -> None:
    """With absent clients: their last upload counts, and they too start from the newest mixture."""
    rounds: list[Any] = []
    inner = amp.personalize
    amp.personalize = lambda round, *rest: (rounds.append(round), inner(round, *rest))[1]  # type: ignore[method-assign]
    loop = FederatedLoop(personalizer=amp, sampler=UniformSampler(2), seed=4)
    fit(loop, tmp_path, data=toy_data((2, 2, 3, 2)), rounds=4)
    uploads: dict[int, torch.Tensor] = {}
    own: dict[int, torch.Tensor] = {}
    for round in rounds:
        for row, client in enumerate(round.client_ids.tolist()):
            begun = round.global_vector if round.start_vectors is None else round.start_vectors[row]
            torch.testing.assert_close(begun, own.get(client, round.global_vector))
            uploads[client] = round.client_vectors[row]
        stacked = torch.stack(list(uploads.values())).double()
        weights = amp.attention(stacked[:, : round.space.num_parameters])
        own = dict(zip(uploads, (weights @ stacked).float()))
    assert set(loop.state.starts) == set(uploads)
    assert len(uploads) > 2
    for client, model in loop.state.starts.items():
        torch.testing.assert_close(model, own[client])
        assert (loop.space.unflatten(model)["net.1.running_var"] > 0).all()
