"""Selection of the entries of a model that clients share: all entries, the trainable ones, or those selected by name.

Published methods that share only some entries are FedBN (Li et al., "FedBN: Federated Learning on Non-IID Features via
Local Batch Normalization", ICLR 2021), FedPer (Arivazhagan et al., "Federated Learning with Personalization Layers",
2019) and the federated training of adapters, such as LoRA.
"""

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
    """The entries of a model that are not shared.

    Attributes:
        kept: names of the entries that stay at their client.
        constant: names of parameters that no client trains: they are the same everywhere and are not sent.
    """

    kept: frozenset[str] = frozenset()
    constant: frozenset[str] = frozenset()


def check_share(share: Any) -> None:
    """Check the type of the argument ``FederatedLoop(share=...)``.

    Raises:
        ConfigurationError: ``share`` is neither ``"all"`` or ``"trainable"``, nor a list of patterns, nor a function.
    """
    words = [share] if isinstance(share, str) else share
    if not callable(share) and not (
        isinstance(words, list | tuple) and words and all(isinstance(word, str) and word.strip("!") for word in words)
    ):
        raise ConfigurationError(
            f'FederatedLoop(share={share!r}): expected "all", "trainable", names such as ["!norm"], or a function.'
        )


def sharing(share: Share, module: nn.Module, head: str | None = None) -> Sharing:
    """Return the names of the entries (parameters and buffers) of a module that ``share`` does not select, and that are
    therefore not shared.

    A list is read from left to right: a pattern adds the entries that it matches, a pattern that begins with ``!``
    removes them. A list whose first pattern begins with ``!`` starts from all entries. A pattern (``fnmatch``) matches
    names as in ``module.named_parameters()`` and ``named_buffers()``, or is one of these words:

    - ``all``;
    - ``trainable``: the parameters that require a gradient now, and all buffers. BatchNorm's statistics also change in
      frozen layers; since all buffers are sent, training is the same as with ``all``;
    - ``norm``: parameters and buffers of the normalization layers;
    - ``head``: parameters and buffers of the classifier head.

    Entries that are not shared stay at their client (``kept``). Unshared parameters that require no gradient are
    assumed never to change (``constant``). If such a parameter does change, as in a target network that follows another
    network, exclude it by a ``!`` pattern: then it is in ``kept``.

    Args:
        share: see :data:`Share`.
        module: the module whose entries are selected.
        head: the classifier head's name, see :class:`flsv.core.parameter_space.ParameterSpace`.

    Raises:
        ConfigurationError: a pattern matches nothing; nothing is left to share.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        >>> sorted(sharing(["!norm"], net).kept)
        ['1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight']
        >>> sorted(sharing(["all", "!head"], net).kept)
        ['2.bias', '2.weight']
        >>> net[0].requires_grad_(False)
        Linear(in_features=2, out_features=3, bias=True)
        >>> sharing("trainable", net)
        Sharing(kept=frozenset(), constant=frozenset({...}))
    """
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
    """Warn if entries stay at the clients, because validation of the global model then uses their initial values; and
    if LoRA's two factors are both trained, because their averages are not the average of the products.

    Args:
        kept: names of the entries that stay at the clients; empty if all are shared.
        space: the map between the module and vectors.
        module: the module at the beginning of a fit.
        evaluated: whether the clients' own models are evaluated.
    """
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
    """Return the names of ``state`` that a pattern without its ``!`` stands for."""
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
    """Return the names of ``state`` whose tensors are the layers' own parameters and buffers."""
    own = {id(t) for layer in layers for part in (layer._parameters, layer._buffers) for t in part.values()}
    return [name for name, tensor in state.items() if id(tensor) in own]


def _normalizes(layer: nn.Module) -> bool:
    return any(_NORMALISES.search(kind.__name__) for kind in type(layer).__mro__)
