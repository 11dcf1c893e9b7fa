"""Copies of runs before their fit: what they share, what is theirs, and what is refused."""

import pickle
import threading
import weakref

import cloudpickle
import lightning as L
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from flsv.isolation.run_copy import RunCopy
from helpers import make_generator, refused
from helpers.fits import plain_trainer, state_vector
from zoo.program import Base, make_data


def load_copy(module, folder, **trainer_options):
    """Return the Trainer and the module of a copy of a run."""
    trainer = plain_trainer(folder, **trainer_options)
    run_copy = RunCopy(trainer, module, data=make_data())
    copied_trainer, copied_module, _ = run_copy.load()
    return copied_trainer, copied_module


def run_copy_of(module, folder, data=None):
    trainer = plain_trainer(folder)
    return RunCopy(trainer, module, data=data or make_data())


class Refers(L.Callback):
    def __init__(self, module):
        self.module = module
        first_layer = module.net[0]
        self.first_layer = weakref.ref(first_layer)
        self.locks = (
            threading.Lock(),
            threading.RLock(),
        )
        self.gone = weakref.ref(Base())


def referring_callback_of(trainer):
    callbacks = trainer.callbacks
    (callback,) = (part for part in callbacks if isinstance(part, Refers))
    return callback


def test_copy_refers_to_itself_where_the_original_does(tmp_path):
    module = Base()
    callback = Refers(module)

    trainer, copied_module = load_copy(module, tmp_path, callbacks=[callback])

    copied_callback = referring_callback_of(trainer)
    copied_layer = copied_module.net[0]
    assert copied_module is not module
    assert copied_callback.module is copied_module
    assert copied_callback.first_layer() is copied_layer
    assert copied_callback.gone() is None


def test_locks_of_a_copy_are_free(tmp_path):
    callback = Refers(Base())
    lock, reentrant_lock = callback.locks

    with lock, reentrant_lock:
        trainer, _ = load_copy(callback.module, tmp_path, callbacks=[callback])

    copied_callback = referring_callback_of(trainer)
    for copied_lock, held_lock in zip(copied_callback.locks, callback.locks):
        assert type(copied_lock) is type(held_lock)
        assert copied_lock is not held_lock
        assert copied_lock.acquire(blocking=False)


def test_parametrized_module_is_copied_with_its_weights(tmp_path):
    module = Base()
    plain_layer = module.net[0]
    layer = parametrizations.orthogonal(plain_layer)
    module.net[0] = layer

    _, copied_module = load_copy(module, tmp_path)

    assert torch.equal(state_vector(copied_module), state_vector(module))

    copied_layer = copied_module.net[0]
    other_weight = torch.empty_like(layer.weight)
    copied_layer.weight = nn.init.orthogonal_(other_weight)
    assert not torch.equal(copied_layer.weight, layer.weight)


def test_tensors_that_share_memory_share_it_in_each_copy(tmp_path):
    module = Base()
    weight = module.net[0].weight
    module.view = weight.data[:1]
    state_before = state_vector(module)
    run_copy = run_copy_of(module, tmp_path)

    _, copied_module, _ = run_copy.load()
    copied_module.view.fill_(7.0)

    copied_weight = copied_module.net[0].weight
    assert (copied_weight[0] == 7).all()
    assert torch.equal(state_vector(module), state_before)
    _, next_module, _ = run_copy.load()
    assert torch.equal(state_vector(next_module), state_before)


def add_one(parameter):
    parameter.grad.add_(1)


def test_hooks_of_a_tensor_are_copied_and_can_be_removed(tmp_path):
    module = Base()
    weight = module.net[0].weight
    module.handle = weight.register_hook(lambda gradient: 3 * gradient)
    weight.register_post_accumulate_grad_hook(add_one)

    _, copied_module = load_copy(module, tmp_path)

    copied_weight = copied_module.net[0].weight
    copied_weight.sum().backward()
    assert (copied_weight.grad == 4).all()
    copied_module.handle.remove()
    copied_weight.grad = None
    copied_weight.sum().backward()
    assert (copied_weight.grad == 2).all()
    assert weight.grad is None


def test_copy_begins_with_the_generators_and_settings_of_its_time(tmp_path):
    module = Base()
    module.generator = make_generator(4)
    torch.manual_seed(1)
    run_copy = run_copy_of(module, tmp_path)
    expected = torch.rand(3)
    expected_of_module = torch.rand(3, generator=module.generator)

    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(2):
            _, copied_module, _ = run_copy.load()
            assert torch.equal(torch.rand(3), expected)
            numbers = torch.rand(3, generator=copied_module.generator)
            assert torch.equal(numbers, expected_of_module)
    finally:
        torch.set_default_dtype(torch.float32)


def test_data_are_shared_and_not_copied(tmp_path):
    data = make_data()
    data.setup("fit")
    module = Base()
    module.data = [data]
    run_copy = run_copy_of(module, tmp_path, data)

    _, copied_module, copied_data = run_copy.load()

    assert copied_data is not data
    assert copied_module.data == [copied_data]
    assert copied_data.source is data.source


@pytest.mark.slow
def test_part_that_cannot_be_pickled_is_named_by_its_path(tmp_path):
    module = Base()
    numbers = (number for number in range(3))
    module.parts = {"files": [1, numbers]}

    with refused(r"module\.parts\['files'\]\[1\] \(generator\) cannot be pickled"):
        load_copy(module, tmp_path)


def test_data_of_a_copy_made_after_a_fit_has_no_trainer(tmp_path):
    data = make_data()
    data.trainer = fitted_trainer = plain_trainer(tmp_path)  # as Lightning leaves it after a fit
    run_copy = RunCopy(plain_trainer(tmp_path), Base(), data=data)

    _, _, copied_data = run_copy.load()

    assert copied_data.trainer is None
    assert data.trainer is fitted_trainer


def test_worker_gets_the_same_copy_by_bytes_also_after_the_fit(tmp_path):
    class OfAFunction(Base):
        """A worker does not find its class by a name."""

    module = OfAFunction()
    state = state_vector(module)
    trainer = plain_trainer(tmp_path, rounds=1)
    data = make_data()
    run_copy = RunCopy(trainer, module, data=data)
    data.trainer = trainer  # as Lightning sets it
    trainer.run_copy = run_copy

    sent_copy = pickle.loads(cloudpickle.dumps(run_copy))

    copied_trainer, copied_module, copied_data = sent_copy.load()
    assert torch.equal(state_vector(copied_module), state)

    copied_trainer.fit(copied_module, copied_data)
    assert not torch.equal(state_vector(copied_module), state)


def test_class_of_the_run_stays_as_it_is_when_a_copy_is_loaded(tmp_path):
    losses = []

    class Local(Base):  # pickle has no name for it, as for a class of a notebook
        def loss(self, batch):
            loss = super().loss(batch)
            losses.append(loss.item())
            return loss

    loss_of_run = Local.loss
    _, copied_module = load_copy(Local(), tmp_path)

    assert type(copied_module) is Local
    assert Local.loss is loss_of_run
    batch = (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))
    copied_module.loss([batch[0][:, : copied_module.net[0].in_features], batch[1]])
    assert len(losses) == 1
