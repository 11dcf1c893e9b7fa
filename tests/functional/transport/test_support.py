"""How many points may cross."""

from __future__ import annotations

import torch

from flsv.functional import TransportClient, TransportServer
from flsv.functional.transport.cost import safe_support


def found_samples(support: int) -> float:
    """The share of 40 samples that a server which keeps to the protocol works out of two answers, to 1e-3: each row is
    half of a point of its own, which it takes off, and half of a mean of samples. Where S = m its points are one."""
    x = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    server = TransportServer(torch.rand(60, 5, generator=torch.Generator().manual_seed(1)))
    client, found = TransportClient(x, allow_reconstruction=True), []
    gamma = server.start(support, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        eta, distance = client.answer(gamma)
        found.append(2 * eta - (gamma.mean(0) if support == len(x) else gamma))
        gamma = server.step(eta, distance)
    return float((torch.cdist(torch.cat(found).to(x), x).amin(0) < 1e-3).double().mean())


def test_samples_are_found_with_as_many_points_as_samples_and_not_with_the_safe_support() -> None:
    assert found_samples(40) == 1
    assert found_samples(safe_support(40)) == 0
