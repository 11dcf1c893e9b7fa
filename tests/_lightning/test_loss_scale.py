"""A GradScaler whose scale is so high that the first steps are left out, as on a GPU in half precision."""

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.fits import KeepUpdates, fit, fit_and_save, state_vector


def make_half_precision():
    return {
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**19)
        )
    }


def test_clients_loss_scale_does_not_depend_on_the_client_before_it(tmp_path):
    everyone = KeepUpdates()
    alone = KeepUpdates()
    fit(FederatedLoop(everyone, seed=1), tmp_path, rounds=1, **make_half_precision())
    fit(
        FederatedLoop(alone, sampler=FixedCohort([1]), seed=1),
        tmp_path,
        rounds=1,
        **make_half_precision(),
    )

    update_after_client_0 = everyone.rounds[0][1]
    update_alone = alone.rounds[0][1]
    assert torch.equal(update_after_client_0, update_alone)


@pytest.mark.slow
def test_loss_scale_resumes_bitwise(tmp_path):
    def make_loop():
        return FederatedLoop(seed=1)

    uninterrupted = fit(make_loop(), tmp_path / "whole", rounds=4, **make_half_precision())
    checkpoint = fit_and_save(make_loop(), tmp_path, rounds=2, **make_half_precision())
    resumed = fit(make_loop(), tmp_path, rounds=4, ckpt_path=checkpoint, **make_half_precision())

    assert torch.equal(state_vector(resumed), state_vector(uninterrupted))
