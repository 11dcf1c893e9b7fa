"""The module of examples/language_model.py; adapters in federations are in tests/models/test_lora.py."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from examples.language_model import CausalLMClient

pytest.importorskip("peft", reason="peft is not installed: pip install 'flsv[lora]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'flsv[lora]'")
TOKENS, LENGTH = 12, 6


def test_the_validation_loss_is_that_of_a_predicted_token(tmp_path: Path) -> None:
    """In batches of any size, and padding is not predicted."""
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    module = CausalLMClient(str(tmp_path), rank=2).eval()
    texts, losses = [], []
    for index in range(11):
        mask = (torch.arange(LENGTH) < 3 + index % 4).long()
        tokens = (5 * index + torch.arange(LENGTH)) % TOKENS
        texts.append({"input_ids": tokens * mask, "attention_mask": mask})
        known = tokens[mask.bool()]
        with torch.no_grad():
            losses += F.cross_entropy(module(known[None])[0, :-1], known[1:], reduction="none").tolist()
    for size in (1, 4, 11):
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        (logged,) = trainer.validate(module, DataLoader(texts, size), verbose=False)  # type: ignore[arg-type]
        assert logged["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
