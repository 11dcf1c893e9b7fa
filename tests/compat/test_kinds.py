"""Every kind of module, as it is, in a federation: it trains, is scored and retrained as by hand, and resumes.

Modules of public libraries are tested in an environment of their own (``make libraries``).
"""

import json
from functools import partial

import lightning as L
import pytest
import torch
from compat import further_libraries, kinds, libraries
from compat.base import make_federated_data
from compat.by_hand import (
    COALITIONS,
    SEED,
    fedavg_by_hand,
    shapley_values_of_two,
    validate_with_trainer,
)
from compat.runs import ROUNDS, train_federated, train_with_values

import flsv
from flsv import FederatedLoop
from flsv.metrics import PartialFederatedShapley, ShadowShapley
from helpers.fits import assert_resumes, plain_trainer

LIBRARIES = {**libraries.KINDS, **further_libraries.KINDS}
KINDS = {**kinds.KINDS, **LIBRARIES}
OF_LIBRARIES = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in LIBRARIES
]


def kind_if_installed(name):
    if name in LIBRARIES:
        flsv.import_as_lightning()
        pytest.importorskip(name)
    return KINDS[name]


@pytest.fixture(scope="module", params=[*kinds.KINDS, *OF_LIBRARIES])
def pair(request, tmp_path_factory):
    """The same training in a federation that evaluates coalitions every round, and by hand."""
    name = request.param
    return train_with_values(kind_if_installed(name), tmp_path_factory.mktemp(name))


@pytest.mark.fast_rows("hooks")
def test_every_kind_of_module_trains_as_the_loop_by_hand(pair):
    pair.check()


class WatchesBuffers(L.Callback):
    """Stores the buffers' bytes and version counters before the loop begins, and before the first batch."""

    def __init__(self):
        self.contents = []

    def on_fit_start(self, trainer, module):
        self.contents.append(buffer_contents(module))

    def on_train_epoch_start(self, trainer, module):
        self.contents.append(buffer_contents(module))


def buffer_contents(module):
    contents = {}
    for name, buffer in module.named_buffers():
        dense = buffer.to_dense() if buffer.is_sparse else buffer
        contents[name] = buffer._version, dense.numpy().tobytes()
    return contents


@pytest.mark.parametrize("name", ["wgan-spectral-norm", "byol", "hooks", "sparse-tensors"])
def test_no_buffer_of_any_kind_of_module_changes_before_the_first_batch(tmp_path, name):
    kind = KINDS[name]
    watch = WatchesBuffers()
    loop = FederatedLoop(seed=SEED)
    callbacks = [watch, loop, *kind.callbacks()]
    trainer = plain_trainer(tmp_path, rounds=1, callbacks=callbacks, **kind.trainer)
    trainer.fit(kind.module(), make_federated_data(kind))

    at_start, before_first_batch = watch.contents
    assert {name: before_first_batch[name] for name in at_start} == at_start


@pytest.mark.fast_rows("hooks")
def test_shapley_values_of_every_kind_of_module_equal_those_by_hand(pair):
    pair.check_values()


#: Two optimizers, noise, a network that follows another one, optimization by hand, sparse tensors.
RETRAINED = ("wgan-spectral-norm", "vae", "byol", "manual-accumulation", "sparse-tensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RETRAINED, *OF_LIBRARIES])
def test_values_by_retraining_every_kind_of_module_equal_those_by_hand(tmp_path, name):
    """And what compares all clients' second training with the run doubts nothing."""
    kind = kind_if_installed(name)
    metric = ShadowShapley(
        coalitions="all",
        performance=kind.logged,
        mode="min",
    )
    _, loop = train_federated(kind, tmp_path, metrics={"value": metric})

    worth = {}
    for members in COALITIONS:
        model = kind.module()
        if members:
            model, _ = fedavg_by_hand(
                model,
                kind.data(),
                make_federated_data(kind),
                tmp_path,
                ROUNDS,
                kind.callbacks,
                members=members,
            )
        worth[members] = -validate_with_trainer(model, kind.data(), kind.logged)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["events"] == []
    torch.testing.assert_close(
        loop.contributions["value"],
        shapley_values_of_two(worth),
        rtol=1e-5,
        atol=kind.tolerance,
    )


#: State in odd places: two optimizers, a network that follows, frozen layers, hooks.
RESUMED = ("wgan-spectral-norm", "byol", "backbone-finetuning", "hooks")


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_kind_of_module_resumes_bitwise(tmp_path, name):
    kind = KINDS[name]

    def loop():
        value = PartialFederatedShapley(performance=kind.logged, mode="min")
        return FederatedLoop(metrics={"value": value}, optimizer_state="persist", seed=SEED)

    make_data = partial(make_federated_data, kind)
    assert_resumes(loop, tmp_path, kind.module, make_data, callbacks=kind.callbacks)
