"""Averages of models: against the average of the global models by hand, wherever the callback stands in the list."""

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from flsv.federation import FederatedLoop
from helpers import refused
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit, plain_trainer, state_vector
from helpers.models import Plain

averaging = pytest.importorskip(
    "lightning.pytorch.callbacks.weight_averaging", reason="Lightning before 2.6"
)
WeightAveraging, EMAWeightAveraging = averaging.WeightAveraging, averaging.EMAWeightAveraging

ROUNDS = 5
STEPS = 13  # of a round

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:.*{message}")
    for message in (
        "holds rounds of an earlier run",
        "callbacks used to create the checkpoint",
        "is not empty",
    )
]


def global_models_of(aggregator):
    return [round.server_vector for round in aggregator.rounds]


def mean_model(models):
    return torch.stack(models).double().mean(0)


def moving_average(models, decay=0.8):
    average = models[0].double()
    for model in models[1:]:
        average = decay * average + (1 - decay) * model.double()
    return average


make_moving_average = partial(EMAWeightAveraging, decay=0.8)


class FromRound3(averaging.WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 3


def fit_beside_loop(
    average,
    folder,
    rounds,
    *,
    is_before_loop,
    module=None,
    aggregator=None,
    callbacks=(),
    ckpt_path=None,
):
    """Fit with an average before or after the loop. Return the module, and the rounds' global models."""
    module = module or Plain()
    aggregator = aggregator or KeepsRounds()
    loop = FederatedLoop(aggregator, seed=1)
    loop_and_average = [average, loop] if is_before_loop else [loop, average]
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = plain_trainer(
        folder, rounds, callbacks=[*loop_and_average, *callbacks], enable_checkpointing=saves
    )
    trainer.fit(module, toy_data(), ckpt_path=ckpt_path)
    return module, global_models_of(aggregator)


@pytest.fixture(scope="module")
def models_without_averaging(tmp_path_factory):
    """The global models of a federation without averaging."""
    aggregator = KeepsRounds()
    loop = FederatedLoop(aggregator, seed=1)
    fit(loop, tmp_path_factory.mktemp("plain"), rounds=ROUNDS)
    return global_models_of(aggregator)


# With 13 steps a round, round 2 has the steps 26 to 38.
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("make_average", "average_by_hand", "is_before_loop"),
    [
        (WeightAveraging, mean_model, True),
        # Of the steps 0, 20, 40 and 60 none is in round 2.
        (
            lambda: make_moving_average(update_every_n_steps=20),
            lambda models: moving_average([models[0], models[1], models[3], models[4]]),
            True,
        ),
        (
            lambda: make_moving_average(update_starting_at_step=27),
            lambda models: moving_average(models[2:]),
            True,
        ),
        (FromRound3, lambda models: mean_model(models[3:]), False),
    ],
)
def test_weight_averaging_averages_the_global_models_of_the_rounds(
    tmp_path, models_without_averaging, make_average, average_by_hand, is_before_loop
):
    validated_models = []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer, module, *args):
            validated_models.append(state_vector(module))

    module, global_models = fit_beside_loop(
        make_average(),
        tmp_path,
        ROUNDS,
        is_before_loop=is_before_loop,
        callbacks=[Watch()],
    )

    assert module.trainer.global_step == STEPS * ROUNDS
    assert len(global_models) == ROUNDS

    expected = average_by_hand(global_models)
    torch.testing.assert_close(state_vector(module), expected, rtol=1e-5, atol=1e-6)
    # Validation sees the average with this round in it.
    torch.testing.assert_close(validated_models[-1], expected, rtol=1e-5, atol=1e-6)
    # Training goes on from the global models, and not from their average.
    for model, expected_model in zip(global_models, models_without_averaging, strict=True):
        assert torch.equal(model, expected_model)


