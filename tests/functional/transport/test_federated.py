"""The federated distance and barycenter against POT."""

from itertools import pairwise

import numpy as np
import ot
import pytest
import torch
from functional.transport.samples import wasserstein_distance
from torch.testing import assert_close

from flsv.functional import TransportClient, TransportServer, wasserstein_barycenter
from flsv.functional.transport.cost import check_support, safe_support
from helpers import make_generator, refused


@pytest.mark.parametrize(("samples", "safe"), [(0, 0), (2, 0), (3, 1), (4, 1), (11, 5)])
def test_safe_support_is_the_largest_that_is_not_refused(samples, safe):
    check_support(safe, samples)
    with refused(f"support={safe + 1}: client 3.*{samples} samples"):
        check_support(safe + 1, samples, "client 3")


def make_gaussians(dim, m=150, m2=150):
    generator = make_generator(dim)
    x = torch.randn(m, dim, generator=generator)
    x2 = 0.5 * torch.randn(m2, dim, generator=generator) + 1

    return x.double(), x2.double()


def exchange_points(client, server, support, rounds):
    """The server's distances after each round of the protocol."""
    distances = []
    gamma = server.start(support, make_generator())
    for _ in range(rounds):
        answer, distance = client.respond(gamma)
        gamma = server.step(answer, distance)
        distances.append(server.distance)
    return distances


@pytest.mark.by_turn
@pytest.mark.fast_rows("dtype1-50")
@pytest.mark.parametrize("dim", [1, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distance_with_as_many_points_as_samples_is_exact_after_20_iterations(dim, dtype):
    gaussians = make_gaussians(dim)
    x, x2 = (samples.to(dtype) + 7 for samples in gaussians)
    client = TransportClient(x, allow_reconstruction=True)
    server = TransportServer(x2)

    distances = exchange_points(client, server, support=150, rounds=20)

    exact = wasserstein_distance(x, x2)
    assert_close(distances[-1], exact, rtol=1e-3, atol=0)
    assert distances[-1] >= exact * (1 - 1e-5)


@pytest.mark.parametrize("p", [1, 2])
def test_servers_distance_is_the_sum_of_its_own_and_the_clients(p):
    x, x2 = make_gaussians(4, m=60, m2=50)
    client = TransportClient(x, p=p)
    server = TransportServer(x2, p=p)
    gamma = server.start(20, make_generator())

    for _ in range(3):
        answer, distance = client.respond(gamma)
        assert_close(distance, wasserstein_distance(x, gamma, p))
        to_server = wasserstein_distance(gamma, x2, p)
        gamma = server.step(answer, distance)
        assert_close(server.distance, distance + to_server)


NUM_CLIENT_SAMPLES = 40


def share_of_reconstructed_samples(support):
    """The share of a client's samples that a server which keeps to the protocol works out of two answers, to 1e-3."""
    x = torch.rand(NUM_CLIENT_SAMPLES, 5, generator=make_generator())
    server_x = torch.rand(60, 5, generator=make_generator(1))
    server = TransportServer(server_x)
    client = TransportClient(x, allow_reconstruction=True)
    guesses = []
    gamma = server.start(support, generator=make_generator())

    for _ in range(2):
        eta, distance = client.respond(gamma)
        guesses.append(guess_samples(eta, gamma))
        gamma = server.step(eta, distance)

    all_guesses = torch.cat(guesses).to(x)
    errors = torch.cdist(all_guesses, x).amin(0)
    is_reconstructed = errors < 1e-3
    return float(is_reconstructed.double().mean())


def guess_samples(eta, gamma):
    """Return what a server can make of a client's answer ``eta`` to its points ``gamma``.

    A row of the answer is half of a server's point and half of a mean of samples, so that the server takes its point
    off: mean = 2 eta - point. With as many points as samples it is a sample instead of a mean, beside a point that the
    server cannot tell. But its points are nearly equal.
    """
    if len(gamma) == NUM_CLIENT_SAMPLES:
        return 2 * eta - gamma.mean(0)
    return 2 * eta - gamma


def test_samples_are_reconstructed_with_full_support_and_not_with_the_safe_support():
    assert share_of_reconstructed_samples(NUM_CLIENT_SAMPLES) == 1
    assert share_of_reconstructed_samples(safe_support(NUM_CLIENT_SAMPLES)) == 0


def make_three_gaussians():
    generator = make_generator()
    means = torch.tensor(
        [[0.0, 0.0], [6.0, 0.0], [3.0, 5.0]],
        dtype=torch.float64,
    )
    samples = []
    for mean in means:
        noise = torch.randn(100, 2, generator=generator)
        samples.append(noise.double() + mean)
    return samples


def make_barycenter(samples, iterations):
    clients = [TransportClient(x, allow_reconstruction=True) for x in samples]
    return wasserstein_barycenter(
        clients, support=100, iterations=iterations, generator=make_generator(1)
    )


def barycenter_objective(samples, points):
    distances = [float(wasserstein_distance(x, points)) for x in samples]
    return np.mean(np.square(distances))


@pytest.mark.slow
def test_barycenter_approaches_pots_barycenter_with_the_iterations():
    samples = make_three_gaussians()
    rng = np.random.default_rng(0)
    initial = rng.normal(size=(100, 2)) + 3
    masses = [np.full(100, 0.01)] * 3
    positions = [x.numpy() for x in samples]
    reference = torch.from_numpy(ot.lp.free_support_barycenter(positions, masses, initial))

    points = [
        make_barycenter(
            samples,
            i,
        ).support_points
        for i in (1, 3, 10, 20)
    ]

    distances = [float(wasserstein_distance(x, reference)) for x in points]
    assert all(later < earlier for earlier, later in pairwise(distances))
    assert distances[-1] < 0.3  # both are local solutions, of 100 points each
    expected = barycenter_objective(samples, reference)
    assert barycenter_objective(samples, points[-1]) < 1.005 * expected


def test_reported_distances_are_the_wasserstein_distances_to_the_barycenter():
    samples = make_three_gaussians()

    result = make_barycenter(samples, 25)

    distances = [wasserstein_distance(x, result.support_points) for x in samples]
    assert_close(
        result.distances,
        torch.stack(distances),
        rtol=1e-2,
        atol=0,
    )
