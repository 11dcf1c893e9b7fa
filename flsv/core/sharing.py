"""The argument ``share``: which parameters and buffers of a module clients send, and which each keeps to itself."""
# Methods that share only a part of the model: FedBN (Li et al., ICLR 2021), FedPer (Arivazhagan et al., 2019), and
# federated training of adapters such as LoRA.

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace, named_state
from flsv.utilities.classifier_head import find_head
from flsv.utilities.errors import ConfigurationError, listed

ShareOption = str | list[str] | Callable[[str, Tensor], bool]
"""The parameters and buffers that are shared: ``"all"``, ``"trainable"``, a list of patterns, or a function of a name
and a tensor that returns whether the tensor is shared.
"""

#: Names of normalization layers' classes, also other libraries' (``LlamaRMSNorm``, ``FrozenBatchNorm2d``).
_NORM_CLASS = re.compile(r"(Batch|Instance|Group|Layer|RMS)_?Norm")

_LORA_A = re.compile(r"\b(lora(?:_embedding)?)_A\b")


def check_share(share: Any) -> None:
    """Check the type of the argument ``FederatedLoop(share=...)``."""
    if callable(share):
        return
    words = [share] if isinstance(share, str) else share
    is_filled_sequence = isinstance(words, list | tuple) and len(words) > 0
    if is_filled_sequence and all(_is_word(word) for word in words):
        return
    raise ConfigurationError(
        f'FederatedLoop(share={share!r}): expected "all", "trainable", names such as ["!norm"], or a function.'
    )


def _is_word(word: Any) -> bool:
    if not isinstance(word, str):
        return False
    return word.strip("!") != ""


class Sharing(NamedTuple):
    """Names of a module's parameters and buffers that clients keep, and of those that never change."""

    kept: set[str]
    constant: set[str]


def sharing(share: ShareOption, module: nn.Module, head: str | None = None) -> Sharing:
    """Return the names of the parameters and buffers that ``share`` excludes from the model vector."""
    if share == "all":
        return Sharing(set(), set())

    state = dict(named_state(module))
    parameters = module.named_parameters()
    frozen_names = {name for name, parameter in parameters if not parameter.requires_grad}

    excluded_names: set[str] = set()
    if not isinstance(share, str) and callable(share):  # a function of a tensor and its name
        included_names = {name for name, tensor in state.items() if share(name, tensor)}
    else:
        names_of_word = partial(
            _names_of_word, module=module, state=state, frozen=frozen_names, head=head
        )
        included_names, excluded_names = _shared_by_words(share, state, names_of_word)

    if not any(state[name].is_floating_point() for name in included_names):
        raise ConfigurationError(
            f"FederatedLoop(share={share!r}) excludes all parameters of the module, so there is no model to share."
        )
    other_names = state.keys() - included_names
    # Frozen tensors are the same at all clients, unless a pattern with "!" has excluded them: then they are private.
    constant = (other_names & frozen_names) - excluded_names
    return Sharing(kept=other_names - constant, constant=constant)


def _shared_by_words(
    share: str | Sequence[str],
    state: Mapping[str, Tensor],
    names_of_word: Callable[[str], Collection[str]],
) -> tuple[set[str], set[str]]:
    """Return the names that ``share`` includes, and those that it excludes by ``!``. Later patterns take precedence."""
    words = [share] if isinstance(share, str) else share
    excluded_names: set[str] = set()
    included_names: set[str] = set()
    if words[0].startswith("!"):
        included_names.update(state)

    for word in words:
        names = set(names_of_word(word.removeprefix("!")))
        if not names:
            raise ConfigurationError(
                f"FederatedLoop(share={share!r}): {word!r} matches no parameter or buffer of the module. It has "
                f"{listed(list(state), 3, repr)}."
            )
        if word.startswith("!"):
            included_names -= names
            excluded_names |= names
        else:
            included_names |= names
            excluded_names -= names
    return included_names, excluded_names


def warn_of_sharing(space: ParameterSpace, module: nn.Module, clients_are_evaluated: bool) -> None:
    """Warn if trained tensors stay at the clients, or if both factors of LoRA are averaged.

    ``clients_are_evaluated``: each client is evaluated with its own tensors.
    """
    if space.kept_names:
        _warn_of_kept(space.kept_names, clients_are_evaluated)
    lora_names = _averaged_lora_pairs(space, module)
    if lora_names:
        names = listed(map(repr, lora_names))
        warnings.warn(
            f"LoRA's matrices A and B are averaged separately: {names}. The product of averages is not the average of "
            "the clients' products. Freeze A for exact averages (FFA-LoRA): flsv.models.lora.freeze_a(module).",
            stacklevel=2,
        )


def _warn_of_kept(kept_names: Collection[str], clients_are_evaluated: bool) -> None:
    names = listed(map(repr, kept_names))
    message = (
        f"{len(kept_names)} trained tensors stay at their clients: {names}. In validation, tests and "
        "checkpoints, the global model has their initial values."
    )
    if not clients_are_evaluated:
        message += " To evaluate each client with its own tensors, set ClientEvaluation(every=1)."
    warnings.warn(message, stacklevel=3)


def _averaged_lora_pairs(space: ParameterSpace, module: nn.Module) -> list[str]:
    """Return the names of LoRA's matrices A that are trained and shared, as their B is."""
    shared_names = set(space.names)
    averaged_names = set()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and name in shared_names:
            averaged_names.add(name)

    names_of_a = []
    for name in sorted(averaged_names):
        is_a = _LORA_A.search(name) is not None
        name_of_b = _LORA_A.sub(r"\1_B", name)
        if is_a and name_of_b in averaged_names:
            names_of_a.append(name)
    return names_of_a


def _names_of_word(
    word: str, module: nn.Module, state: Mapping[str, Tensor], *, frozen: set[str], head: str | None
) -> Collection[str]:
    """Return the names in ``state`` that match ``word``, a pattern of ``share`` without its ``!``."""
    if word == "all":
        return state
    if word == "trainable":
        is_frozen_as_a_whole = len(frozen) == len(list(module.parameters()))
        if is_frozen_as_a_whole:  # its buffers are not shared, either
            return ()
        return state.keys() - frozen
    if word == "norm":
        norm_layers = [layer for layer in module.modules() if _is_norm_layer(layer)]
        return _names_in_layers(norm_layers, state)
    if word == "head":
        layer_name, problem = find_head(module, head)
        if layer_name is None:
            raise ConfigurationError(
                f"FederatedLoop(share=...): {word!r} is no layer of the module, since {problem}. Name the layer's "
                'parameters instead, as in share=["!net.fc.*"], or its name: ClassSpecificShapley(head=...).'
            )
        return _names_in_layers([module.get_submodule(layer_name)], state)
    return [name for name in state if fnmatchcase(name, word)]


def _is_norm_layer(layer: nn.Module) -> bool:
    class_names = [ancestor.__name__ for ancestor in type(layer).__mro__]
    return any(_NORM_CLASS.search(class_name) for class_name in class_names)


def _names_in_layers(layers: Iterable[nn.Module], state: Mapping[str, Tensor]) -> list[str]:
    """Return the names in ``state`` of the layers' own parameters and buffers."""
    ids_in_layers = set()
    for layer in layers:
        for tensors in (layer._parameters, layer._buffers):
            ids_in_layers |= {id(tensor) for tensor in tensors.values()}
    return [name for name, tensor in state.items() if id(tensor) in ids_in_layers]
