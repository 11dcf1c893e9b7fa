"""A check that copies of a module are independent of it.

Some attributes of a module still refer to the original after ``copy.deepcopy``: a compiled ``forward``, a lambda, a
hook that closes over ``self``. Such a copy would compute with the original's weights, whatever model is loaded into it,
and all coalitions would get the same score. So a copy is checked before the first model is evaluated: its outputs must
depend on its own weights and not on the original's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.errors import ConfigurationError

#: The largest change of outputs that counts as rounding, relative to their change between two random models.
_TOLERANCE = 1e-3

#: Function that loads a model ``[P]`` into a copy of the module and returns the copy's outputs, of any type.
Outputs = Callable[[Tensor], Any]


@torch.inference_mode(False)
@torch.no_grad()
def check_copies(
    module: nn.Module,
    space: ParameterSpace,
    outputs: Outputs,
    sensitive: bool = True,
) -> None:
    """Raise ConfigurationError unless a model that is evaluated in a copy of the module uses the copy's weights only.

    The check evaluates two models with random weights near the module's, because a module whose last layer is zero
    would give equal outputs for all weights. Meanwhile the module's tensors point to other memory; their own memory is
    not written.

    Args:
        module: the original module.
        space: the map between the module's state and vectors ``[P]``.
        outputs: function that loads a model ``[P]`` into the copy and returns the copy's outputs, with the same random
            numbers in every call.
        sensitive: whether the outputs of two different models must differ; False for accuracies on a few samples, which
            may be equal.

    Raises:
        ConfigurationError: the outputs depend on the original's weights, or do not depend on the copy's weights.
    """
    before = space.read(module)
    for scale in (0.3, 0.03, 0.003):
        first, second = (_near(space, before, scale, seed) for seed in (1, 2))
        answer, other = _numbers(outputs(first)), _numbers(outputs(second))
        with _holding(module, space, second):
            again = _numbers(outputs(first))
        # Outputs that are NaN or infinite cannot be compared: try weights nearer to the module's.
        if all(each.isfinite().all() for each in (answer, other)):
            break
    else:
        return
    if not answer.numel():
        return
    moved = (answer - other).abs().max()
    name = type(module).__name__
    independent = answer.shape == again.shape and (answer - again).abs().max() <= _TOLERANCE * moved
    if not independent:
        raise ConfigurationError(
            f"a copy of {name} with weights of its own gives other outputs when the weights of the original change: "
            "something that it keeps or calls is bound to the original, so that models would be evaluated with the "
            "wrong weights. Make a method, as def f(self, x): return self.net(x), of every lambda, function or hook "
            "in its attributes that holds the module or a layer."
        )
    if sensitive and moved == 0:
        raise ConfigurationError(
            f"{name} gives the same outputs whatever its weights are: no model that it is copied for could be told "
            "from another. Let its forward use its layers' weights as they are when it is called (a traced or frozen "
            "network holds others)."
        )


@contextmanager
def _holding(module: nn.Module, space: ParameterSpace, vector: Tensor) -> Iterator[None]:
    """Let the module's tensors point to new memory, with the values of ``vector [P]``, within the context; let them
    point to their own memory again afterwards.
    """
    values, named = space.unflatten(vector), dict([*module.named_parameters(), *module.named_buffers()])
    before = {name: named[name].data for name in space.names}
    try:
        for name in space.names:
            named[name].data = values[name].to(named[name].dtype, copy=True)
        yield
    finally:
        for name, data in before.items():
            named[name].data = data


def _near(space: ParameterSpace, vector: Tensor, scale: float, seed: int) -> Tensor:
    """Draw a model near ``vector [P]``: every parameter changes by about ``scale`` times the root mean square of its
    tensor; positive buffers, such as variances, stay positive.
    """
    generator = torch.Generator(vector.device).manual_seed(seed)
    noise = torch.randn(vector.shape, generator=generator, dtype=vector.dtype, device=vector.device)
    cut = space.num_parameters
    noise[cut:] = noise[cut:].abs().clamp(max=3) * (vector[cut:].abs() + 0.1)
    parameters = space.unflatten(vector[:cut]) if cut else {}
    for name, part in space.unflatten(noise[:cut]).items() if cut else ():
        part *= parameters[name].square().mean().sqrt().clamp(min=0.1)
    return vector + scale * noise


def _numbers(outputs: Any) -> Tensor:
    parts = [torch.as_tensor(leaf) for leaf in tree_leaves(outputs) if isinstance(leaf, (Tensor, int, float))]
    numbers = [part.detach().double().flatten().cpu() for part in parts if not part.is_complex()]
    return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.float64)
