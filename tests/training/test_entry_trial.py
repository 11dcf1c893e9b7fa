"""What passes from client to client in closures, objects of libraries and classes is named. Generators are seeded."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from timm.utils import AverageMeter
from torch import Tensor, nn
from torch.distributions import Normal

from flsv.federation import FederatedLoop
from flsv.sampling import UniformSampler
from flsv.utilities.seeding import seed_generators
from helpers.data import toy_data
from helpers.fits import assert_resumes, fit
from helpers.models import Plain, network


class Average:
    """An average of a layer's weights, as a layer of its own that is not the module's."""

    def __init__(self) -> None:
        self.layer = nn.Linear(40, 40)

    def update(self) -> None:
        self.layer.weight.data *= 0.9


def make_counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


class Holds(Plain):
    """Changes what it holds in an attribute in every training step."""

    steps: ClassVar[list[int]] = []

    def __init__(self, kind: str) -> None:
        super().__init__(network(batch_norm=False))
        self.kind = kind
        self.hidden: Any = HIDDEN[kind]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CHANGES[self.kind](self)
        return super().training_step(batch, batch_idx)


def make_constants() -> list[Any]:
    layer = nn.Linear(2, 2)
    function = partial(max, 1)
    return [layer, np.random.RandomState(1), function]


HIDDEN: dict[str, Callable[[], Any]] = {
    "closure": make_counter,
    "iterator": itertools.count,
    "library": AverageMeter,
    "objects in a list": lambda: [Average()],
    "average": Average,
    "class": lambda: None,
    "new": lambda: Normal(0.0, 1.0),
    "namespace": lambda: SimpleNamespace(count=0),
    "constant": make_constants,
}


def append_to_class(module: Holds) -> None:
    type(module).steps.append(1)


def hold_new_object(module: Holds) -> None:
    module.hidden = Normal(0.0, 1.0)


def add_to_namespace(module: Holds) -> None:
    module.hidden.count += 1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "closure": lambda module: module.hidden(),
    "iterator": lambda module: next(module.hidden),
    "library": lambda module: module.hidden.update(1.0),
    "objects in a list": lambda module: module.hidden[0].update(),
    "average": lambda module: module.hidden.update(),
    "class": append_to_class,
    "new": hold_new_object,
    "namespace": add_to_namespace,
    "constant": lambda module: module.hidden[1].rand(),
}
NAMES = {
    "closure": "module.hidden",
    "iterator": "module.hidden",
    "library": "module.hidden",
    "objects in a list": "module.hidden",
    "average": "module.hidden.layer",
    "class": "Holds.steps",
}


@pytest.mark.parametrize("kind", NAMES)
def test_what_passes_from_client_to_client_is_named_once(tmp_path: Path, kind: str) -> None:
    expected = f"training changes {NAMES[kind]}.* of Holds"
    with pytest.warns(UserWarning, match=expected) as records:
        fit(FederatedLoop(seed=3), tmp_path, Holds(kind), rounds=2)

    messages = [str(record.message) for record in records]
    warnings_of_passing = [text for text in messages if "from client to client" in text]

    assert len(warnings_of_passing) == 1


def test_what_passes_is_named_where_one_client_takes_part_in_a_round(tmp_path: Path) -> None:
    loop = FederatedLoop(seed=3, sampler=UniformSampler(1))
    with pytest.warns(UserWarning, match="training changes module.hidden of Holds"):
        fit(loop, tmp_path, Holds("closure"), rounds=1)


class CountsInObject(torch.optim.SGD):
    """SGD that holds an object, as of a library, whose state is not the optimizer's."""

    def __init__(self, parameters: Any, hidden: Callable[[], Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self.hidden = hidden()

    def step(self, closure: Any = None) -> Any:
        if isinstance(self.hidden, AverageMeter):
            self.hidden.update(1.0)
        else:
            self.hidden()
        return super().step(closure)


class Averages(Plain):
    def __init__(self, hidden: Callable[[], Any]) -> None:
        super().__init__(network(batch_norm=False))
        self.make_hidden = hidden

    def configure_optimizers(self) -> Any:
        return CountsInObject(self.parameters(), self.make_hidden)


@pytest.mark.parametrize(
    ("hidden", "name"),
    [(AverageMeter, "optimizers.0.hidden"), (make_counter, "optimizers.0.hidden")],
)
def test_what_passes_in_an_optimizer_is_named(
    tmp_path: Path, hidden: Callable[[], Any], name: str
) -> None:
    with pytest.warns(UserWarning, match=f"training changes {name} of Averages"):
        fit(FederatedLoop(seed=3), tmp_path, Averages(hidden), rounds=1)


@pytest.mark.parametrize("kind", ["namespace", "constant", "new"])
def test_what_is_shared_on_purpose_constant_or_put_back_is_not_named(
    tmp_path: Path,
    kind: str,
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="flsv: training changes")
        fit(FederatedLoop(seed=3), tmp_path, Holds(kind), rounds=2)


class Draws(Plain):
    """Adds noise from a random generator of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__(network(batch_norm=False))
        self.generator = GENERATORS[kind]()
        self.draw = DRAWS[kind]
        self.first_draws: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = self.draw(self.generator)
        if batch_idx == 0:
            self.first_draws.append(noise)
        return super().training_step((x + noise, y), batch_idx)


def draw_torch(generator: torch.Generator) -> float:
    return float(torch.rand(1, generator=generator))


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "python": lambda: random.Random(1),
    "nested": lambda: [partial(random.Random(1).random)],
}
DRAWS: dict[str, Callable[[Any], float]] = {
    "torch": draw_torch,
    "numpy": lambda generator: generator.random(),
    "python": lambda generator: generator.random(),
    "nested": lambda generators: generators[0](),
}


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_generators_of_a_module_are_seeded_for_each_client(
    tmp_path: Path,
    kind: str,
) -> None:
    module: Any = Draws(kind)
    data = toy_data()
    fit(FederatedLoop(seed=3), tmp_path, module, data, rounds=2)

    expected = []
    generator = GENERATORS[kind]()
    for round_index in range(2):
        for client in range(data.num_clients):
            seed_generators([generator], 3, "train", round_index, client)
            expected.append(DRAWS[kind](generator))

    assert module.first_draws == expected


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_a_module_are_as_before_between_rounds(
    tmp_path: Path,
    kind: str,
) -> None:
    module: Any = Draws(kind)
    fit(FederatedLoop(seed=3), tmp_path, module, rounds=1)
    draw_after_training = DRAWS[kind](module.generator)
    assert draw_after_training == DRAWS[kind](GENERATORS[kind]())
    assert len(set(module.first_draws)) == len(module.first_draws)


@pytest.mark.parametrize("kind", ["torch", "nested"])
def test_training_with_a_modules_generator_resumes_bitwise(
    tmp_path: Path,
    kind: str,
) -> None:
    assert_resumes(partial(FederatedLoop, seed=3), tmp_path, partial(Draws, kind))
