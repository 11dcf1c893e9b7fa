"""Tolerances follow from the arithmetic in use, and every comparison within a fit takes them."""

from types import SimpleNamespace

import pytest
import torch

from flsv._lightning import rounding
from flsv._lightning.rounding import ROUNDINGS, arithmetic_of, rounding_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("precision", "device", "convolutions", "expected"),
    [
        ("32-true", CUDA, True, "TF32"),
        ("32-true", CUDA, False, "float32"),
        ("64-true", CUDA, True, "float64"),
        ("16-mixed", CUDA, True, "half"),
        ("bf16-mixed", CUDA, True, "bf16"),
        ("bf16-true", CPU, True, "bf16 weights"),
        ("transformer-engine", CUDA, True, "bf16 weights"),
    ],
)
def test_arithmetic_follows_from_the_precision_and_the_device(
    monkeypatch, precision, device, convolutions, expected
):
    monkeypatch.setattr(rounding, "tf32_of", lambda: ["convolutions"] if convolutions else [])
    trainer = SimpleNamespace(precision=precision, strategy=SimpleNamespace(root_device=device))

    assert arithmetic_of(precision, device) == expected
    assert rounding_of(trainer) == ROUNDINGS[expected]
