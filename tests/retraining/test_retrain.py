"""flsv.retrain: the values of flsv retrain, of a Trainer, a module and data in Python."""

import os
from functools import partial

import joblib
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from pandas.testing import assert_frame_equal
from retraining.killed_worker import ModuleThatKillsFirstWorker
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn
from torchmetrics.classification import MulticlassF1Score

import flsv
from flsv import FederatedLoop, Reporting
from flsv.cli import main
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.games.members import members_of
from flsv.metrics import ShadowShapley
from flsv.sampling import UniformSampler
from helpers import refused
from helpers.coalitions_by_hand import SEED, GameByFits, make_shadow_loop, make_three_clients
from helpers.data import FEATURES, toy_data
from helpers.fits import plain_trainer, state_vector, trainer_for
from helpers.forked import Forked
from helpers.retrained import choose_differently_with_each_seed
from zoo.optimizers import LowersRateOnPlateau, StepsByHand
from zoo.program import Base, make_mlp

QUIET = Reporting(table=False)


def make_trainer(folder, sampler=None, rounds=2, reporting=QUIET):
    loop = FederatedLoop(sampler=sampler, seed=SEED, reporting=reporting)
    return trainer_for(loop, folder, rounds)


def retrain(trainer, module, coalitions="singles", seeds=1):
    return flsv.retrain(
        trainer,
        module,
        make_three_clients(),
        coalitions=coalitions,
        seeds=seeds,
        metric="negative_loss",
    )


@pytest.mark.slow
def test_retrain_with_one_seed_equals_a_fit_of_each_coalition(tmp_path):
    module = Base(lambda: make_mlp(nn.Dropout(0.3)))
    masks = few_coalitions(3, "all")
    game = GameByFits(partial(make_trainer, tmp_path), module, make_three_clients())
    expected = few_coalitions_shapley(masks, game(masks)).values

    table = retrain(make_trainer(tmp_path), module, coalitions="all")

    values = torch.tensor(table["value"])
    torch.testing.assert_close(values, expected.double(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_all_seeds_train_the_coalitions_that_the_first_one_has_chosen(tmp_path, monkeypatch):
    module = Base(make_mlp)
    expected = retrain(make_trainer(tmp_path), module, coalitions="both", seeds=2)
    choose_differently_with_each_seed(monkeypatch)

    table = retrain(make_trainer(tmp_path), module, coalitions="auto", seeds=2)

    assert_frame_equal(table, expected)


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("sampler", [None, UniformSampler(2)])
def test_retrain_with_one_seed_has_the_values_and_intervals_of_the_fit(tmp_path, sampler):
    """Intervals have a part for the spread of the last rounds' values."""
    rounds = 4
    module = Base(make_mlp)
    metric = ShadowShapley(coalitions="all", performance="negative_loss")
    loop = make_shadow_loop(metric, sampler=sampler)
    trainer_for(loop, tmp_path / "fit", rounds).fit(module, make_three_clients())

    trainer = make_trainer(tmp_path / "retrained", sampler, rounds)
    table = retrain(trainer, Base(make_mlp), coalitions="all")

    values = loop.values["shadow"]
    for column, numbers in [
        ("value", values.value),
        ("low_over_seeds", values.low),
        ("high_over_seeds", values.high),
    ]:
        torch.testing.assert_close(torch.tensor(table[column]), numbers, rtol=0, atol=1e-6)


def macro_auroc(logits, labels):
    probabilities = logits.softmax(1)
    return roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")


def macro_f1(logits, labels):
    return f1_score(labels, logits.argmax(1), average="macro")


def three_clients_scored_in_batches():
    """Return data with 39 held-out samples, which the server reads in batches of ten. Of one batch, the mean over
    batches would be the score of all samples."""
    return toy_data((4, 1, 2), server_val=0.3, eval_batch_size=10)


@pytest.fixture(scope="module")
def game_by_fits(tmp_path_factory):
    make_silent_trainer = partial(
        make_trainer, tmp_path_factory.mktemp("fits"), reporting=Reporting(table=False, files=False)
    )
    return GameByFits(make_silent_trainer, Base(), three_clients_scored_in_batches())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "score_by_sklearn"),
    [("auroc", macro_auroc), (MulticlassF1Score(3), macro_f1)],
    ids=["auroc", "F1 of torchmetrics"],
)
def test_values_by_a_metric_of_all_samples_equal_those_by_sklearns_score_of_fits(
    tmp_path, game_by_fits, metric, score_by_sklearn
):
    data = three_clients_scored_in_batches()
    table = flsv.retrain(make_trainer(tmp_path), Base(), data, seeds=1, metric=metric)

    masks = few_coalitions(3, "all")
    scores = []
    for members in members_of(masks):
        logits, labels = game_by_fits.outputs(members)
        scores.append(score_by_sklearn(logits, labels))
    expected = few_coalitions_shapley(masks, torch.tensor(scores)).values
    np.testing.assert_allclose(table["value"], expected, atol=1e-6)


