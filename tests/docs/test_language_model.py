"""The module of examples/language_model.py in a federation: values of adapters, and of samples."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from toys import fit, vector

from examples.language_model import CausalLMClient
from flsv import Reporting
from flsv.clients.algorithms import InRunValues
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop
from flsv.metrics import (
    CosineGradientShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    InRunShapley,
    ShadowShapley,
)
from flsv.seeding import generator_for

pytest.importorskip("peft", reason="peft is not installed: pip install 'flsv[lora]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'flsv[lora]'")
TOKENS, LENGTH, LR = 12, 6, 0.5


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder."""
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still)).save_pretrained(folder)
    return str(folder)


class Texts(Dataset):
    """Dictionaries, with -100 for what does not count, and without classes."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        start = torch.randint(0, TOKENS, (count, 1), generator=draw)
        self.tokens = (start + torch.arange(LENGTH) * (1 + seed % 2)) % TOKENS
        self.labels = self.tokens.clone()
        self.labels[::3, :3] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = torch.ones(LENGTH, dtype=torch.long)
        return {"input_ids": self.tokens[index], "labels": self.labels[index], "attention_mask": mask}


def texts() -> FederatedDataModule:
    clients = {name: Texts(count, seed) for seed, (name, count) in enumerate({"a": 10, "b": 7, "c": 9}.items())}
    return FederatedDataModule(clients=clients, val=Texts(11, 4), batch_size=4)


def client(network: str) -> CausalLMClient:
    torch.manual_seed(1)
    return CausalLMClient(network, rank=2, optimizer=partial(torch.optim.SGD, lr=LR))


def federated(**options: Any) -> FederatedLoop:
    return FederatedLoop(share="trainable", seed=5, reporting=Reporting(table=False), **options)


def test_adapters_travel_and_are_valued_by_the_loss(network: str, tmp_path: Path) -> None:
    metrics = {
        "agreement": CosineGradientShapley(),
        "slope": GradientShapley(loss="val_loss"),
        "both": GradientAgreement(loss="val_loss"),
        "game": CumulativeShapley(performance="val_loss", mode="min", weighting="samples"),
        "shadow": ShadowShapley(performance="val_loss", mode="min", coalitions="all"),
    }
    module = client(network)
    frozen = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    before = vector(module)
    loop = federated(metrics=metrics)
    fit(loop, tmp_path, module, texts(), rounds=2)
    assert {name.split(".")[-3] for name in loop.space.names} == {"lora_B"}
    assert set(loop.space.constant_names) == set(frozen)
    assert all(torch.equal(p, frozen[n]) for n, p in module.named_parameters() if n in frozen)
    assert not torch.equal(vector(module), before)
    values = loop.contributions
    assert all(values[name].isfinite().all() for name in metrics)
    assert float(values["game"].sum()) == pytest.approx(float(values["shadow"].sum()), abs=1e-5)
    assert float(values["both"].sum()) == pytest.approx(1, abs=1e-5)


def loss_of(module: CausalLMClient, texts: Texts, rows: Any) -> tuple[Tensor, Tensor]:
    """The sum of every sample's losses ``[B]``, and how many tokens count."""
    tokens, labels = texts.tokens[rows], texts.labels[rows, 1:]
    logits = module(tokens)[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    return losses.view(labels.shape).sum(1), (labels != -100).sum()


def slopes(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])


def test_in_run_values_of_samples_are_those_of_explicit_gradients(network: str, tmp_path: Path) -> None:
    data, module = texts(), client(network)
    by_hand = client(network)
    loop = federated(metrics={"in_run": InRunShapley(loss="val_loss")}, client_algorithm=InRunValues())
    fit(loop, tmp_path, module, data, rounds=1)
    kept = {number: state["in_run_values"] for number, state in loop.state_dict()["clients"].items()}
    own = [p for p in by_hand.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in own]
    losses, counted = loss_of(by_hand, Texts(11, 4), slice(None))
    g = slopes(losses.sum() / counted, own)
    for number, count in enumerate((10, 7, 9)):
        train = Texts(count, number)
        for parameter, value in zip(own, start):
            parameter.data.copy_(value)
        expected = torch.zeros(count, dtype=torch.float64)
        for rows in torch.randperm(count, generator=generator_for(5, "shuffle", 0, number, 0)).split(4):
            losses, counted = loss_of(by_hand, train, rows)
            for row, loss in zip(rows, losses):
                expected[row] += LR * float(slopes(loss / counted, own) @ g)
            step = slopes(losses.sum() / counted, own)
            for parameter, part in zip(own, step.split([p.numel() for p in own])):
                parameter.data -= LR * part.view_as(parameter)
        torch.testing.assert_close(kept[number], expected, rtol=1e-3, atol=1e-7)
    values = loop.contributions["in_run"].by_class
    assert values.shape == (3, 2)
    assert values[:, 1].abs().max() < 1e-6
    weights = torch.tensor([10, 7, 9]) / 26
    torch.testing.assert_close(values[:, 0], (weights * torch.stack([kept[i].sum() for i in range(3)])).float())


class Padded(Texts):
    """Without labels; what is behind a text's end is padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < 3 + index % 4).long()
        return {"input_ids": self.tokens[index] * mask, "attention_mask": mask}


@pytest.mark.parametrize("size", [1, 4, 11])
def test_the_validation_loss_is_that_of_a_predicted_token(network: str, size: int) -> None:
    """In batches of any size, and padding is not predicted."""
    module, texts = client(network), Padded(11, 4)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (logged,) = trainer.validate(module, DataLoader(texts, size), verbose=False)
    losses = []
    with torch.no_grad():
        for each in (texts[index] for index in range(len(texts))):
            tokens = each["input_ids"][: int(each["attention_mask"].sum())]
            losses += F.cross_entropy(module(tokens[None])[0, :-1], tokens[1:], reduction="none").tolist()
    assert logged["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
