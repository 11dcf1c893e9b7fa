"""DecayedShapley, BlendedContribution, OneRoundShapley: by formulas, and on the models of a federation's rounds."""

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from numpy.testing import assert_allclose
from torch import Tensor
from torch.testing import assert_close

from flsv.federation import FederatedLoop
from flsv.functional import decayed_shapley, exact_shapley
from flsv.metrics import BlendedContribution, DecayedShapley, OneRoundShapley
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit, validation_loss
from helpers.models import Plain, network

NAN = float("nan")


@pytest.mark.parametrize(
    ("values_by_round", "options", "num_skipped", "num_flagged"),
    [
        pytest.param(
            [[0.4, 0.3], [-0.1, 0.0], [NAN, 0.2], [0.0, 0.0]],
            {"decay": 0.5, "normalize": False},
            1,
            1,
            id="by what rounds gain",
        ),
        pytest.param(
            [[0.1, -0.3], [0.0, 0.0], [-0.1, -0.1]],
            {},
            1,
            2,
            id="rounds that gain nothing",
        ),
        pytest.param(
            [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]],
            {"decay": 0.5, "threshold": 0.26},
            0,
            0,
            id="rounds below the threshold",
        ),
    ],
)
def test_metric_equals_the_function_and_counts_rounds(
    values_by_round, options, num_skipped, num_flagged
):
    values_by_round = torch.tensor(values_by_round, dtype=torch.float64)
    metric = DecayedShapley(values_by_round.shape[1], **options)
    metric.set_dtype(torch.float64)
    decay = options.get("decay", 1)
    threshold = options.get("threshold", 0)

    evaluated_rounds = set()
    for index, values in enumerate(values_by_round):
        ids = (~values.isnan()).nonzero().flatten()
        game = AdditiveGame(values[ids])
        metric.update(ids, game, round_index=index)
        if game.is_evaluated:
            evaluated_rounds.add(index)

    expected = decayed_shapley(values_by_round, **options)
    assert_close(metric.compute(), expected, equal_nan=True)
    rounds_above_threshold = {
        index for index in range(len(values_by_round)) if decay ** (index + 1) >= threshold
    }
    assert evaluated_rounds == rounds_above_threshold
    assert int(metric.skipped) == num_skipped
    assert int(metric.flagged) == num_flagged


class AdditiveGame:
    """A coalition's utility is the sum of its members' values, ``[k]``."""

    def __init__(self, values: Tensor):
        self.values = values
        self.is_evaluated = False

    def __call__(self, masks: Tensor) -> Tensor:
        self.is_evaluated = True
        return masks.double() @ self.values


def make_additive_game(*worth: float):
    return lambda masks: masks.float() @ torch.tensor(worth)


class Watch:
    """An estimator that keeps the round's utilities of all coalitions, in the order of their numbers."""

    def __init__(self):
        self.tables: list[torch.Tensor] = []

    def __call__(self, utility, players: int, generator=None):
        masks = (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1
        self.tables.append(utility(masks.bool()))
        return exact_shapley(utility, players)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "server_lr"),
    [("fixed", 1.0), ("renormalized", 0.5)],
)
def test_coalition_models_of_decayed_shapley_have_the_rounds_aggregation_weights(
    tmp_path, kind, server_lr
):
    watch = Watch()
    recorder = KeepsRounds(server_lr=server_lr)
    metric = DecayedShapley(
        decay=0.5,
        estimator=watch,
        performance="negative_loss",
        coalition_weights=kind,
    )
    data = toy_data((3, 2, 2), server_val=0.3)
    loop = FederatedLoop(recorder, {"guo": metric}, seed=4)
    # Without BatchNorm, whose buffers are always averages.
    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=2)

    for round, table in zip(recorder.rounds, watch.tables):
        weights = round.aggregation_weights
        updates = round.client_vectors - round.global_vector
        for number, utility in enumerate(table.tolist()):
            members = [i for i in range(3) if number >> i & 1]
            member_weights = weights[members].float()
            if kind == "renormalized" and members:
                member_weights = member_weights / member_weights.sum()
            model = round.global_vector + server_lr * member_weights @ updates[members]
            loss = validation_loss(module, loop.space, model, data)
            assert -loss == pytest.approx(utility, abs=1e-5)


def normalized_shares(values: np.ndarray) -> np.ndarray:
    positive = np.maximum(values, 0)
    return positive / positive.sum()


