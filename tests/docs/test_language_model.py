"""The module of examples/language_model.py: its validation loss."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from examples.language_model import CausalLMClient
from helpers.data import Items

pytest.importorskip("peft", reason="peft is not installed: pip install peft")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install peft"
)
TOKENS, LENGTH = 12, 6


@pytest.fixture(scope="module")
def folder_of_gpt2(tmp_path_factory):
    """A small GPT-2 with random weights, saved as Hugging Face saves a model."""
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    special_tokens = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **without_dropout, **special_tokens)

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)

    return str(folder)


def make_padded_texts(count):
    """Texts without labels; what is behind a text's end is padding."""
    positions = torch.arange(LENGTH)
    texts = []
    for index in range(count):
        text_length = 3 + index % 4  # 3 to 6 tokens
        mask = (positions < text_length).long()
        texts.append(
            {
                "input_ids": (index + positions) % TOKENS * mask,
                "attention_mask": mask,
            }
        )
    return Items(texts)


def test_language_model_validation_loss_is_the_mean_over_predicted_tokens(folder_of_gpt2):
    """In batches of unequal sizes, and padding is not predicted."""
    torch.manual_seed(1)
    module = CausalLMClient(folder_of_gpt2, rank=2, optimizer=partial(torch.optim.SGD, lr=0.5))
    texts = make_padded_texts(11)
    batches = DataLoader(texts, batch_size=4)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)

    (logged,) = trainer.validate(module, batches, verbose=False)

    losses = []
    with torch.no_grad():
        for text in texts:
            length = int(text["attention_mask"].sum())
            tokens = text["input_ids"][:length]
            predicted = module(tokens[None])[0, :-1]
            losses += F.cross_entropy(predicted, tokens[1:], reduction="none").tolist()

    mean = sum(losses) / len(losses)
    assert logged["val_loss"] == pytest.approx(mean, rel=1e-5)
