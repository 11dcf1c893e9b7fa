"""Tolerances for comparing two computations of the same number or model, for each arithmetic (precision and device)."""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

#: Two models count as equal if their distance is at most this fraction of the norm of their start point.
RELATIVE_TOLERANCE = 1e-6
#: Largest relative difference between two results of an accelerator's kernels. TF32 rounds factors to 0.0005.
MAX_ROUNDING = 0.01
#: Smallest divisor for distances that are relative to the distance from the initial model.
_SMALLEST_DIVISOR = 1e-12


class Rounding(NamedTuple):
    """Tolerances of one arithmetic for two computations of the same number or model."""

    number: float
    steps: float

    @property
    def run_tolerance(self) -> float:
        """Return the distance up to which models of two runs count as equal, relative to the length of the update."""
        return min(0.01, 10 * self.number)

    def unexplained_distance(
        self, model: Tensor, reference: Tensor, initial_model: Tensor
    ) -> float | None:
        """Return the distance of two models that should be equal, relative to the distance of ``reference`` from
        ``initial_model``. None: rounding can explain it."""
        model = model.double()
        reference = reference.double()
        initial_model = initial_model.double()
        is_finite = reference.isfinite()
        if not is_finite.all():
            if model.isfinite().equal(is_finite):
                return None  # the same elements are not finite
            return 1.0  # their distance is as large as the update

        tolerance = self.run_tolerance * (reference - initial_model).norm()
        tolerance = max(tolerance, RELATIVE_TOLERANCE * initial_model.norm())
        if (model - reference).norm() <= tolerance:
            return None
        return relative_distance(model, reference, initial_model)


def relative_distance(model: Tensor, reference: Tensor, initial_model: Tensor) -> float:
    """Return the distance of two models, relative to the distance of ``reference`` from ``initial_model``."""
    path_length = (reference - initial_model).norm().clamp(min=_SMALLEST_DIVISOR)
    return float((model - reference).norm() / path_length)


#: ``{arithmetic: tolerances}``. ``"TF32"`` rounds factors of float32 products to 10 bits; ``"half"`` (10 bits) and
#: ``"bf16"`` (7 bits) also round activations, and ``"... weights"`` also round the weights.
ROUNDINGS = {
    "float64": Rounding(1e-5, 0.0),
    "float32": Rounding(1e-5, 0.0),
    "TF32": Rounding(5e-3, 0.02),
    "half": Rounding(5e-3, 0.02),
    "half weights": Rounding(2e-2, 0.1),
    "bf16": Rounding(1e-2, 0.1),
    "bf16 weights": Rounding(5e-2, 0.3),
}
_ARITHMETIC_BY_PRECISION = {
    "64-true": "float64",
    "32-true": "float32",
    "16-mixed": "half",
    "16-true": "half weights",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16 weights",
}


def rounding_of(trainer: L.Trainer) -> Rounding:
    """Return the tolerances for a trainer's precision and device."""
    arithmetic = arithmetic_of(trainer.precision, trainer.strategy.root_device)
    return ROUNDINGS[arithmetic]


def arithmetic_of(precision: Any, device: torch.device) -> str:
    """Return the arithmetic that a trainer computes in, a key of :data:`ROUNDINGS`."""
    name = _ARITHMETIC_BY_PRECISION.get(precision, "bf16 weights")
    if name == "float32" and device.type == "cuda" and tf32_of():
        return "TF32"
    return name


def tf32_of() -> list[str]:
    """Return the kinds of operations that torch rounds to TensorFloat32."""
    # torch 2.9 has new names for these settings, and raises if the earlier ones are read after the new ones were set.
    backends: dict[str, Any] = {
        "convolutions": torch.backends.cudnn,
        "products": torch.backends.cuda.matmul,
    }
    operations = []
    for operation, backend in backends.items():
        settings = getattr(backend, "conv", backend)  # cuDNN's settings of convolutions
        precision = getattr(settings, "fp32_precision", None)
        if precision is None:  # an earlier torch
            precision = "tf32" if backend.allow_tf32 else "ieee"
        elif precision == "none":  # the setting for all operations applies
            precision = getattr(torch.backends, "fp32_precision", "ieee")
        if precision in ("tf32", "bf16"):
            operations.append(operation)
    return operations
