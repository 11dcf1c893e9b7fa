"""Tolerances follow from the arithmetic in use, and every comparison within a fit takes them."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv._lightning import rounding
from flsv._lightning.rounding import ROUNDINGS, arithmetic_of, rounding_of
from flsv.data import FederatedDataModule, IIDPartitioner
from flsv.federation import FederatedLoop
from flsv.metrics import ShadowShapley
from helpers import slow_except
from helpers.fits import fit
from helpers.models import Plain

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("precision", "device", "convolutions", "expected"),
    [
        ("32-true", CPU, True, "float32"),
        ("32-true", CUDA, True, "TF32"),
        ("32-true", CUDA, False, "float32"),
        ("64-true", CUDA, True, "float64"),
        ("16-mixed", CUDA, True, "half"),
        ("16-true", CUDA, True, "half weights"),
        ("bf16-mixed", CUDA, True, "bf16"),
        ("bf16-true", CPU, True, "bf16 weights"),
        ("transformer-engine", CUDA, True, "bf16 weights"),
    ],
)
def test_arithmetic_follows_from_the_precision_and_the_device(
    monkeypatch: pytest.MonkeyPatch, precision: str, device: torch.device, convolutions: bool, expected: str
) -> None:
    monkeypatch.setattr(rounding, "tf32_of", lambda: ["convolutions"] if convolutions else [])
    trainer: Any = SimpleNamespace(precision=precision, strategy=SimpleNamespace(root_device=device))
    assert arithmetic_of(precision, device) == expected
    assert rounding_of(trainer) == ROUNDINGS[expected]


def test_coarser_arithmetic_has_wider_tolerances() -> None:
    order = [ROUNDINGS[name] for name in ("float64", "float32", "TF32", "bf16", "bf16 weights")]
    for finer, coarser in pairwise(order):
        assert all(mine <= theirs for mine, theirs in zip(finer, coarser))


# ---- rows of coalitions where convolutions are rounded to TF32 for one model, and for rows are not, as with cuDNN


def to_tf32(tensor: Tensor) -> Tensor:
    """To the nearest number with 10 bits."""
    return ((tensor.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class InTF32(torch.autograd.Function):
    """A convolution of rounded factors, as its gradients are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        factors = to_tf32(x), to_tf32(weight)
        ctx.save_for_backward(*factors)
        return nn.functional.conv2d(*factors, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, weight), rounded = ctx.saved_tensors, to_tf32(gradient)
        return (
            nn.grad.conv2d_input(x.shape, weight, rounded),
            nn.grad.conv2d_weight(x, weight.shape, rounded),
            gradient.sum((0, 2, 3)),
        )


def in_rows() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


class Convolution(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if in_rows() else InTF32.apply(x, self.weight, self.bias)


class Images(Plain):
    """``slower``: the factor of the loss of rows."""

    def __init__(self, slower: float) -> None:
        torch.manual_seed(0)
        layers = [Convolution(1, 8, 3), nn.ReLU(), Convolution(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)]
        super().__init__(nn.Sequential(*layers))
        self.slower = slower

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (self.slower if in_rows() else 1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tf32", "slower", "as_rows"),
    slow_except([(True, 1.0, True)], [(True, 1.0, True), (False, 1.0, False), (True, 0.8, False)]),
)
def test_batched_coalitions_that_differ_by_tf32_rounding_only_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tf32: bool, slower: float, as_rows: bool
) -> None:
    """Where rounding is the whole difference, and only if the arithmetic is known to round."""
    monkeypatch.setattr(rounding, "uses_tf32", lambda device: tf32)
    loop = FederatedLoop(metrics={"value": ShadowShapley()}, seed=3)
    data = FederatedDataModule("digits", IIDPartitioner(3), batch_size=16)
    fit(loop, tmp_path, Images(slower), data, rounds=2)
    assert (loop._plan.why is None) is as_rows, loop._plan.why
