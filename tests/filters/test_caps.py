"""NormCap and SampleCap: what metrics and aggregators are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import FedAvg
from flsv.attacks import Scaling
from flsv.errors import ConfigurationError
from flsv.filters import MultiKrum, NormCap, OutlierFilter, SampleCap
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionEstimation
from flsv.personalization import Standalone
from flsv.round import Round


def only_round(folder: Path, **options: Any) -> Round:
    class Kept(FedAvg):
        def end_round(self, round: Round) -> None:
            rounds.append(round)

    rounds: list[Round] = []
    fit(FederatedLoop(Kept(), seed=1, **options), folder, rounds=1)
    return rounds[0]


def lengths(round: Round) -> torch.Tensor:
    cut = round.space.num_parameters
    return (round.client_vectors[:, :cut].double() - round.global_vector[:cut].double()).norm(dim=1)


def test_nobody_is_longer_than_the_bound_and_its_direction_stays(tmp_path: Path) -> None:
    plain = only_round(tmp_path / "plain")
    filters = [OutlierFilter(), NormCap(1.25)]
    round = only_round(tmp_path / "capped", uploads=[Scaling(3.0, clients=[1])], filters=filters)
    honest, cut = lengths(plain), plain.space.num_parameters
    sent = honest * torch.tensor([1.0, 3.0, 1.0])
    bound = 1.25 * sent.median()
    torch.testing.assert_close(lengths(round), sent.clamp_max(bound), rtol=1e-5, atol=0)
    assert sent.max() > bound
    mine, other = (r.client_vectors[1] - r.global_vector for r in (round, plain))
    cosine = torch.nn.functional.cosine_similarity(mine[:cut], other[:cut], dim=0)
    assert cosine.item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(mine[cut:], other[cut:])


def test_a_bound_that_nobody_reaches_changes_nothing_to_the_bit(tmp_path: Path) -> None:
    filters = [OutlierFilter(), NormCap(100.0), SampleCap(100.0)]
    plain, round = only_round(tmp_path / "plain"), only_round(tmp_path / "capped", filters=filters)
    assert torch.equal(plain.server_vector, round.server_vector)  # type: ignore[arg-type]


def test_samples_count_up_to_the_bound_for_the_aggregator_too(tmp_path: Path) -> None:
    plain = only_round(tmp_path / "plain")
    round = only_round(tmp_path / "capped", filters=[OutlierFilter(), SampleCap(1.0)])
    median = int(plain.num_samples.double().quantile(0.5))
    assert round.num_samples.tolist() == plain.num_samples.clamp_max(median).tolist() != plain.num_samples.tolist()
    share = round.num_samples.double() / round.num_samples.sum()
    torch.testing.assert_close(round.aggregation_weights.double(), share, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"filters": [NormCap(1.0)], "personalizer": Standalone()}, "everybody starts from the global model"),
        ({"filters": [NormCap(1.0)], "metrics": {"others": ContributionEstimation()}}, "take their own updates"),
        ({"filters": [MultiKrum(1)], "personalizer": Standalone()}, "everybody starts from the global model"),
        ({"filters": [SampleCap(1.0), SampleCap(2.0)]}, "one of a kind"),
        ({"filters": [SampleCap(1.0), OutlierFilter()]}, "Put it before the others"),
    ],
)
def test_what_cannot_be(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FederatedLoop(**wrong)
