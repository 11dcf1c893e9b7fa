"""The dynamic top-k: rules one by one, and how soon it finds everybody relevant."""

import pytest
import torch

from flsv.errors import ConfigurationError
from flsv.functional import discovery_bound, top_k_download

nan = float("nan")


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def choose(relevance, own=0, k=2, available=None, explore="score", seed=0):
    relevance = torch.tensor(relevance)
    there = torch.ones(len(relevance), dtype=torch.bool) if available is None else torch.tensor(available)
    return top_k_download(relevance, there, own, k, explore, draw(seed)).tolist()


def test_the_first_round_is_random_and_uniform():
    counts = torch.zeros(6)
    for seed in range(600):
        chosen = choose([nan] * 6, own=2, k=2, seed=seed)
        assert len(set(chosen)) == 2
        counts[chosen] += 1
    assert counts[2] == 0
    # Each of five others 240 times of 600 on average, standard deviation 12.
    assert (counts[[0, 1, 3, 4, 5]] - 240).abs().max() < 60


def test_by_score_while_somebody_is_unvisited():
    assert choose([9.0, 0.1, 0.3, nan, -0.2], k=2) == [2, 1]
    assert choose([9.0, 0.1, 0.3, nan, -0.2], k=3) == [2, 1, 3]


def test_unvisited_first():
    assert choose([9.0, 0.1, 0.3, nan, -0.2], k=2, explore="unvisited") == [3, 2]


def test_all_visited_as_many_as_are_positive():
    assert choose([9.0, 0.1, 0.3, 0.2, -0.2], k=1) == [2, 3, 1]
    assert choose([9.0, -0.1, 0.3, -0.2, -0.2], k=4) == [2]


def test_who_is_not_available_is_not_downloaded():
    # The only unvisited one cannot be had, so k is that of the positive scores.
    assert choose([9.0, 0.1, nan, 0.5, -1.0], k=1, available=[True, True, False, True, True]) == [3, 1]
    assert choose([nan] * 3, available=[True, False, False]) == []


def discover(n, relevant, k, explore, seed):
    """Rounds until client 0 has looked at all relevant ones, if a look tells the truth."""
    scores, generator, rounds = torch.full((n,), nan), draw(seed), 0
    while scores[relevant].isnan().any():
        ids = top_k_download(scores, torch.ones(n, dtype=torch.bool), 0, k, explore, generator)
        scores[ids] = -0.1
        scores[[i for i in ids.tolist() if i in relevant]] = 0.3
        rounds += 1
        if rounds > 3 * n:
            return float("inf")
    return rounds


@pytest.mark.parametrize(("n", "m", "k"), [(10, 2, 5), (20, 2, 5), (20, 4, 5), (20, 12, 3), (10, 9, 20)])
def test_unvisited_first_keeps_the_papers_bound(n, m, k):
    relevant = torch.arange(1, m + 1).tolist()
    rounds = [discover(n, relevant, k, "unvisited", seed) for seed in range(60)]
    assert max(rounds) <= discovery_bound(n, m, k)


def test_by_score_misses_it_for_many():
    """Relevant clients found early take the places: what the docstring warns of."""
    assert max(discover(20, [1, 2, 3, 4], 5, "score", seed) for seed in range(60)) > discovery_bound(20, 4, 5)
    assert discover(20, list(range(1, 13)), 3, "score", 0) == float("inf")


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="k=0"):
        choose([nan, nan], k=0)
    with pytest.raises(ConfigurationError, match="explore"):
        choose([nan, nan], explore="best")
    with pytest.raises(ValueError, match=r"\[n\]"):
        choose([nan, nan], available=[True])
    with pytest.raises(ValueError, match="own"):
        choose([nan, nan], own=2)
