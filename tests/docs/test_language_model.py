"""The module of examples/language_model.py in a federation: values of adapters, and of samples."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.language_model import CausalLMClient
from flsv import Reporting
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.metrics import (
    CosineGradientShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    ShadowShapley,
)
from helpers.fits import fit, vector

pytest.importorskip("peft", reason="peft is not installed: pip install peft")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install peft")
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


def test_lora_adapters_are_sent_and_valued_by_the_logged_loss(network: str, tmp_path: Path) -> None:
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


class Padded(Texts):
    """Without labels; what is behind a text's end is padding."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        mask = (torch.arange(LENGTH) < 3 + index % 4).long()
        return {"input_ids": self.tokens[index] * mask, "attention_mask": mask}


@pytest.mark.parametrize("size", [1, 4, 11])
def test_language_model_validation_loss_is_the_mean_over_predicted_tokens(network: str, size: int) -> None:
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
