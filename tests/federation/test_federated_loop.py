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
    aggregator = KeepsRounds()
    metric = ClassSpecificShapley(momentum=0, source="weights")
    loop = FederatedLoop(aggregator, {"cssv": metric}, seed=1)

    module = fit(loop, tmp_path)

    head = loop.space.head
    client_heads = head.rows(aggregator.rounds[-1].client_vectors)
    global_head = head.rows(loop.space.read(module))
    expected = class_specific_shapley(client_heads, global_head)

    torch.testing.assert_close(loop.values["cssv"].by_class, expected)


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


SIZE_OF_WIDE_LAYERS = 20_000


@pytest.fixture
def no_earlier_objects():
    """Hide the objects of other tests from the garbage collector, which would look at each of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class CountsFloatsAfterEachRound(Callback):
    """Counts floats in tensors as large as a wide layer."""

    def __init__(self):
        self.counts = []

    def on_train_epoch_end(self, trainer, module):
        gc.collect()
        sizes = {}
        for tensor in gc.get_objects():
            # Other classes are what a compiler has left, without memory.
            if type(tensor) in (torch.Tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        self.counts.append(sum(size for size in sizes.values() if size >= SIZE_OF_WIDE_LAYERS))


@pytest.mark.slow
@pytest.mark.usefixtures("no_earlier_objects")
def test_memory_of_model_sized_tensors_does_not_grow_with_the_rounds(tmp_path):
    counting = CountsFloatsAfterEachRound()
    loop = make_shapfed_loop()
    # The first layer has 6 * 3000 + 3000 parameters, the second one 3000 * 10 + 10.
    layers = [nn.Linear(6, 3000), nn.ReLU(), nn.Linear(3000, 10), nn.Linear(10, 3)]
    module = Plain(nn.Sequential(*layers), partial(torch.optim.SGD, lr=0.001))

    fit(loop, tmp_path, module, rounds=3, callbacks=[counting])

    first_count, *_, last_count = counting.counts
    assert first_count == last_count
    # Between rounds stay the module, its gradients and the round's global vector.
    assert last_count <= 4 * loop.space.size
