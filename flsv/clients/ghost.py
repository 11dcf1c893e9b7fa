"""Ghost dot products: every sample's gradient times a fixed vector, without any sample's gradient.

Wang et al., "Data Shapley in One Training Run", ICLR 2025. There the fixed vector is the gradient of
validation samples that are part of the batch; here it is any vector g over the module's parameters. A layer that is
linear in its parameters, y = f(x; theta), adds to the gradient's product with g for sample z

    sum over the sample's outputs of (dL/dy)_z f(x_z; g),

that is, one more forward pass of the layer, with g in place of its parameters, and one product with what the backward
pass brings anyway. For a linear layer it is the paper's product of activations and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flsv.errors import ConfigurationError

#: Linear in their parameters, and with a sample's outputs in its own row.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
#: Numbers that go into a layer and out of it, up to which it waits for more batches; and that all layers hold so.
_SMALL, _HELD = 2**17, 2**18
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm


class GhostProducts:
    """Hooks that collect, for each sample z, the product of g with z's part of the batch gradient, float64 ``[B]``.

    The products of a batch sum to <g, gradient of the batch's loss>, whatever the loss: a mean or a sum, with weights
    or without. One more forward pass of every layer. Since g stays the same, small layers do it for several batches at
    once: their inputs and their outputs' gradients are held so long, up to some MB.

    Args:
        module: whose passes are watched while :attr:`samples` is not None.
        reference: g, by names of parameters, in their shapes. Trainable parameters that are not in it have no part.

    Raises:
        ConfigurationError: a layer that samples' gradients cannot be told apart in, by name.

    Example:
        >>> module = nn.Linear(2, 1, bias=False)
        >>> ghost = GhostProducts(module, {"weight": torch.tensor([[1.0, 0.0]])})
        >>> ghost.samples = 2
        >>> module(torch.tensor([[3.0, 5.0], [4.0, 5.0]])).mean().backward()
        >>> ghost.take()
        tensor([1.5000, 2.0000], dtype=torch.float64)
        >>> ghost.remove()
    """

    def __init__(self, module: nn.Module, reference: Mapping[str, Tensor]) -> None:
        check_layers(module, set(reference))
        self._samples: int | None = None
        self._device = next((p.device for p in module.parameters()), None)
        self._end = 0
        self._rows: Tensor | None = None
        self._done: list[tuple[Tensor, Tensor]] = []
        self._watched: list[tuple[nn.Module, _Layer]] = []
        self._handles: list[RemovableHandle] = []
        by_parameter = {p: reference[name] for name, p in module.named_parameters() if name in reference}
        for name, layer in module.named_modules():
            own = layer._parameters
            if any(p in by_parameter and p.requires_grad for p in own.values() if p is not None):
                g = {
                    n: by_parameter[p] if p in by_parameter and p.requires_grad else None
                    for n, p in own.items()
                    if p is not None
                }
                self._watched.append((layer, _Layer(name, _with(layer, own, g))))

    @property
    def samples(self) -> int | None:
        """How many samples the present batch has, the first dimension of all activations; None: not watched. To set it
        begins a batch."""
        return self._samples

    @samples.setter
    def samples(self, samples: int | None) -> None:
        if sum(layer.held for _, layer in self._watched) > _HELD:
            self._work()
        self._samples, self._rows = samples, None
        if samples is None:  # a hook that does nothing costs, too
            self.remove()
            return
        self._begin(samples)
        if not self._handles:
            self._handles = [
                layer.register_forward_hook(self._hook(of), with_kwargs=True) for layer, of in self._watched
            ]

    def take(self) -> Tensor | None:
        """``[sum of B]``, the products of all batches since the last call, in their order; None where no watched
        gradient has reached a layer."""
        self._work()
        done, self._done = self._done, []
        products = None
        if done:
            products = torch.zeros(self._end, dtype=torch.float64, device=self._device)
            for rows, found in done:
                products.index_add_(0, rows.to(products.device), found.to(products))
        self._end, self._rows = 0, None
        return products

    def remove(self) -> None:
        """Take the hooks away, until the next batch that is watched; what they have brought can still be taken."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, samples: int) -> Tensor:
        """A batch: its rows among the products."""
        self._rows = torch.arange(self._end, self._end + samples, device=self._device)
        self._end += samples
        return self._rows

    def _work(self) -> None:
        self._done += [found for _, layer in self._watched for found in layer.work()]

    def _hook(self, of: _Layer) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            samples = self._samples
            if samples is None or not torch.is_grad_enabled() or not output.requires_grad:
                return
            if len(output) != samples or not samples:
                raise ConfigurationError(
                    f"layer {of.name!r} gives {len(output)} rows for a batch of {samples} samples: whose is which "
                    "cannot be told. In-run values need layers whose first dimension is the batch."
                )
            rows = self._begin(samples) if self._rows is None else self._rows
            x = None if kwargs or len(args) != 1 else args[0]
            if x is not None and len(x) == samples and of.waits(x, output):
                # What no gradient runs through may be a buffer of the data's that the next batch overwrites.
                kept = x.detach() if x.requires_grad else x.detach().clone()
                output.register_hook(lambda gradient: of.keep(rows, kept, gradient))
                return
            with torch.no_grad():
                ahead = of.twin.forward(*args, **kwargs)

            def add(gradient: Tensor) -> None:
                product = torch.linalg.vecdot(gradient.detach().flatten(1).to(ahead.dtype), ahead.flatten(1))
                self._done.append((rows, product))

            output.register_hook(add)

        return hook


