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
from flsv.metrics import PartialFederatedShapley
from flsv.sampling import FixedCohort
from flsv.utilities.program_state import restored_program
from flsv.utilities.seeding import seed_generators
from helpers import kinds_of_attributes, kinds_of_modules, refused, warns
from helpers.fits import assert_resumes, fit, fit_and_save, state_vector
from helpers.hidden_state import RATE, SEED, Base, Kind, fit_kind, make_data
from helpers.kinds_of_attributes import CarriesState, FourGenerators
from helpers.kinds_of_modules import ChangesItself, add_layer, hook_forward, stop_tracking
from helpers.loops_by_hand import KeepsRounds

KINDS = {**kinds_of_modules.KINDS, **kinds_of_attributes.KINDS}
TRAINED = [name for name, kind in KINDS.items() if kind.outcome != "refused"]


def update_of_client_2(kind, folder, cohort):
    """Client 2's update in the first of two rounds."""
    recorder = KeepsRounds()
    two_rounds = replace(kind, rounds=2)
    fit_kind(two_rounds, folder, aggregator=recorder, sampler=FixedCohort(cohort))
    return recorder.rounds[0].client_vectors[-1]


@pytest.mark.fast_rows("a teacher in a list", "a carried*", "a structure*", "a closure")
@pytest.mark.parametrize("name", TRAINED)
def test_client_trains_as_it_does_alone_and_what_passes_to_it_is_named_once(tmp_path, name):
    kind = KINDS[name]
    updates = []
    for cohort in ([2], [0, 1, 2]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update = update_of_client_2(kind, tmp_path, cohort)
        updates.append(update)

        messages = " ".join(str(warning.message) for warning in caught)
        named_paths = re.findall(
            r"flsv: training changes (.*?) of \w+. All clients share", messages
        )
        assert named_paths == ([kind.passes] if kind.passes else [])

    assert torch.equal(*updates) == (kind.outcome == "right")


def make_module_that_validates_by_steps(kind):
    """The module, whose validation changes its state as its training does."""
    module = kind.module()

    def validation_step(batch, batch_idx):
        loss = module.training_step(batch, batch_idx)
        module.log("val_loss", loss)

    if module.automatic_optimization:
        module.validation_step = validation_step
    return module


@pytest.mark.fast_rows("an open file")
@pytest.mark.parametrize("name", KINDS)
def test_scoring_by_a_logged_value_changes_no_training_or_is_refused(tmp_path, name):
    kind = KINDS[name]
    validating_kind = replace(
        kind, module=partial(make_module_that_validates_by_steps, kind), rounds=2
    )
    metric = PartialFederatedShapley(performance="val_loss", mode="min")
    metrics = {"value": metric}

    if kind.message:
        with refused(kind.message):
            fit_kind(validating_kind, tmp_path, metrics=metrics)
        return

    with restored_program():
        _, scored = fit_kind(validating_kind, tmp_path, metrics=metrics)
    _, plain = fit_kind(validating_kind, tmp_path)
    assert torch.equal(state_vector(scored), state_vector(plain))


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
    kind = Kind(ChangesPartsOfTheRun)
    by_loss = PartialFederatedShapley(performance="val_loss", mode="min")

    _, scored = fit_kind(kind, tmp_path, metrics={"value": by_loss})
    _, plain = fit_kind(kind, tmp_path)

    assert scored.rates == plain.rates
    assert len(set(plain.rates)) == kind.rounds
    num_validations = plain.trainer.datamodule.num_validations
    assert scored.trainer.datamodule.num_validations == num_validations


# ---- the next round, and a resumed run


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    "module", [CarriesState, FourGenerators, partial(ChangesItself, stop_tracking)]
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


class Draws(FourGenerators):
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
