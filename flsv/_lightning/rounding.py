"""Tolerances for comparing two computations of the same number or model, for each arithmetic (precision and device)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

#: Rounding may separate two trainings of a model by at most this many times the difference between the displacements of
#: a training from the model and one from a nudged copy of it. Measured: 0.2 to 1.6 times with convolutions in TF32, for
#: LeNet and a network with GroupNorm, with SGD, momentum and Adam, on MNIST and CIFAR-10, after 1 to 30 steps.
FACTOR = 3.0
#: Smallest relative change of the weights in a nudged copy; it is larger if the arithmetic rounds factors by more.
NUDGE = 1e-6
#: Two models count as equal if their distance is at most this fraction of the norm of their start point.
LENGTH = 1e-6


class Rounding(NamedTuple):
    """Tolerances of one arithmetic for two computations of the same number or model."""

    unit: float
    number: float
    steps: float

    @property
    def run(self) -> float:
        """Return the distance up to which two runs' models count as equal, relative to how far training moved them."""
        return min(0.01, 10 * self.number)

    def nudged(self, start: Tensor) -> Tensor:
        """Return the model ``start [P]`` with every entry changed at random, by about a rounding error."""
        generator = torch.Generator().manual_seed(0)  # the same on every device
        noise = torch.randn(len(start), generator=generator, dtype=start.dtype).to(start)
        return start * (1 + max(NUDGE, self.unit) * noise)

    def caused(self, start: Tensor, trained: Tensor, nudged: Tensor) -> Tensor:
        """Return the largest distance that rounding can cause between trained models. ``nudged`` is trained from
        :meth:`nudged` weights, ``trained`` from ``start``."""
        return FACTOR * ((trained - start) - (nudged - self.nudged(start))).norm()

    def apart(
        self,
        model: Tensor,
        reference: Tensor,
        start: Tensor,
        nudged: Callable[[], Tensor | None] = lambda: None,
    ) -> float | None:
        """Return the distance of two models that should be equal, relative to the reference's from ``start``. None:
        rounding explains it. ``nudged()`` returns how training moves :meth:`nudged` weights, if known."""
        model, reference, start = model.double(), reference.double(), start.double()
        if not reference.isfinite().all():
            return None if model.isfinite().equal(reference.isfinite()) else 1.0
        apart, way = (model - reference).norm(), (reference - start).norm()
        if apart <= max(self.run * way, LENGTH * start.norm()):
            return None
        other = nudged()
        if other is not None and apart <= FACTOR * ((model - start) - other.double()).norm():
            return None
        return float(apart / way.clamp(min=1e-12))


#: ``{arithmetic: tolerances}``. ``"TF32"`` rounds factors of float32 products to 10 bits; ``"half"`` (10 bits) and
#: ``"bf16"`` (7 bits) also round activations, and ``"... weights"`` also round the weights.
ROUNDINGS = {
    "float64": Rounding(2**-53, 1e-5, 0.0),
    "float32": Rounding(2**-24, 1e-5, 0.0),
    "TF32": Rounding(2**-11, 5e-3, 0.02),
    "half": Rounding(2**-11, 5e-3, 0.02),
    "half weights": Rounding(2**-11, 2e-2, 0.1),
    "bf16": Rounding(2**-8, 1e-2, 0.1),
    "bf16 weights": Rounding(2**-8, 5e-2, 0.3),
}
_BY_PRECISION = {
    "64-true": "float64",
    "32-true": "float32",
    "16-mixed": "half",
    "16-true": "half weights",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16 weights",
}


def rounding_of(trainer: L.Trainer) -> Rounding:
    """Return the tolerances for a trainer's precision and device."""
    return ROUNDINGS[arithmetic_of(trainer.precision, trainer.strategy.root_device)]


def arithmetic_of(precision: Any, device: torch.device) -> str:
    """Return the arithmetic that a trainer computes in, a key of :data:`ROUNDINGS`."""
    name = _BY_PRECISION.get(precision, "bf16 weights")
    return "TF32" if name == "float32" and device.type == "cuda" and tf32_of() else name


def tf32_of() -> list[str]:
    """Return the kinds of operations that torch rounds to TensorFloat32."""
    # torch 2.9 has new names for these settings, and raises if the earlier ones are read after the new ones were set.
    backends: dict[str, Any] = {
        "convolutions": torch.backends.cudnn,
        "products": torch.backends.cuda.matmul,
    }
    found = []
    for what, backend in backends.items():
        layer = getattr(backend, "conv", backend)
        said = getattr(layer, "fp32_precision", None)
        if said is None:
            said = "tf32" if backend.allow_tf32 else "ieee"
        if said == "none":
            said = getattr(torch.backends, "fp32_precision", "ieee")
        if said in ("tf32", "bf16"):
            found.append(what)
    return found
