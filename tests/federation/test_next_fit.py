"""A further fit of one Trainer goes on with its run, or is refused by name; and changed settings are named."""

from functools import partial

import pytest
import torch

from flsv.aggregation import FedAvg
from flsv.data import FederatedDataModule
from flsv.metrics import CosineGradientShapley, ShadowShapley
from helpers import refused, warns
from helpers.coalitions_by_hand import make_shadow_loop, make_three_clients
from helpers.data import toy_data, toy_sets
from helpers.fits import fit, fit_and_save, trainer_for
from helpers.models import Plainest, make_sgd

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*bar is not installed"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
ROUNDS = 2


def make_loop():
    shadow = ShadowShapley(coalitions="singles", performance="negative_loss")
    return make_shadow_loop(shadow, metrics={"cosine": CosineGradientShapley()})


def make_loop_without_coalitions():
    return make_loop().replace(metrics={"cosine": CosineGradientShapley()})


def make_next_fold():
    return FederatedDataModule(toy_sets(seed=1), make_three_clients().partitioner, batch_size=8)


make_other_split = partial(toy_data, (4, 2, 1), server_val=0.3)


def same_module(module):
    return module


def initial_module(module):
    return Plainest()


def fit_once(folder, make_loop=make_loop_without_coalitions):
    loop = make_loop()
    trainer = trainer_for(loop, folder, ROUNDS)
    module = Plainest()
    trainer.fit(module, make_three_clients())
    return trainer, module, loop


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def plan_more_rounds(trainer):
    trainer.fit_loop.max_epochs = 2 * ROUNDS


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("choose_module", "make_data", "num_rounds", "message"),
    [
        (
            same_module,
            make_next_fold,
            2 * ROUNDS,
            r"other samples or labels for clients \[0, 1, 2\]",
        ),
        (same_module, make_other_split, ROUNDS, "data.partitioner is"),
        (initial_module, make_three_clients, 2 * ROUNDS, "the weights of Plainest have changed"),
    ],
    ids=["next fold", "another split", "the initial module"],
)
def test_fit_of_another_federation_is_refused_by_name_and_changes_nothing(
    tmp_path, choose_module, make_data, num_rounds, message
):
    trainer, trained_module, loop = fit_once(tmp_path)
    values = loop.contributions["cosine"].clone()
    files = read_files(tmp_path)
    module = choose_module(trained_module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    trainer.fit_loop.max_epochs = num_rounds
    with refused(message):
        trainer.fit(module, make_data())

    assert read_files(tmp_path) == files
    assert loop.contributions["cosine"].equal(values)
    for name, tensor in module.state_dict().items():
        assert tensor.equal(state[name])


def test_fit_without_rounds_says_so_and_writes_nothing(tmp_path):
    trainer, module, loop = fit_once(tmp_path)
    files = read_files(tmp_path)
    values = loop.contributions["cosine"].clone()

    with warns("2 rounds have been run already"):
        trainer.fit(module, make_three_clients())

    assert read_files(tmp_path) == files
    assert loop.contributions["cosine"].equal(values)


def test_fit_with_more_rounds_runs_them_after_a_fit_without_rounds(tmp_path):
    trainer, module, loop = fit_once(tmp_path)
    with warns("2 rounds have been run already"):
        trainer.fit(module, make_three_clients())

    plan_more_rounds(trainer)
    trainer.fit(module, make_three_clients())

    assert loop.round_index == 2 * ROUNDS


@pytest.mark.slow
def test_further_rounds_on_the_same_data_continue_the_values(tmp_path):
    at_once = make_loop_without_coalitions()
    module_at_once = fit(
        at_once, tmp_path / "at_once", Plainest(), make_three_clients(), 2 * ROUNDS
    )
    trainer, module, loop = fit_once(tmp_path / "two fits")

    plan_more_rounds(trainer)
    trainer.fit(module, make_three_clients())

    for name, tensor in module_at_once.state_dict().items():
        assert module.state_dict()[name].equal(tensor)
    torch.testing.assert_close(loop.contributions["cosine"], at_once.contributions["cosine"])
    assert loop.history()["round"].max() == 2 * ROUNDS - 1


def test_further_fit_keeps_the_seed_that_was_drawn(tmp_path):
    loop = make_loop_without_coalitions().replace(seed=None)
    trainer = trainer_for(loop, tmp_path, ROUNDS)
    module = Plainest()
    trainer.fit(module, make_three_clients())
    seed = loop.state.seed

    plan_more_rounds(trainer)
    trainer.fit(module, make_three_clients())

    assert loop.state.seed == seed


def test_further_fit_with_another_seed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    loop = make_loop_without_coalitions().replace(seed=None)
    trainer = trainer_for(loop, tmp_path, ROUNDS)
    module = Plainest()
    data = toy_data((4, 1, 2), server_val=0.3, seed=5)
    trainer.fit(module, data)

    monkeypatch.setenv("PL_GLOBAL_SEED", "4")
    plan_more_rounds(trainer)
    with refused("the seed is 4, but"):
        trainer.fit(module, toy_data((4, 1, 2), server_val=0.3, seed=5))


def test_another_loop_in_a_trainer_with_rounds_is_refused(tmp_path):
    trainer, module, _ = fit_once(tmp_path)
    trainer.callbacks = [make_loop_without_coalitions()]
    plan_more_rounds(trainer)

    with refused("rounds, but its FederatedLoop has run none"):
        trainer.fit(module, make_three_clients())


@pytest.mark.slow
def test_further_fit_is_refused_if_coalitions_are_trained(tmp_path):
    trainer, module, _ = fit_once(tmp_path, make_loop)
    plan_more_rounds(trainer)

    with refused("has run 2 rounds in an earlier fit.*resume from a checkpoint"):
        trainer.fit(module, make_three_clients())


# ---- a run that goes on with other settings


@pytest.mark.slow
def test_settings_that_changed_on_resume_are_named_in_one_consistency_warning(tmp_path):
    loop = make_loop().replace(aggregator=FedAvg(server_lr=0.1))
    checkpoint = fit_and_save(
        loop, tmp_path / "first", Plainest(make_sgd(0.1)), make_three_clients(), ROUNDS
    )

    resumed = make_loop().replace(aggregator=FedAvg(server_lr=0.2))
    data = toy_data((4, 1, 2), batch_size=16, server_val=0.3)
    fit(resumed, tmp_path / "second", Plainest(make_sgd(0.4)), data, 2 * ROUNDS, checkpoint)

    (doubt,) = resumed.run.coalition_differences
    assert "lr is 0.4 and was 0.1, from round 3" in doubt
    assert "batch_size is 16 and was 8" in doubt
    assert "aggregator.server_lr is 0.2 and was 0.1" in doubt
    assert "a global" not in doubt
