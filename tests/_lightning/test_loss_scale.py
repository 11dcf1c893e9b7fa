"""A GradScaler whose scale is so high that the first steps are left out, as on a GPU in half precision."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.fits import KeepsRounds, fit, fit_and_save, state_vector


def make_half_precision():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    return MixedPrecision("16-mixed", "cpu", scaler)


def test_clients_loss_scale_does_not_depend_on_the_client_before_it(tmp_path):
    everyone = KeepsRounds()
    alone = KeepsRounds()
    loop_of_everyone = FederatedLoop(everyone, seed=1)
    loop_of_one = FederatedLoop(alone, sampler=FixedCohort([1]), seed=1)

    fit(loop_of_everyone, tmp_path, rounds=1, plugins=make_half_precision())
    fit(loop_of_one, tmp_path, rounds=1, plugins=make_half_precision())

    _, model_after_client_0, _ = everyone.rounds[0].client_vectors
    (model_alone,) = alone.rounds[0].client_vectors
    assert torch.equal(model_after_client_0, model_alone)


@pytest.mark.slow
def test_loss_scale_resumes_bitwise(tmp_path):
    def make_arguments(rounds):
        return {
            "loop": FederatedLoop(seed=1),
            "rounds": rounds,
            "plugins": make_half_precision(),
        }

    uninterrupted = fit(folder=tmp_path / "whole", **make_arguments(4))
    checkpoint = fit_and_save(folder=tmp_path, **make_arguments(2))
    resumed = fit(folder=tmp_path, ckpt_path=checkpoint, **make_arguments(4))

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))
