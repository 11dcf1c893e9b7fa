"""How far two ways to compute the same may be apart, by the precision in which a trainer computes."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

#: By precision, relative to numbers above 1 and absolute below.
TOLERANCES = {"32-true": 1e-5, "64-true": 1e-5, "bf16-mixed": 1e-2, "bf16-true": 5e-2}
#: TensorFloat32 has 10 bits of a product's factors, bfloat16 has 7.
TF32 = 5e-3


def tolerance(trainer: L.Trainer) -> float:
    """For models of this trainer; for a precision that is not known, the widest."""
    precision: Any = trainer.precision
    rounding = TOLERANCES.get(precision, max(TOLERANCES.values()))
    return max(rounding, TF32) if precision == "32-true" and uses_tf32(trainer.strategy.root_device) else rounding


def share_of_way(trainer: L.Trainer) -> float:
    """Of the way that training has moved a model, how much rounding may be; 0 where no step rounds."""
    precision: Any = trainer.precision
    if precision == "bf16-mixed":
        return 0.1
    return 0.02 if precision == "32-true" and uses_tf32(trainer.strategy.root_device) else 0.0


def uses_tf32(device: torch.device) -> bool:
    """Whether products or convolutions of float32 may be rounded to TensorFloat32: on CUDA convolutions are, unless
    ``torch.backends.cudnn.allow_tf32 = False``, and products where
    ``torch.set_float32_matmul_precision("high")`` or ``"medium"`` allows it.

    Example:
        >>> uses_tf32(torch.device("cpu"))
        False
    """
    return device.type == "cuda" and bool(tf32_of())


def tf32_of() -> list[str]:
    """What torch's settings allow to be rounded to TensorFloat32: ``"convolutions"``, ``"products"``."""
    # torch 2.9 has names of its own for it, and refuses the earlier ones once these are set.
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
