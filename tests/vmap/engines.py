"""The same federation trained by two engines."""

from functools import partial

import torch

from flsv.federation import FederatedLoop
from helpers.data import toy_data
from helpers.fits import client_tensors, fit, state_vector
from helpers.models import Plainest

#: Their epochs have 5, 2, 4, 2 and 1 batches of 8, the last ones of 4, 5, 1, 4 and 8 samples.
SIZES = (31, 11, 21, 10, 7)


def make_engine_loop(engine, **kwargs):
    return FederatedLoop(engine=engine, seed=3, **kwargs)


def fit_by_both_engines(
    folder,
    make=Plainest,
    data=None,
    rounds=3,
    trainer=None,
    engine="vmap",
    tolerance=1e-5,
    **kwargs,
):
    make_data = data or partial(toy_data, SIZES)
    trainer_options = trainer or {}

    def fit_by(kind, name):
        """Fit once. Arguments that are partial functions make an object for each fit."""
        arguments = {}
        for argument, value in kwargs.items():
            arguments[argument] = value() if isinstance(value, partial) else value
        loop = make_engine_loop(kind, **arguments)
        module = fit(loop, folder / name, make(), make_data(), rounds, **trainer_options)
        return loop, module

    sequential_loop, sequential_module = fit_by("sequential", "sequential")
    other_loop, other_module = fit_by(engine, "other")

    assert_close = partial(
        torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    assert_close(state_vector(other_module), state_vector(sequential_module))
    assert other_module.trainer.global_step == sequential_module.trainer.global_step
    assert_close(facts_of(other_loop), facts_of(sequential_loop))
    return sequential_loop, other_loop


def facts_of(loop):
    """What a fit leaves in its loop."""
    return {
        "contributions": dict(loop.contribution_metrics.contributions),
        "weights": loop.weights,
        "participations": loop.participations,
        "client_scores": dict(loop.client_scores),
        "starts": loop.state.starts,
        "tensors": client_tensors(loop),
        "trained": loop.trained,
    }