@pytest.mark.slow
def test_run_with_weight_averaging_resumes_bitwise_from_any_checkpoint(tmp_path):
    fit_averaged = partial(fit_beside_loop, folder=tmp_path, rounds=4, is_before_loop=False)
    within = ModelCheckpoint(
        tmp_path / "within", every_n_train_steps=20, save_top_k=-1, filename="{step}"
    )
    # After validation, and before the epoch's end: the round is complete then, and so must the average be.
    at_validation = ModelCheckpoint(
        tmp_path / "after", "{step}", save_top_k=-1, save_on_train_epoch_end=False
    )
    module, models = fit_averaged(make_moving_average(), callbacks=[within, at_validation])
    paths = sorted([*(tmp_path / "within").iterdir(), *(tmp_path / "after").iterdir()])

    assert [path.stem for path in paths] == [f"step={n}" for n in (13, 26, 39, 52, 20, 40)]

    for path in paths:
        # Where nothing is left to train, Lightning does not call on_train_end.
        if path.stem == "step=52":
            continue
        resumed, resumed_models = fit_averaged(make_moving_average(), ckpt_path=path)
        assert torch.equal(state_vector(resumed), state_vector(module)), path
        assert torch.equal(resumed_models[-1], models[-1]), path


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("make", "is_before_loop"), [(WeightAveraging, True), (make_moving_average, False)]
)
def test_checkpoint_saved_after_the_fit_resumes_from_the_global_model_not_the_average(
    tmp_path, make, is_before_loop
):
    def fit_averaged(rounds, ckpt_path=None):
        module, _ = fit_beside_loop(
            make(), tmp_path, rounds, is_before_loop=is_before_loop, ckpt_path=ckpt_path
        )
        return module

    delivered_module = fit_averaged(rounds=2)
    checkpoint_path = tmp_path / "end.ckpt"
    delivered_module.trainer.save_checkpoint(checkpoint_path)
    saved_state = torch.load(checkpoint_path, weights_only=False)["state_dict"]

    for name, value in delivered_module.state_dict().items():
        assert torch.equal(value, saved_state[name])

    resumed = fit_averaged(rounds=4, ckpt_path=checkpoint_path)
    uninterrupted = fit_averaged(rounds=4)
    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))


FAILED_ROUND = 1


class Fails(Plain):
    def validation_step(self, batch, batch_idx):
        if self.trainer.current_epoch == FAILED_ROUND:
            raise ArithmeticError
        super().validation_step(batch, batch_idx)


@pytest.mark.fast_rows
@pytest.mark.parametrize("is_before_loop", [True, False])
def test_an_exception_during_validation_leaves_the_global_model_in_the_module(
    tmp_path, is_before_loop
):
    fit_averaged = partial(
        fit_beside_loop, folder=tmp_path, rounds=3, is_before_loop=is_before_loop
    )
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_on_exception=True, save_top_k=0)

    module = Fails()
    aggregator = KeepsRounds()

    with pytest.raises(ArithmeticError):
        fit_averaged(WeightAveraging(), module=module, aggregator=aggregator, callbacks=[saving])

    model_of_failed_round = global_models_of(aggregator)[FAILED_ROUND]
    assert torch.equal(state_vector(module), model_of_failed_round.double())

    # Resumed from what was saved, it equals a run that never failed.
    checkpoint = tmp_path / f"epoch={FAILED_ROUND}.ckpt"
    resumed, _ = fit_averaged(WeightAveraging(), ckpt_path=checkpoint)
    uninterrupted, _ = fit_averaged(WeightAveraging())
    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))


class PerBatch(averaging.WeightAveraging):
    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)


@pytest.mark.parametrize(
    ("callbacks", "match"),
    [
        ([PerBatch], "PerBatch overrides on_train_batch_end"),
        ([WeightAveraging, make_moving_average], "a checkpoint can hold"),
    ],
)
def test_weight_averaging_callbacks_incompatible_with_rounds_are_refused(
    tmp_path, callbacks, match
):
    with refused(match):
        fit(FederatedLoop(seed=1), tmp_path, callbacks=[make() for make in callbacks])
