"""Round: what is derived from the clients' vectors, against the formulas written out."""

import pytest
import torch
from torch import nn

from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.round import VOCABULARY, Round, stage_of


def make_round(starts: bool = False, module: nn.Module | None = None) -> Round:
    module = module or nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    space = ParameterSpace(module)
    torch.manual_seed(1)
    return Round(
        round_index=0,
        client_ids=torch.tensor([0, 2]),
        num_samples=torch.tensor([10, 30]),
        global_vector=torch.randn(space.size),
        client_vectors=torch.randn(2, space.size),
        starts=list(torch.randn(2, space.size)) if starts else None,
        space=space,
    )


@pytest.mark.parametrize("starts", [False, True])
def test_updates_and_heads_count_from_where_the_client_started(starts: bool) -> None:
    round = make_round(starts)
    origin = round.start_vectors if starts else round.global_vector
    assert torch.equal(round.client_updates, round.client_vectors - origin)
    expected = round.space.head.rows(round.client_updates)
    assert torch.equal(round.client_heads, expected)
    assert round.client_heads.shape == (2, 3, 7)


def test_combine_moves_parameters_by_the_weighted_updates_and_averages_buffers() -> None:
    """Whatever the weights sum to: running statistics are never extrapolated."""
    round = make_round()
    x, cut, (one, other) = round.global_vector, round.space.num_parameters, round.client_vectors
    torch.testing.assert_close(round.combine(torch.tensor([0.25, 0.75])), 0.25 * one + 0.75 * other)
    result = round.combine(torch.tensor([0.5, 1.5]))
    torch.testing.assert_close(result[:cut], (x + 0.5 * (one - x) + 1.5 * (other - x))[:cut])
    torch.testing.assert_close(result[cut:], (0.25 * one + 0.75 * other)[cut:])
    torch.testing.assert_close(round.combine(torch.zeros(2)), x)


def test_what_clients_agree_on_is_not_taken_over_where_nobody_has_a_weight() -> None:
    """Buffers that all have changed alike, such as BatchNorm's count of batches."""
    round = make_round()
    cut = round.space.num_parameters
    round.client_vectors[:, cut:] = round.global_vector[cut:] + 1
    assert torch.equal(round.combine(torch.zeros(2)), round.global_vector)
    assert torch.equal(round.combine(torch.tensor([0.25, 0.25]))[cut:], round.global_vector[cut:] + 1)


def test_what_all_have_moved_alike_moves_by_its_share_and_what_nobody_moved_stays() -> None:
    """To the bit: weights that are frozen must not drift."""
    round = make_round()
    start, cut = round.global_vector, round.space.num_parameters
    round.client_vectors[:, : cut - 1] = start[: cut - 1]
    round.client_vectors[:, 0] = start[0] + 1
    result = round.combine(torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(result[0], start[0] + 0.7)
    assert torch.equal(result[1 : cut - 1], start[1 : cut - 1])


def test_server_fields_exist_only_after_aggregation() -> None:
    round = make_round()
    heads = round.client_heads
    names = {name for name in VOCABULARY if stage_of([name]) == "aggregation"}
    assert names == {"server_vector", "server_update", "server_head", "server_head_weights", "aggregation_weights"}
    for name in sorted(names - {"server_vector", "aggregation_weights"}):
        with pytest.raises(RuntimeError, match="only after aggregation"):
            getattr(round, name)
    weights = torch.tensor([0.2, 0.8])
    after = round.aggregated(round.combine(weights), weights)
    assert after.client_heads is heads  # not computed twice
    torch.testing.assert_close(after.server_head, 0.2 * heads[0] + 0.8 * heads[1])
    torch.testing.assert_close(after.server_update, after.server_vector - round.global_vector)
    # With weights that sum to 1 and a common start, the head of the server's update is the average of the heads.
    torch.testing.assert_close(after.server_head, round.space.head.rows(after.server_update), rtol=1e-4, atol=1e-5)


def test_no_head() -> None:
    with pytest.raises(ConfigurationError, match="no linear layer"):
        _ = make_round(module=nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))).client_heads
