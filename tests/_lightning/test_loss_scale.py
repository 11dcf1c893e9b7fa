"""A GradScaler whose scale is so high that the first steps are left out, as on a GPU in half precision."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from flsv.federation import FederatedLoop
from flsv.sampling import FixedCohort
from helpers.fits import KeepUpdates, fit, make_checkpoint_callback, state_vector


def make_half_precision() -> dict[str, Any]:
    return {
        "plugins": MixedPrecision(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**19)
        )
    }


def test_clients_loss_scale_does_not_depend_on_the_client_before_it(tmp_path: Path) -> None:
    everyone = KeepUpdates()
    alone = KeepUpdates()
    fit(FederatedLoop(everyone, seed=1), tmp_path, rounds=1, **make_half_precision())
    fit(
        FederatedLoop(alone, sampler=FixedCohort([1]), seed=1),
        tmp_path,
        rounds=1,
        **make_half_precision(),
    )

    assert torch.equal(everyone.rounds[0][1], alone.rounds[0][1])


def test_loss_scale_resumes_bitwise(tmp_path: Path) -> None:
    whole = state_vector(
        fit(FederatedLoop(seed=1), tmp_path / "whole", rounds=4, **make_half_precision())
    )
    saving: dict[str, Any] = {
        "enable_checkpointing": True,
        "callbacks": [make_checkpoint_callback(tmp_path)],
    }
    fit(FederatedLoop(seed=1), tmp_path, rounds=2, **make_half_precision(), **saving)
    saving["callbacks"] = [make_checkpoint_callback(tmp_path / "resumed")]
    path = tmp_path / "checkpoints/last.ckpt"
    resumed = fit(
        FederatedLoop(seed=1), tmp_path, rounds=4, ckpt_path=path, **make_half_precision(), **saving
    )

    assert torch.equal(state_vector(resumed), whole)
