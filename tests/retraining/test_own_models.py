"""Doubts about models that clients say they have trained alone."""

import torch

from flsv.retraining.coalitions_at_sites import NEAR, doubtful_own_models


def honest(
    clients: int = 5, size: int = 400
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return own models, the initial model, the federation's model, and the sums of updates."""
    draw = torch.Generator().manual_seed(0)
    common, initial = torch.randn(size, generator=draw), torch.randn(size, generator=draw)
    ways = common + 0.7 * torch.randn(clients, size, generator=draw)
    updates = 0.8 * ways + 0.2 * torch.randn(clients, size, generator=draw)
    return initial + ways, initial, initial + ways.mean(0), updates


def test_own_models_of_honest_clients_are_not_doubted() -> None:
    assert doubtful_own_models(*honest()) == {}


def test_own_model_copied_from_the_federation_or_a_client_is_found() -> None:
    own, initial, model, updates = honest()
    own[1], own[3] = model, own[4]
    assert doubtful_own_models(own, initial, model, updates) == {
        1: "its own model is the federation's",
        3: "its own model moves as client 4's updates do",
    }


def test_distance_to_the_federations_model_is_compared_with_the_models_own_way() -> None:
    own, initial, model, updates = honest()
    aside = torch.nn.functional.normalize(
        torch.randn(own.shape[1], generator=torch.Generator().manual_seed(1)), dim=0
    )
    for part, doubted in ((0.9 * NEAR, True), (1.2 * NEAR, False)):
        own[0] = model + part * (model - initial).norm() * aside
        found = doubtful_own_models(own[:2], initial, model, updates[:2])
        assert (0 in found) is doubted


def test_two_clients_are_not_compared_with_each_other() -> None:
    own, initial, model, updates = honest(2)
    assert doubtful_own_models(own.flip(0), initial, model, updates) == {}
