"""A GradScaler whose scale is so high that the first steps are left out, as on a GPU in half precision."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.fits import fit, fit_and_save, state_vector
from helpers.loops_by_hand import KeepsRounds


def make_half_precision():
    return {
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**19)
        )
    }


def test_clients_loss_scale_does_not_depend_on_the_client_before_it(tmp_path):
    everyone = KeepsRounds()
    alone = KeepsRounds()
    fit(FederatedLoop(everyone, seed=1), tmp_path, rounds=1, **make_half_precision())
    fit(
        FederatedLoop(alone, sampler=FixedCohort([1]), seed=1),
        tmp_path,
        rounds=1,
        **make_half_precision(),
    )

    _, model_after_client_0, _ = everyone.rounds[0].client_vectors
    (model_alone,) = alone.rounds[0].client_vectors
    assert torch.equal(model_after_client_0, model_alone)


@pytest.mark.slow
def test_loss_scale_resumes_bitwise(tmp_path):
    def make_loop():
        return FederatedLoop(seed=1)

    uninterrupted = fit(make_loop(), tmp_path / "whole", rounds=4, **make_half_precision())
    checkpoint = fit_and_save(make_loop(), tmp_path, rounds=2, **make_half_precision())
    resumed = fit(make_loop(), tmp_path, rounds=4, ckpt_path=checkpoint, **make_half_precision())

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))
