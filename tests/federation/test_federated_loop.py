"""FederatedLoop: its seeds, its steps, clients that train alone, and what it keeps."""

import gc
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from flsv.attacks import Scaling
from flsv.federation import FederatedLoop
from flsv.functional import class_specific_shapley
from flsv.metrics import ClassSpecificShapley
from flsv.personalization import Standalone
from flsv.sampling import FixedCohort
from helpers.fits import KeepsRounds, fit, make_shapfed_loop
from helpers.loops_by_hand import SEED
from helpers.models import Plain


def test_replaced_loops_share_no_state(tmp_path):
    """Metrics and filters of a loop are its own, also where another made from it is fitted later."""
    base = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        uploads=[Scaling(100.0, clients=[1])],
    )
    attacked = base.replace(seed=0)
    clean = base.replace(uploads=[])

    fit(attacked, tmp_path / "a")
    values = attacked.metrics["cssv"].compute()
    suspects = dict(attacked.named)

    assert suspects

    fit(clean, tmp_path / "b")

    assert torch.equal(attacked.metrics["cssv"].compute(), values)
    assert not torch.equal(clean.metrics["cssv"].compute(), values)
    assert dict(attacked.named) == suspects
    assert dict(clean.named) == {}


# ---- metric to weight and back


def test_cssv_with_source_weights_compares_weights_instead_of_updates(tmp_path):
    recorder = KeepsRounds()
    metric = ClassSpecificShapley(momentum=0, source="weights")
    loop = FederatedLoop(recorder, {"cssv": metric}, seed=1)

    module = fit(loop, tmp_path)

    last_models = recorder.rounds[-1].client_vectors
    rows = loop.space.head.rows
    global_head = rows(loop.space.read(module))
    expected = class_specific_shapley(rows(last_models), global_head)

    torch.testing.assert_close(loop.contributions["cssv"].by_class, expected)


# ---- personal models


def test_standalone_run_equals_each_client_training_alone(tmp_path):
    standalone = FederatedLoop(personalizer=Standalone(), optimizer_state="persist", seed=SEED)
    fit(standalone, tmp_path)

    for client in range(3):
        alone = FederatedLoop(sampler=FixedCohort([client]), optimizer_state="persist", seed=SEED)
        fit(alone, tmp_path)
        received = standalone.received()[client]
        torch.testing.assert_close(received, alone.state.model(), rtol=1e-5, atol=1e-6)


# ---- memory


@pytest.mark.slow
def test_memory_of_model_sized_tensors_does_not_grow_with_the_rounds(tmp_path):
    class Count(Callback):
        """Floats held in tensors as large as the model's largest layer, at the end of every round."""

        def __init__(self):
            self.initial_addresses = set(self.floats_by_address())  # what other tests have left
            self.floats = []

        def floats_by_address(self):
            """The memory of all tensors."""
            gc.collect()
            # Not what a compiler has left behind: its tensors have no memory.
            kinds = (torch.Tensor, nn.Parameter)
            bytes_of_float = 4
            floats = {}
            for tensor in gc.get_objects():
                if type(tensor) in kinds:
                    storage = tensor.untyped_storage()
                    floats[storage.data_ptr()] = storage.nbytes() // bytes_of_float

            return floats

        def on_train_epoch_end(self, trainer, module):
            new_sizes = []
            for address, size in self.floats_by_address().items():
                if address not in self.initial_addresses and size >= 20_000:
                    new_sizes.append(size)
            self.floats.append(sum(new_sizes))

    # The first layer has 21,000 parameters, the second 30,010.
    layers = [nn.Linear(6, 3000), nn.ReLU(), nn.Linear(3000, 10), nn.Linear(10, 3)]
    wide = nn.Sequential(*layers)
    count = Count()
    loop = make_shapfed_loop()
    small_steps = partial(torch.optim.SGD, lr=0.001)
    fit(
        loop,
        tmp_path,
        Plain(wide, small_steps),
        rounds=5,
        callbacks=[count],
    )

    assert count.floats[0] == count.floats[-1]
    # The module, its gradients and the round's global vector are what stays between two rounds.
    assert count.floats[-1] <= 4 * loop.space.size
