"""Copies to the host: one for many tensors, and none of numbers that came from there."""

import pytest
import torch
from torch import Tensor

from flsv.utilities.host_copies import from_host, on_host, to_host


def test_to_host_copies_several_tensors_at_once_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.tensor([[1, 2**40]]), torch.tensor(0.1), torch.empty(0), torch.tensor([True, False])]
    there = [tensor.to("meta") for tensor in tensors]
    crossed: list[Tensor] = []

    def cpu(self: Tensor) -> Tensor:
        crossed.append(self)
        return torch.cat([tensor.flatten().double() for tensor in tensors])

    monkeypatch.setattr(Tensor, "cpu", cpu)
    here = torch.tensor([7])  # some metrics' numbers lie on the CPU
    *found, last = to_host([*there, here])
    assert torch.equal(last, here)
    assert len(crossed) == 1
    assert all(mine.dtype == theirs.dtype and torch.equal(mine, theirs) for mine, theirs in zip(found, tensors))


def test_tensor_made_from_host_numbers_is_read_back_without_a_copy() -> None:
    losses = from_host([0.1, 2.0], torch.device("meta"))
    assert on_host(losses) == torch.tensor([0.1, 2.0]).tolist()
    with pytest.raises((RuntimeError, NotImplementedError)):
        on_host(losses.clone())  # another tensor, which has to be copied