def test_blended_contribution_equals_its_formula_with_an_absent_client():
    """Client 2 misses the first round: it gains nothing there, and its cosine is that of its own round."""
    rounds = [
        (
            [0, 1],
            [3.0, 1.0],
            [[2.0, 0.0], [1.0, 1.0]],
            [0.75, 0.25],
        ),
        (
            [0, 1, 2],
            [1.0, -4.0, 2.0],
            [[1.0, 0.0], [0.0, -1.0], [3.0, 4.0]],
            [0.5, 0.25, 0.25],
        ),
    ]
    metric = BlendedContribution(num_clients=4, decay=0.5)
    gain = np.zeros(4)
    cosine = np.zeros(4)
    num_rounds = np.zeros(4)
    for index, (ids, gains, updates, weights) in enumerate(rounds):
        game = make_additive_game(*gains)
        metric.update(
            torch.tensor(ids),
            game,
            torch.tensor(updates),
            round_index=index,
            aggregation_weights=torch.tensor(weights),
        )
        unit = np.array(updates) / np.linalg.norm(updates, axis=1, keepdims=True)
        everybody = np.array(weights) @ unit
        shapley = exact_shapley(game, len(ids)).values.numpy()
        gain[ids] += 0.5 ** (index + 1) * shapley
        cosine[ids] += unit @ everybody / np.linalg.norm(everybody)
        num_rounds[ids] += 1

    values = metric.compute()
    mean_cosine = cosine[:3] / num_rounds[:3]
    expected = normalized_shares(gain[:3]) / 2 + normalized_shares(mean_cosine) / 2

    assert_allclose(values[:3].numpy(), expected, rtol=1e-5)
    assert values[3].isnan()

    gain_reported = metric.diagnostics()["gain"][:3].numpy()
    assert_allclose(gain_reported, gain[:3], rtol=1e-5)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "server_lr", "cohort_size"),
    [("renormalized", 0.7, 3), ("fixed", 0.7, 2)],
)
def test_one_round_shapley_models_are_the_start_plus_members_updates(
    tmp_path, kind, server_lr, cohort_size
):
    """Algorithm 1 of Song et al. 2019, with all updates of all rounds kept; fixed weights whoever is drawn."""
    watch = Watch()
    recorder = KeepsRounds(server_lr=server_lr)
    data = toy_data((3, 2, 2), server_val=0.3)
    metric = OneRoundShapley(
        3,
        estimator=watch,
        performance="negative_loss",
        coalition_weights=kind,
    )
    sampler = UniformSampler(cohort_size)
    loop = FederatedLoop(recorder, {"or": metric}, sampler=sampler, seed=4)

    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=3)
    (table,) = watch.tables
    final = loop.space.read(module)
    loss = validation_loss(module, loop.space, final, data)

    assert table[-1].item() == pytest.approx(-loss, abs=1e-5)

    for number, utility in enumerate(table.tolist()):
        model = recorder.rounds[0].global_vector.clone()
        for round in recorder.rounds:
            is_member = [number >> i & 1 for i in round.client_ids.tolist()]
            weights = round.aggregation_weights * torch.tensor(is_member)
            if kind == "renormalized" and weights.sum() > 0:
                weights = weights / weights.sum()
            updates = round.client_vectors - round.global_vector
            model += server_lr * weights.float() @ updates
        loss = validation_loss(module, loop.space, model, data)
        assert -loss == pytest.approx(utility, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, 4])
def test_one_round_shapley_evaluates_the_game_of_a_shorter_run_at_its_end(tmp_path, rounds):
    loops = {}
    for planned in (2, rounds):
        metric = OneRoundShapley(planned)
        loop = FederatedLoop(metrics={"or": metric}, seed=0)
        fit(
            loop,
            tmp_path / str(planned),
            data=toy_data(server_val=0.3),
            rounds=planned,
            callbacks=[LambdaCallback(on_train_epoch_end=stop_after_round_2)],
        )
        loops[planned] = loop

    stopped = loops[rounds]
    values = stopped.contributions["or"]
    assert_close(values, loops[2].contributions["or"], rtol=0, atol=0)

    rows = stopped.history().query("metric == 'or'")
    assert rows["round"].tolist() == [1] * 3  # a row of each client, of the second round alone
    assert stopped.metrics["or"].diagnostics()["evaluations"] == 2**3


def stop_after_round_2(trainer: L.Trainer, module: L.LightningModule):
    trainer.should_stop = trainer.current_epoch == 1


def test_one_round_shapley_refuses_a_run_without_round_0():
    metric = OneRoundShapley(3, num_clients=2)
    with pytest.raises(ValueError, match="was not updated with round 0"):
        metric.update(
            torch.arange(2), 1, torch.zeros(4), torch.zeros(2, 4), torch.ones(2), lambda *_: None
        )
