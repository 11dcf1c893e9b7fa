"""State that nothing declares: each client trains with its own, a run resumes with it, and scoring leaves it alone.

What coalitions are with each kind is in ``tests/retraining/test_hidden_state.py``.
"""

import re
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from flsv.federation import FederatedLoop
from flsv.isolation.program_state import restored_program
from flsv.metrics import PartialFederatedShapley
from flsv.sampling import FixedCohort
from flsv.utilities.seeding import seed_generators
from helpers import refused, warns
from helpers.fits import KeepsRounds, assert_resumes, fit, fit_and_save, state_vector
from zoo.attributes import CarriesState, DrawsFromFourGenerators
from zoo.networks import ChangesItself, add_layer, hook_forward, stop_tracking
from zoo.program import RATE, SEED, Base, fit_program, make_data, with_three_clients
from zoo.table import ROWS, rows_with


def first_update_of_client_2(program, folder, cohort):
    recorder = KeepsRounds()
    two_rounds = replace(program, rounds=2)
    fit_program(two_rounds, folder, aggregator=recorder, sampler=FixedCohort(cohort))
    return recorder.rounds[0].client_vectors[-1]


@pytest.mark.by_turn
@pytest.mark.fast_rows("a teacher in a list", "a carried*", "a structure*", "a closure")
@pytest.mark.parametrize("name", rows_with("update"))
def test_client_trains_as_it_does_alone_and_what_passes_to_it_is_named_once(tmp_path, name):
    row = ROWS[name]
    updates = []
    for cohort in ([2], [0, 1, 2]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update = first_update_of_client_2(row.program, tmp_path, cohort)
        updates.append(update)

        messages = " ".join(str(warning.message) for warning in caught)
        named_paths = re.findall(
            r"flsv: training changes (.*?) of \w+. All clients share", messages
        )
        assert named_paths == ([row.passes] if row.passes else [])

    update_alone, update_in_company = updates
    is_own = torch.equal(update_alone, update_in_company)
    assert is_own == (row.update == "own")


def make_module_that_validates_by_steps(make_module):
    """Make a module, whose validation changes its state as its training does."""
    module = make_module()

    def validation_step(batch, batch_idx):
        loss = module.training_step(batch, batch_idx)
        module.log("val_loss", loss)

    module.validation_step = validation_step
    return module


def program_that_validates_by_steps(name):
    program = ROWS[name].program
    make_module = partial(make_module_that_validates_by_steps, program.module)
    return replace(program, module=make_module, rounds=2)


def score_by_logged_value():
    return {"value": PartialFederatedShapley(performance="val_loss", mode="min")}


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", rows_with("scored", "left alone"))
def test_scoring_by_a_logged_value_changes_no_training(tmp_path, name):
    program = program_that_validates_by_steps(name)

    with restored_program():
        _, scored = fit_program(program, tmp_path, metrics=score_by_logged_value())
    _, plain = fit_program(program, tmp_path)

    assert torch.equal(state_vector(scored), state_vector(plain))


@pytest.mark.parametrize("name", rows_with("scored", "refused"))
def test_scoring_a_module_that_cannot_be_copied_by_a_logged_value_is_refused(tmp_path, name):
    program = program_that_validates_by_steps(name)

    with refused(ROWS[name].refusal):
        fit_program(program, tmp_path, metrics=score_by_logged_value())


class ChangesPartsOfTheRun(Base):
    """Changes optimizer, scheduler and data module after each validation."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def on_train_epoch_start(self):
        optimizer = self.optimizers()
        (group,) = optimizer.param_groups
        self.rates.append((group["lr"], group["weight_decay"]))

    def on_validation_epoch_end(self):
        scheduler = self.lr_schedulers()
        scheduler.step()

        optimizer = self.optimizers()
        optimizer.param_groups[0]["weight_decay"] *= 2

        data = self.trainer.datamodule
        data.num_validations = getattr(data, "num_validations", 0) + 1

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), RATE, weight_decay=0.1)
        return [optimizer], [ExponentialLR(optimizer, 0.9)]


@pytest.mark.slow
def test_scoring_by_a_logged_value_changes_no_optimizer_scheduler_or_data(tmp_path):
    program = with_three_clients(ChangesPartsOfTheRun)

    _, scored = fit_program(program, tmp_path, metrics=score_by_logged_value())
    _, plain = fit_program(program, tmp_path)

    assert scored.rates == plain.rates
    assert len(set(plain.rates)) == program.rounds
    num_validations = plain.trainer.datamodule.num_validations
    assert scored.trainer.datamodule.num_validations == num_validations


# ---- the next round, and a resumed run


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "module", [CarriesState, DrawsFromFourGenerators, partial(ChangesItself, stop_tracking)]
)
def test_state_of_a_module_resumes_bitwise(tmp_path, module):
    assert_resumes(partial(FederatedLoop, seed=SEED), tmp_path, module, make_data)


def test_structure_that_a_checkpoint_lacks_is_named_at_resume(tmp_path):
    make_module = partial(ChangesItself, hook_forward, add_layer)
    checkpoint = fit_and_save(FederatedLoop(seed=SEED), tmp_path, make_module(), rounds=1)

    message = "net.0 was Linear with 1 hooks and is Linear with 0 hooks.*added was Dropout"
    with warns(message):
        fit(FederatedLoop(seed=SEED), tmp_path, make_module(), rounds=2, ckpt_path=checkpoint)


# ---- random generators


class Draws(DrawsFromFourGenerators):
    """Records what its generators draw in each client's first step."""

    def __init__(self):
        super().__init__()
        self.first_draws = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.first_draws.append(self.draw())
        return super().training_step(batch, batch_idx)

    def draw(self):
        (old_generator,) = self.old_generators["old"]
        tensor = torch.rand((), generator=self.generator)
        numbers = (
            self.numpy_generator.random(),
            self.python_generator.random(),
            old_generator.rand(),
        )
        return [float(tensor), *numbers]


def test_generators_of_a_module_are_seeded_for_each_client_and_then_as_before(tmp_path):
    module = Draws()
    rounds = 2
    fit(FederatedLoop(seed=SEED), tmp_path, module, make_data(), rounds)

    # In training each client's generators have a seed of the round and the client.
    reference = Draws()
    draw_without_training = reference.draw()
    generators = [
        reference.generator,
        reference.numpy_generator,
        reference.python_generator,
        *reference.old_generators["old"],
    ]
    expected_draws = []
    for round_index in range(rounds):
        for client in range(3):
            seed_generators(generators, SEED, "train", round_index, client)
            expected_draws.append(reference.draw())

    assert module.first_draws == expected_draws

    # After the run they continue as if there had been no training.
    assert module.draw() == draw_without_training
