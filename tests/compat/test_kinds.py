"""Every program of module, as it is, in a federation: it trains, is scored and retrained as by hand, and resumes.

Modules of public libraries are tested in an environment of their own (``make libraries``).
"""

import lightning as L
import pytest
from compat import further_libraries, libraries
from compat.runs import train_with_values

import flsv
from flsv import FederatedLoop
from flsv.metrics import PartialFederatedShapley
from helpers.fits import assert_resumes, plain_trainer
from zoo.program import SEED
from zoo.table import ROWS, rows_with

LIBRARIES = {**libraries.PROGRAMS, **further_libraries.PROGRAMS}
OF_LIBRARIES = [
    pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in LIBRARIES
]


def program_if_installed(name):
    if name in ROWS:
        return ROWS[name].program
    flsv.import_as_lightning()
    pytest.importorskip(name)
    return LIBRARIES[name]


@pytest.mark.by_turn
@pytest.mark.fast_rows("hooks")
@pytest.mark.parametrize("name", [*rows_with("by_hand"), *OF_LIBRARIES])
def test_every_kind_of_module_trains_and_is_valued_as_by_hand(tmp_path, name):
    """And what compares all clients' second training with the run doubts nothing."""
    is_retrained = name not in ROWS or ROWS[name].retrained_by_hand
    pair = train_with_values(program_if_installed(name), tmp_path, is_retrained)

    pair.check()
    pair.check_values()
    if is_retrained:
        pair.check_values_by_retraining(tmp_path)


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


@pytest.mark.parametrize("name", rows_with("keeps_buffers"))
def test_no_buffer_of_any_kind_of_module_changes_before_the_first_batch(tmp_path, name):
    program = ROWS[name].program
    watch = WatchesBuffers()
    loop = FederatedLoop(seed=SEED)
    callbacks = [watch, loop, *program.callbacks()]
    trainer = plain_trainer(tmp_path, rounds=1, callbacks=callbacks, **program.trainer)
    trainer.fit(program.module(), program.data())

    at_start, before_first_batch = watch.contents
    assert {name: before_first_batch[name] for name in at_start} == at_start


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("name", rows_with("resumes"))
def test_kind_of_module_resumes_bitwise(tmp_path, name):
    program = ROWS[name].program

    def loop():
        value = PartialFederatedShapley(performance=program.logged, mode="min")
        return FederatedLoop(metrics={"value": value}, optimizer_state="persist", seed=SEED)

    assert_resumes(loop, tmp_path, program.module, program.data, callbacks=program.callbacks)