@pytest.mark.slow
def test_retrain_leaves_trainer_module_random_numbers_and_folder_as_they_were(tmp_path):
    module = Base()
    trainer = make_trainer(tmp_path, rounds=1)
    initial_vector = state_vector(module)
    generator_state = torch.get_rng_state()

    retrain(trainer, module)

    assert torch.equal(state_vector(module), initial_vector)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert trainer.current_epoch == 0
    assert trainer.callbacks[0].round_index == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_retrain_with_a_module_factory_initializes_weights_anew_for_each_seed(tmp_path):
    weights_file = tmp_path / "weights"
    # Files that coalitions open are restored after them. This one is open before.
    descriptor = os.open(weights_file, os.O_RDWR | os.O_CREAT)

    def make_module_and_write_a_weight():
        # Drawn before the module, which always seeds its weights by the same number.
        weights = torch.randn(8, FEATURES)
        module = StepsByHand()
        first_layer = module.net[0]
        first_layer.weight.data = weights
        os.write(descriptor, f"{weights[0, 0]:.6f}\n".encode())
        return module

    trainer = make_trainer(tmp_path / "run", rounds=1)
    num_seeds = 2
    table = retrain(trainer, make_module_and_write_a_weight, seeds=num_seeds)

    os.close(descriptor)
    different_weights = set(weights_file.read_text().split())
    assert len(different_weights) == num_seeds
    assert (table["low_over_seeds"] < table["value"]).all()
    assert table["share"].sum() == pytest.approx(1)


def worker_processes(cluster):
    return {nanny.pid for nanny in cluster.workers.values()}


def compare_dask_with_one_process(folder):
    """Compare values by workers of Dask, of which one is killed, with those of one process."""
    import distributed

    # Coalitions write into copies of the files within the working folder: this one is beside it.
    marker_file = folder.with_name(f"{folder.name}_killed")
    module = ModuleThatKillsFirstWorker(marker_file)
    values_of_one_process = retrain(make_trainer(folder / "one process", rounds=1), module)

    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster), joblib.parallel_config("dask"):
        first_workers = worker_processes(cluster)
        values_of_workers = retrain(make_trainer(folder / "workers", rounds=1), module)
        last_workers = worker_processes(cluster)

    killed_workers = first_workers - last_workers
    assert len(killed_workers) == 1
    assert_frame_equal(values_of_workers, values_of_one_process)


@pytest.mark.slow
@pytest.mark.long
def test_workers_of_dask_give_the_values_of_one_process_although_one_is_killed(tmp_path):
    """Dask leaves a thread in its process, and a process with threads must not be forked."""
    pytest.importorskip("distributed")
    status, output = Forked(tmp_path, compare_dask_with_one_process, tmp_path).wait()
    assert status == 0, output


def test_retrain_without_a_federated_loop_is_refused(tmp_path):
    with refused("no FederatedLoop"):
        retrain(plain_trainer(tmp_path), LowersRateOnPlateau)


@pytest.fixture
def fitted_trainer(tmp_path):
    trainer = make_trainer(tmp_path, rounds=1)
    trainer.fit(LowersRateOnPlateau(), make_three_clients())
    return trainer


def test_retrain_with_a_fitted_trainer_is_refused(fitted_trainer):
    with refused("been fitted for 1 rounds"):
        retrain(fitted_trainer, LowersRateOnPlateau)


@pytest.mark.usefixtures("fitted_trainer")
def test_retrain_command_for_a_run_started_from_python_names_the_function(tmp_path, capsys):
    status = main(["retrain", str(tmp_path)])

    message = " ".join(capsys.readouterr().err.split())
    assert status != 0
    assert "started from Python" in message
    assert "print(flsv.retrain(trainer, module, data))" in message


class ModuleThatEndsWithItsBestCheckpoint(StepsByHand):
    """Gets worse from round 1 on, and ends with the weights that its ModelCheckpoint found best."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if self.current_epoch > 0:
            with torch.no_grad():
                self.net[0].weight.neg_()

    def on_train_end(self):
        checkpoint = self.trainer.checkpoint_callback
        best = torch.load(checkpoint.best_model_path, weights_only=True)
        self.load_state_dict(best["state_dict"])


def make_trainer_with_checkpoints(loop, folder):
    checkpoint = ModelCheckpoint(folder / "best", monitor="val_loss")
    return trainer_for(loop, folder, rounds=2, callbacks=[checkpoint], enable_checkpointing=True)


@pytest.mark.slow
def test_retrain_saves_the_checkpoints_that_the_module_reads_outside_of_the_folder(tmp_path):
    metric = ShadowShapley(coalitions="singles", performance="negative_loss")
    valued_loop = make_shadow_loop(metric)
    trainer_of_fit = make_trainer_with_checkpoints(valued_loop, tmp_path / "run")
    trainer_of_fit.fit(ModuleThatEndsWithItsBestCheckpoint(), make_three_clients())

    loop_to_retrain = FederatedLoop(seed=SEED, reporting=QUIET)
    trainer = make_trainer_with_checkpoints(loop_to_retrain, tmp_path / "retrained")
    table = retrain(trainer, ModuleThatEndsWithItsBestCheckpoint())

    assert table["value"].tolist() == valued_loop.contributions["shadow"].tolist()
    assert not (tmp_path / "retrained" / "best").exists()
