"""Updates that nobody should average, or that count too much: found in their own round, named once, capped."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from flsv import ClientEvaluation
from flsv.aggregation import Aggregator, FedAvg, GeometricMedian, ShapleyWeighted
from flsv.attacks import Attack, Scaling
from flsv.core import ClientUpdate, Round
from flsv.federation import FederatedLoop
from flsv.filters import Cohort, MultiKrum, NormCap, OutlierFilter, SampleCap
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CosineGradientShapley,
    GradientAgreement,
    GradientShapley,
    SurrogateFederatedShapley,
)
from flsv.personalization import Standalone
from flsv.report import open_run
from flsv.uploads import UploadContext
from flsv.utilities.errors import ConfigurationError
from helpers.data import toy_data
from helpers.fits import fit, shapfed, vector
from helpers.loops_by_hand import KeepsRounds
from helpers.models import Diverges, Plain, network, sgd


class Huge(Attack):
    """Sends an update with one huge entry, or a multiple of its update, in some rounds."""

    def __init__(self, size: float | None = None, rounds: Any = (1,), factor: float = 1.0) -> None:
        super().__init__([1])
        self.size, self.rounds, self.factor = size, rounds, factor

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        if context.round_index not in self.rounds:
            return update
        sent = self.factor * update
        sent[3] = sent[3] if self.size is None else self.size
        return sent


@pytest.mark.parametrize("size", [1e10, 3e38])
def test_huge_update_is_reported_and_left_out_if_it_would_drown_the_others(
    tmp_path: Path, size: float
) -> None:
    loop = FederatedLoop(uploads=[Huge(size)], metrics={"cgsv": CosineGradientShapley()}, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=4)
    (said,) = [
        str(w.message) for w in caught if "update" in str(w.message) or "NaN" in str(w.message)
    ]
    assert said.startswith("client 1 sent an update far larger than the cohort's in round 2 (norm ")
    assert [(each.what, each.client, each.times) for each in loop.events] == [
        ("large", 1, 1)
    ]  # and nobody later
    assert loop.named == {1: (1, 4)}
    assert "left out of the round" in said
    assert loop.participations.tolist() == [4, 3, 4, 4]
    assert vector(module).abs().max() < 100


def paid(
    folder: Path, rounds: range, aggregator: Aggregator, metrics: Any, factor: float
) -> FederatedLoop:
    loop = FederatedLoop(
        uploads=[Huge(None, rounds, factor)], metrics=metrics, aggregator=aggregator, seed=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = toy_data((4, 3, 4, 3, 4), server_val=0.3)
        fit(loop, folder, Plain(network(batch_norm=False)), data, rounds=4)
    return loop


METRICS = {
    "cssv": ClassSpecificShapley,
    "cgsv": CosineGradientShapley,
    "agreement": GradientAgreement,
    "slopes": GradientShapley,
    "ssv": SurrogateFederatedShapley,
}


@pytest.mark.parametrize(
    ("aggregator", "factor"),
    [(GeometricMedian(), 100.0), (ShapleyWeighted("ssv"), 1e30)],
    ids=["median", "by values"],
)
def test_client_with_faulty_updates_in_every_round_has_no_value(
    tmp_path: Path, aggregator: Aggregator, factor: float
) -> None:
    loop = paid(
        tmp_path, range(4), aggregator, {name: metric() for name, metric in METRICS.items()}, factor
    )
    assert loop.named == {1: (4, 4)}
    assert {each.what for each in loop.events} == {"large"}
    run = open_run(next(tmp_path.rglob("contributions.csv")).parent)
    assert run.named == {1: (4, 4)}
    for name in METRICS:
        assert [value == value for value in run.final(name)] == [True, False, True, True, True], (
            name
        )


def test_round_with_a_faulty_update_adds_nothing_to_its_clients_value(tmp_path: Path) -> None:
    """Values are sums over rounds: one update of a hundred times its length would be worth a hundred rounds."""
    once = paid(tmp_path / "once", range(3, 4), GeometricMedian(), {"m": GradientShapley()}, 100.0)
    before = paid(tmp_path / "never", range(0), GeometricMedian(), {"m": GradientShapley()}, 100.0)
    assert once.named == {1: (1, 4)}
    assert before.named == {}
    assert 0 < once.contributions["m"][1].abs() < before.contributions["m"].abs().max() * 2
    table = open_run(next((tmp_path / "once").rglob("contributions.csv")).parent).table
    rounds = {
        name: part["round"].tolist() for name, part in table.query("client == 1").groupby("metric")
    }
    assert rounds["m"] == [0, 1, 2]
    assert rounds["weight"] == [0, 1, 2, 3]


def test_an_aggregate_that_is_not_finite_leaves_the_model_of_the_round_before(
    tmp_path: Path,
) -> None:
    class Overflows(FedAvg):
        rounds = (1,)

        def aggregate(self, round: Any, contributions: Any) -> tuple[Tensor, Tensor]:
            vector, weights = super().aggregate(round, contributions)
            return (vector * float("inf") if round.round_index in self.rounds else vector), weights

    kept: list[Tensor] = []
    look = LambdaCallback(on_train_epoch_end=lambda trainer, module: kept.append(vector(module)))
    loop = FederatedLoop(aggregator=Overflows(), metrics={"cssv": ClassSpecificShapley()}, seed=1)
    with pytest.warns(
        UserWarning, match=r"round 2: Overflows\(.*not finite\. The model stays that of the round"
    ):
        fit(loop, tmp_path / "once", data=toy_data((4, 3, 4, 3)), rounds=3, callbacks=[look])
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[1], kept[2])
    assert loop.contributions["cssv"].isfinite().all()
    Overflows.rounds = (1, 2)
    with (
        pytest.warns(UserWarning, match="the round before"),
        pytest.raises(RuntimeError, match="round 3: .* second time running"),
    ):
        fit(
            FederatedLoop(aggregator=Overflows(), seed=1),
            tmp_path / "twice",
            data=toy_data((4, 3, 4, 3)),
            rounds=4,
        )


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_round_goes_on_without_an_excluded_outlier(tmp_path: Path, size: float) -> None:
    metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
    options: Any = {"uploads": [Huge(size, [0])], "evaluation": ClientEvaluation(keep_trained=True)}
    loop = FederatedLoop(metrics=metrics, filters=[OutlierFilter(exclude=True)], seed=1, **options)
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = fit(loop, tmp_path, data=toy_data((4, 3, 4, 3)), rounds=1, logger=logger)
    assert [str(w.message) for w in caught if "left out of the round" in str(w.message)]
    assert vector(module).abs().max() < 100
    assert loop.participations.tolist() == [1, 0, 1, 1]
    assert sorted(loop.state.trained) == [0, 2, 3]
    for value in (
        loop.weights,
        loop.contributions["cgsv"],
        loop.contributions["cssv"].by_class[:, 0],
    ):
        assert value is not None
        assert value.isnan().tolist() == [False, True, False, False]
    rows = [
        line.split(",")
        for line in (tmp_path / "run" / "contributions.csv").read_text().splitlines()
    ]
    norms = {int(row[2]): float(row[4]) for row in rows if row[1] == "update_norm"}
    assert norms[1] == pytest.approx(size, rel=1e-5)
    assert max(norms[0], norms[2], norms[3]) < 100
    seen = EventAccumulator(str(tmp_path / "run/client 1")).Reload()
    assert seen.Scalars("update_norm")[0].value == pytest.approx(size, rel=1e-5)


def cohort(norms: Tensor, index: int = 0, broken: Sequence[int] = ()) -> Cohort:
    updates = tuple(ClientUpdate(i, 1, norm[None], num_steps=1) for i, norm in enumerate(norms))
    starts, samples = (
        (torch.zeros(1, dtype=torch.float64),) * len(norms),
        torch.ones(len(norms), dtype=torch.long),
    )
    return Cohort(index, updates, norms[:, None], starts, samples, num_parameters=1, broken=broken)


def test_warning_about_nan_clients_names_the_earlier_sender_of_a_large_update() -> None:
    """After an update that was aggregated most return NaN: the message leads back to whose it was."""
    watch = OutlierFilter()
    watch.apply(cohort(torch.tensor([1.0, 1e4, 1.1, 0.9], dtype=torch.float64)))
    (line,) = watch.apply(cohort(torch.ones(1, dtype=torch.float64), 1, [4, 2, 3])).warnings
    assert "3 of 4 clients returned" in line
    assert "further back: client 1 sent an update far larger" in line
    assert watch.notices.state_dict() == {"not_finite": {}, "large": {1: 1}}


def failing(*pairs: tuple[int, int]) -> Diverges:
    return Diverges(network(), sgd, set(pairs))


def test_client_with_nan_is_left_out_and_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    loop = shapfed(personalizer=Standalone(), optimizer_state="persist")
    with pytest.warns(
        UserWarning, match="client 1 returned a model with NaN or infinite entries in round 2"
    ):
        module = fit(loop, tmp_path, failing((1, 1), (2, 1)))
    assert vector(module).isfinite().all()
    assert loop.weights is not None
    assert loop.weights.isfinite().tolist() == [True, False, True]
    assert loop.received()[1].isfinite().all()
    assert loop.contributions["cssv"].isfinite().all()  # client 1 keeps the row of round 0


def test_if_all_clients_fail_the_run_stops_with_the_reason(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="3 of 3 clients returned"),
        pytest.raises(
            RuntimeError, match=r"round 2: every client of the cohort returned a model with NaN"
        ),
    ):
        fit(FederatedLoop(seed=1), tmp_path, failing((1, 0), (1, 1), (1, 2)))


# ---- NormCap and SampleCap: what metrics and aggregators are given


def only_round(folder: Path, **options: Any) -> Round:
    kept = KeepsRounds()
    fit(FederatedLoop(kept, seed=1, **options), folder, rounds=1)
    return kept.rounds[0]


def lengths(round: Round) -> torch.Tensor:
    cut = round.space.num_parameters
    return (round.client_vectors[:, :cut].double() - round.global_vector[:cut].double()).norm(dim=1)


def test_norm_cap_bounds_lengths_and_keeps_directions(tmp_path: Path) -> None:
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


def test_caps_that_no_client_reaches_leave_the_round_bitwise_unchanged(tmp_path: Path) -> None:
    filters = [OutlierFilter(), NormCap(100.0), SampleCap(100.0)]
    plain, round = only_round(tmp_path / "plain"), only_round(tmp_path / "capped", filters=filters)
    assert torch.equal(plain.server_vector, round.server_vector)  # type: ignore[arg-type]


def test_sample_cap_limits_the_aggregators_sample_counts_too(tmp_path: Path) -> None:
    plain = only_round(tmp_path / "plain")
    round = only_round(tmp_path / "capped", filters=[OutlierFilter(), SampleCap(1.0)])
    median = int(plain.num_samples.double().quantile(0.5))
    assert (
        round.num_samples.tolist()
        == plain.num_samples.clamp_max(median).tolist()
        != plain.num_samples.tolist()
    )
    share = round.num_samples.double() / round.num_samples.sum()
    torch.testing.assert_close(round.aggregation_weights.double(), share, rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"filters": [NormCap(1.0)], "personalizer": Standalone()},
            "all clients start from the global model",
        ),
        (
            {"filters": [NormCap(1.0)], "metrics": {"others": ContributionEstimation()}},
            "take their own updates",
        ),
        (
            {"filters": [MultiKrum(1)], "personalizer": Standalone()},
            "all clients start from the global model",
        ),
        ({"filters": [SampleCap(1.0), SampleCap(2.0)]}, "one of a kind"),
        ({"filters": [SampleCap(1.0), OutlierFilter()]}, "Put it before the others"),
    ],
)
def test_filters_with_wrong_arguments_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FederatedLoop(**wrong)


def test_multi_krum_keeps_the_update_closest_to_the_others() -> None:
    kept = MultiKrum(1, keep=1).apply(
        cohort(torch.tensor([5.0, 5.1, 5.2, 1.0, 9.0], dtype=torch.float64))
    )
    assert kept.ids == [1]
