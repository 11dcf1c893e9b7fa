"""Selection of the entries of a model that clients share."""
# Methods that share only some entries: FedBN (Li et al., ICLR 2021), FedPer (Arivazhagan et al., 2019), and federated
# training of adapters such as LoRA.

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace, named_state
from flsv.utilities.classifier_head import head_name
from flsv.utilities.errors import ConfigurationError, listed

Share = str | list[str] | Callable[[str, Tensor], bool]
"""The entries that are shared: ``"all"``, ``"trainable"``, a list of patterns, or a function of an entry's name and
tensor that returns whether it is shared.
"""

#: Names of normalization layers' classes, also other libraries' (``LlamaRMSNorm``, ``FrozenBatchNorm2d``).
_NORMALISES = re.compile(r"(Batch|Instance|Group|Layer|RMS)_?Norm")

_LORA_A = re.compile(r"\b(lora(?:_embedding)?)_A\b")


class Sharing(NamedTuple):
    """Entries of a model that are not shared."""

    kept: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()


def check_share(share: Any) -> None:
    """Check the type of the argument ``FederatedLoop(share=...)``."""
    words = [share] if isinstance(share, str) else share
    if not callable(share) and not (
        isinstance(words, list | tuple) and words and all(isinstance(word, str) and word.strip("!") for word in words)
    ):
        raise ConfigurationError(
            f'FederatedLoop(share={share!r}): expected "all", "trainable", names such as ["!norm"], or a function.'
        )


def sharing(share: Share, module: nn.Module, head: str | None = None) -> Sharing:
    """Name the entries of a module that the argument ``share`` does not select."""
    if share == "all":
        return Sharing()
    state = dict(named_state(module))
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    excluded: set[str] = set()
    if not isinstance(share, str) and callable(share):
        shared = {name for name, tensor in state.items() if share(name, tensor)}
    else:
        words = [share] if isinstance(share, str) else share
        shared = set(state) if words[0].startswith("!") else set()
        for word in words:
            named = set(_named(word.removeprefix("!"), module, state, frozen, head))
            if not named:
                raise ConfigurationError(
                    f"FederatedLoop(share={share!r}): {word!r} names nothing of the module. It has "
                    f"{listed(list(state), 3, repr)}."
                )
            if word.startswith("!"):
                shared, excluded = shared - named, excluded | named
            else:
                shared, excluded = shared | named, excluded - named
    if not shared & {name for name, tensor in state.items() if tensor.is_floating_point()}:
        raise ConfigurationError(f"FederatedLoop(share={share!r}) leaves nothing of the module to share.")
    rest = state.keys() - shared
    constant = (rest & frozen) - excluded
    return Sharing(frozenset(rest - constant), frozenset(constant))


def warn_of_sharing(kept: Sequence[str], space: ParameterSpace, module: nn.Module, evaluated: bool) -> None:
    """Warn if the global model lacks trained entries, or averages both factors of LoRA."""
    if kept:
        hint = "" if evaluated else " ClientEvaluation(every=1) evaluates each client with its own."
        warnings.warn(
            f"{len(kept)} tensors stay at their clients ({listed(kept, 3, repr)}), and the server has none of them: "
            f"validation, tests and checkpoints of the global model use their initial values.{hint}",
            stacklevel=2,
        )
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad} & set(space.names)
    pairs = [name for name in sorted(trained) if (b := _LORA_A.sub(r"\1_B", name)) != name and b in trained]
    if pairs:
        warnings.warn(
            f"LoRA's A and B are averaged one by one ({listed(pairs, 3, repr)}), and the product of averages is not "
            "the average of the clients' products B A. Freeze A for exact averages (FFA-LoRA): "
            "flsv.models.lora.freeze_a(module).",
            stacklevel=2,
        )


def _named(
    word: str, module: nn.Module, state: Mapping[str, Tensor], frozen: set[str], head: str | None
) -> Collection[str]:
    """Name the entries of ``state`` that a pattern without its ``!`` stands for."""
    if word == "all":
        return state
    if word == "trainable":  # of a module that is frozen as a whole, nothing
        return state.keys() - frozen if len(frozen) < sum(1 for _ in module.parameters()) else ()
    if word == "norm":
        return _held_by([layer for layer in module.modules() if _normalizes(layer)], state)
    if word == "head":
        found = head_name(module, head)
        return () if found is None else _held_by([module.get_submodule(found)], state)
    return [name for name in state if fnmatchcase(name, word)]


def _held_by(layers: Iterable[nn.Module], state: Mapping[str, Tensor]) -> list[str]:
    """Name the entries of ``state`` that are the layers' own."""
    own = {id(t) for layer in layers for part in (layer._parameters, layer._buffers) for t in part.values()}
    return [name for name, tensor in state.items() if id(tensor) in own]


def _normalizes(layer: nn.Module) -> bool:
    return any(_NORMALISES.search(kind.__name__) for kind in type(layer).__mro__)
