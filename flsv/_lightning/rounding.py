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
#: Allowed distance of two models after a few steps if all rows of a batched model take the same batches, as a fraction
#: of the distance that they moved: optimizers that divide by a gradient's size amplify the rounding of small gradients.
SHARED = 1e-3


class Rounding(NamedTuple):
    """Tolerances for one arithmetic: the largest differences between two computations of the same number or model that
    rounding can explain.

    Attributes:
        unit: relative error of one rounded factor of a product.
        number: difference of a number that a model computes, such as its loss; relative if it is above 1, else
            absolute.
        steps: distance of two models after a few optimizer steps, as a fraction of the distance that they moved; 0: all
            their entries must agree up to ``number``.
        visit: distance of two models after a client's whole training in a round, as a fraction of the distance that
            they moved.
    """

    unit: float
    number: float
    steps: float
    visit: float

    @property
    def is_coarse(self) -> bool:
        """Return whether the arithmetic is too coarse for a fixed tolerance, so that the effect of rounding must be
        measured, see :meth:`nudged`.

        Training amplifies rounding: with convolutions in TF32, two models differ by a few hundredths of the distance
        that they moved after 10 steps, and by all of it after 100.
        """
        return self.steps > 0

    @property
    def run(self) -> float:
        """Return the tolerance for two models after a whole training, as a fraction of the distance that they moved.
        Models that are closer count as equal; for others :meth:`apart` measures the effect of rounding."""
        return min(0.01, 10 * self.number)

    def nudged(self, start: Tensor) -> Tensor:
        """Return a nudged copy of the model ``start [P]``: every entry is changed at random, by about as much as the
        arithmetic rounds factors. Training both models shows how much training amplifies rounding."""
        generator = torch.Generator().manual_seed(0)  # the same on every device
        noise = torch.randn(len(start), generator=generator, dtype=start.dtype).to(start)
        return start * (1 + max(NUDGE, self.unit) * noise)

    def caused(self, start: Tensor, trained: Tensor, nudged: Tensor) -> Tensor:
        """Return the largest distance between two trainings of the same model that rounding can explain.

        Args:
            start: ``[P]``, the model before training.
            trained: ``[P]``, the model after training.
            nudged: ``[P]``, the result of the same training from ``self.nudged(start)``.
        """
        return FACTOR * ((trained - start) - (nudged - self.nudged(start))).norm()

    def apart(
        self, mine: Tensor, real: Tensor, start: Tensor, nudged: Callable[[], Tensor | None] = lambda: None
    ) -> float | None:
        """Return the distance of two trained models that must be equal, as a fraction of the distance that training has
        moved them; return None if rounding explains the difference.

        Training amplifies rounding: for a convolutional network with a large learning rate, to a fifth of the distance
        that the model moves. So if the models differ by more than :attr:`run`, the effect of rounding is measured.

        Args:
            mine: ``[P]``, the model to check.
            real: ``[P]``, the model that it must equal.
            start: ``[P]``, the model that both started from.
            nudged: function that trains ``self.nudged(start)`` as ``mine`` was trained and returns the displacement
                ``[P]``, the trained model minus its start; it returns None if that is not possible.

        Example:
            >>> start, real = torch.zeros(2), torch.tensor([3.0, 4.0])
            >>> ROUNDINGS["float32"].apart(real + 1e-5, real, start), ROUNDINGS["float32"].apart(real + 1, real, start)
            (None, 0.282842...)
        """
        mine, real, start = mine.double(), real.double(), start.double()
        if not real.isfinite().all():
            return None if mine.isfinite().equal(real.isfinite()) else 1.0
        apart, way = (mine - real).norm(), (real - start).norm()
        if apart <= max(self.run * way, LENGTH * start.norm()):
            return None
        other = nudged()
        if other is not None and apart <= FACTOR * ((mine - start) - other.double()).norm():
            return None
        return float(apart / way.clamp(min=1e-12))


#: ``{arithmetic: tolerances}``. ``"TF32"`` rounds factors of float32 products to 10 bits; ``"half"`` (10 bits) and
#: ``"bf16"`` (7 bits) also round activations, and ``"... weights"`` also round the weights.
ROUNDINGS = {
    "float64": Rounding(2**-53, 1e-5, 0.0, 0.01),
    "float32": Rounding(2**-24, 1e-5, 0.0, 0.01),
    "TF32": Rounding(2**-11, 5e-3, 0.02, 0.05),
    "half": Rounding(2**-11, 5e-3, 0.02, 0.05),
    "half weights": Rounding(2**-11, 2e-2, 0.1, 0.3),
    "bf16": Rounding(2**-8, 1e-2, 0.1, 0.1),
    "bf16 weights": Rounding(2**-8, 5e-2, 0.3, 0.6),
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
    """Return the tolerances for a trainer's precision and device; the widest ones for an unknown precision."""
    return ROUNDINGS[arithmetic_of(trainer.precision, trainer.strategy.root_device)]


def arithmetic_of(precision: Any, device: torch.device) -> str:
    """Return the arithmetic that a trainer computes in, a key of :data:`ROUNDINGS`.

    Args:
        precision: the trainer's precision, in Lightning's notation.
        device: the trainer's device.

    Example:
        >>> arithmetic_of("32-true", torch.device("cpu")), arithmetic_of("bf16-mixed", torch.device("cpu"))
        ('float32', 'bf16')
    """
    name = _BY_PRECISION.get(precision, "bf16 weights")
    return "TF32" if name == "float32" and uses_tf32(device) else name


def uses_tf32(device: torch.device) -> bool:
    """Return whether float32 products or convolutions on the device may be rounded to TensorFloat32.

    On CUDA, convolutions are rounded unless ``torch.backends.cudnn.allow_tf32`` is False, and products are rounded if
    ``torch.set_float32_matmul_precision`` was called with ``"high"`` or ``"medium"``.

    Example:
        >>> uses_tf32(torch.device("cpu"))
        False
    """
    return device.type == "cuda" and bool(tf32_of())


def tf32_of() -> list[str]:
    """Return the operations that torch rounds to TensorFloat32 by its settings, of ``"convolutions"`` and
    ``"products"``."""
    # torch 2.9 has new names for these settings, and raises if the earlier ones are read after the new ones were set.
    backends: dict[str, Any] = {"convolutions": torch.backends.cudnn, "products": torch.backends.cuda.matmul}
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