class _Layer:
    """A layer with g in place of its parameters, and what it has not yet worked on: rows, inputs and gradients."""

    def __init__(self, name: str, twin: nn.Module) -> None:
        self.name, self.twin, self.held = name, twin, 0
        self._dtype = next(p.dtype for p in twin._parameters.values() if p is not None)
        self._kept: list[tuple[Tensor, Tensor, Tensor, tuple[int, int]]] = []

    def waits(self, x: Tensor, output: Tensor) -> bool:
        """Whether it is small enough to wait for more, and its twin gives the same output at any time: not where
        autocast gives it another type."""
        return x.dtype == output.dtype == self._dtype and x.numel() + output.numel() <= _SMALL

    def keep(self, rows: Tensor, x: Tensor, gradient: Tensor) -> None:
        gradient = gradient.detach()
        self._kept.append((rows, x, gradient, (x._version, gradient._version)))
        self.held += x.numel() + gradient.numel()

    @torch.no_grad()
    def work(self) -> list[tuple[Tensor, Tensor]]:
        """Rows and their products."""
        kept, self._kept, self.held = self._kept, [], 0
        if any((x._version, gradient._version) != versions for _, x, gradient, versions in kept):
            raise ConfigurationError(
                f"layer {self.name!r}: its input or its output's gradient was changed in place after the backward "
                "pass, and in-run values still need it. Change a copy."
            )
        found = []
        for shape in dict.fromkeys(x.shape[1:] for _, x, _, _ in kept):  # sequences may differ in length
            rows, inputs, gradients, _ = zip(*(each for each in kept if each[1].shape[1:] == shape))
            ahead = self.twin.forward(torch.cat(inputs))
            found.append((torch.cat(rows), torch.linalg.vecdot(torch.cat(gradients).flatten(1), ahead.flatten(1))))
        return found


def check_layers(module: nn.Module, names: set[str]) -> None:
    """Check that samples' gradients can be told apart.

    Args:
        module: in the mode that it trains in.
        names: of the parameters that matter.

    Raises:
        ConfigurationError: where they cannot, and what to do.
    """
    asked = {p: name for name, p in module.named_parameters() if name in names and p.requires_grad}
    for name, layer in module.named_modules():
        if isinstance(layer, _BATCH_NORM) and layer.training:
            raise ConfigurationError(
                f"layer {name!r}, {type(layer).__name__}, mixes the samples of a batch: no gradient is one sample's. "
                "Use GroupNorm or LayerNorm, or keep it in evaluation mode."
            )
        own = [p for p in layer.parameters(recurse=False) if p in asked]
        why = _why_not(layer) if own else None
        if why:
            raise ConfigurationError(
                f"parameter {asked[own[0]]!r} is {type(layer).__name__}'s, {why}. In-run values know "
                f"{', '.join(each.__name__ for each in LAYERS)}. Use these, or freeze it (requires_grad = False)."
            )


def _why_not(layer: nn.Module) -> str | None:
    if isinstance(layer, _BATCH_NORM):
        return None  # in evaluation mode: linear, with constant statistics
    if not isinstance(layer, LAYERS):
        return "for which there is no ghost product"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return "whose max_norm, scale_grad_by_freq or sparse gradients are not known here"
    if isinstance(layer, _INSTANCE_NORM) and layer.track_running_stats:
        return "whose track_running_stats=True changes buffers in every pass"
    return None


def _with(layer: nn.Module, own: dict[str, Any], g: dict[str, Tensor | None]) -> nn.Module:
    """A twin of the layer with g in place of its parameters, 0 where g has none; without its hooks."""
    filled = {n: torch.zeros_like(own[n]) if value is None else value.detach().to(own[n]) for n, value in g.items()}
    padding = getattr(layer, "padding_idx", None)
    if isinstance(layer, nn.Embedding) and padding is not None:  # it has no gradient
        filled["weight"] = filled["weight"].clone()
        filled["weight"][padding] = 0
    twin: Any = copy(layer)
    twin._parameters = {**layer._parameters, **filled}
    return twin
