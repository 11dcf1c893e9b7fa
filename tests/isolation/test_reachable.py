"""Generators are found in every kind of holder, and the search ends on cycles, libraries and plain data."""

from __future__ import annotations

import gc
import logging
import random
import threading
import types
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.isolation import reachable
from flsv.isolation.reachable import find_generators


class Slots:
    __slots__ = ("__hidden", "value")

    def __init__(self, value):
        self.value = [value]
        self.__hidden = 0


class Holder:
    def __init__(self, value):
        self.value = value

    def draw(self):
        return self.value

    def __call__(self, x):
        return x


class OfClass:
    shared = None


@dataclass(frozen=True)
class Record:
    value: object


class Images(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 3


def make_closure(value):
    def draw():
        return value

    return draw


def make_decorated(value):
    @wraps(make_closure)
    def outer(*args, noise=value):
        return noise

    return outer


def make_class_attribute(value):
    kind = type("Randomized", (OfClass,), {"shared": value})
    return type("Derived", (kind,), {})()


def make_hooked(value):
    layer = nn.Linear(1, 1)
    layer.register_forward_hook(Holder(value))
    return layer


def make_tensor_attribute(value):
    tensor = torch.zeros(1)
    tensor.note = value
    return tensor


def make_object_array(value):
    array = np.empty(2, dtype=object)
    array[0] = value
    return array


def make_cached(value):
    @lru_cache
    def draw(_):
        return value

    draw(1)
    return draw


def make_cycle(value):
    entries = [value]
    entries.append({"again": entries})
    return entries


def make_deep(value):
    for _ in range(5000):
        value = [value]
    return value


#: Kinds of holders, in which the search has to enter an object of Python, of C or of a library.
HOLDERS = {
    "slots": Slots,
    "class": make_class_attribute,
    "partial": lambda value: partial(max, partial(min, default=value)),
    "closure": make_closure,
    "default": make_decorated,
    "cache": make_cached,
    "hook": make_hooked,
    "tensor": make_tensor_attribute,
    "array": make_object_array,
    "subset": lambda value: Subset(ConcatDataset([Images(partial(make_closure(value)))]), [0]),
    "cycle": make_cycle,
    "depth": make_deep,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_generators_are_found_in_every_holder(holder):
    generator = torch.Generator()
    assert find_generators(HOLDERS[holder](generator)) == [generator]


@pytest.mark.parametrize("kind", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_of_every_library_are_found(kind):
    generator = kind()
    assert find_generators([generator]) == [generator]


def test_global_generators_are_left_out():
    holder = [random._inst, np.random.mtrand._rand, torch.default_generator]
    assert find_generators(holder, random.random, np.random.rand) == []


def test_what_leads_to_the_whole_process_is_not_entered():
    generator = random.Random()
    module = types.ModuleType("of a program")
    module.generator = generator
    holder = Holder([logging.getLogger(), threading.Lock(), threading.current_thread(), torch, np])
    holder.optimizer_class = torch.optim.SGD
    holder.module = module

    assert find_generators(holder) == []


def test_closed_types_are_not_entered():
    data = Images(Holder(random.Random()))

    assert len(find_generators(Holder(data))) == 1
    assert find_generators(Holder(data), closed=(Dataset,)) == []


@pytest.mark.parametrize(
    "data",
    [
        [float(number) for number in range(10**5)],
        [(str(number), number) for number in range(10**5)],
        [{"image": str(number), "box": [number, 2]} for number in range(10**5)],
        {str(number): (number, None) for number in range(10**5)},
    ],
    ids=["numbers", "pairs", "records", "dictionary"],
)
def test_entries_of_large_plain_data_are_not_entered(data, monkeypatch):
    num_entered = 0

    def count(value):
        nonlocal num_entered
        num_entered += 1
        return gc.get_referents(value)

    monkeypatch.setattr(reachable, "gc", SimpleNamespace(get_referents=count))
    assert find_generators([data]) == []

    assert num_entered == 1  # the outer list


def test_entries_of_large_data_of_closed_types_are_not_entered(monkeypatch):
    entered = []
    referents = gc.get_referents

    def note(value):
        entered.append(type(value))
        return referents(value)

    monkeypatch.setattr(reachable, "gc", SimpleNamespace(get_referents=note))
    samples = [(torch.zeros(2), number) for number in range(2000)]
    generator = random.Random()
    generators = find_generators(samples, [*samples, generator], closed=(torch.Tensor,))

    assert generators == [generator]
    assert entered.count(list) == 1  # the one without a generator is not


def test_large_collections_of_generators_are_entered():
    generators = [torch.Generator() for _ in range(2000)]
    assert len(find_generators([[1, generator] for generator in generators])) == 2000


class Raises:
    """Raises an error at every look at it."""

    def __getattribute__(self, name):
        raise RuntimeError(name)

    def __eq__(self, value):
        raise RuntimeError("eq")

    __hash__ = object.__hash__


class LiesAboutItsClass:
    def __init__(self, claimed):
        self.claimed = claimed

    @property
    def __class__(self):
        return object.__getattribute__(self, "claimed")


class RaisesAsAList(list):
    def __len__(self):
        raise RuntimeError("len")

    def __iter__(self):
        raise RuntimeError("iter")


ODD_OBJECTS = {
    "raises": Raises,
    "says it is an array": lambda: LiesAboutItsClass(np.ndarray),
    "list": lambda: RaisesAsAList([1]),
}


@pytest.mark.parametrize("kind", ODD_OBJECTS)
def test_no_look_at_an_object_raises(kind):
    value = ODD_OBJECTS[kind]()
    holder = Holder([value, Holder(value)])
    assert find_generators(holder) == []
