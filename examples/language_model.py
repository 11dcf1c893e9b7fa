"""Five collections of tales fine-tune a language model by LoRA, and one of them sends nonsense.

    python examples/language_model.py --root /path/to/data

The data are Reuters news (``text/reuters_r8_train.csv``, column ``text``) and the tales of the Brothers Grimm
(``text/grimm_tales.csv``, columns ``group`` and ``text``). A transformer of 1.3 million parameters that reads bytes is
trained on news, once, and kept in ``runs/language_model/news``. Then each group of tales is a client that fine-tunes
adapters on its own text; the characters of one of them are shuffled. ``value`` is how much a client reduces the loss on
pieces of tales that nobody has: its Shapley value over coalitions, of which each client alone and all but one
are trained after the run. The per-round metrics help to find the bad client; do not pay by them. Nothing is
downloaded, and only adapters cross. The script takes some minutes on one core, most of them for the news.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor
from torch.utils.data import Dataset

from flsv import FederatedDataModule, FederatedLoop, Reporting
from flsv.metrics import CosineGradientShapley, GradientAgreement, GradientShapley, ShadowShapley
from flsv.models.lora import add_lora, freeze_a
from flsv.training.algorithms import ClientAlgorithm

LENGTH, HELD_OUT, MOST = 64, 16, 160
"""Bytes of a piece; a group's first pieces, on which the server validates; a client's pieces, at most."""
PADDING = -100  # the label of tokens that do not count


class CausalLMClient(L.LightningModule):
    """A causal language model of ``transformers`` that is frozen except for LoRA adapters. The configuration
    natural/tales_lora takes it from here.

    Batches are what the model takes by name, ``{"input_ids": int64 [B, L], "labels": ...}``, or
    ``(tokens int64 [B, L],)``, as :class:`flsv.tables.CharacterData` gives them. Without labels all tokens are
    predicted but those whose ``attention_mask`` is 0. The loss is the mean cross-entropy per predicted token in nats. A
    of the adapters is frozen (FFA-LoRA), so that their average is the average of what they do.

    Args:
        network: a folder that ``save_pretrained`` has written, or a model's name at the Hugging Face hub.
        rank: r of the adapters.
        optimizer: from the adapters to an optimizer.
    """

    def __init__(
        self,
        network: str,
        rank: int = 4,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.1),
    ) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.save_hyperparameters("network", "rank")
        self.make_optimizer = optimizer
        with torch.device("cpu"):  # so that a seed gives the same adapters everywhere
            # It comes in evaluation mode, in which dropout would do nothing.
            self.network = add_lora(
                AutoModelForCausalLM.from_pretrained(network).train(), rank, 8.0, "all-linear"
            )
        freeze_a(self.network)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(input_ids=tokens, use_cache=False).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(**labeled(batch), use_cache=False).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        given = labeled(batch)
        predicted = int((given["labels"][:, 1:] != PADDING).sum())
        if predicted:  # the mean is one of tokens, however many a batch has
            self.log("val_loss", self.training_step(given, batch_idx), batch_size=predicted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(
            [parameter for parameter in self.parameters() if parameter.requires_grad]
        )


def labeled(batch: Any) -> Mapping[str, Tensor]:
    """What the model takes, with labels: where there are none the tokens themselves, without padding."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch[0]}
    if "labels" in given:
        return given
    tokens = given["input_ids"]
    mask = given.get("attention_mask", torch.ones_like(tokens))
    return {**given, "labels": tokens.masked_fill(mask == 0, PADDING)}


class Pieces(Dataset):
    """Pieces of text as Hugging Face's models take them."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def pieces(text: str) -> Tensor:
    """A text's bytes, int64 ``[n, LENGTH]``."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    return torch.from_numpy(
        data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64)
    )


def column(path: Path, *names: str) -> list[Sequence[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [[row[name] for name in names] for row in csv.DictReader(file)]


def pretrained(root: Path, folder: Path, steps: int = 800, **size: int) -> Path:
    """A small GPT-2 of bytes that has read news, in a folder as ``save_pretrained`` writes it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if (folder / "config.json").is_file():
        return folder
    torch.manual_seed(0)
    tokens = torch.cat(
        [pieces(text) for (text,) in column(root / "text/reuters_r8_train.csv", "text")]
    )
    whole = {"n_embd": 160, "n_layer": 4, "n_head": 4, **size}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    network = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0, **whole, **still
        )
    )
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = tokens[torch.randint(len(tokens), (32,))]
        loss = network(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"news, step {step}: {loss.item():.3f} nats per byte", flush=True)
    network.save_pretrained(folder)
    return folder


def tales(root: Path, most: int = MOST) -> tuple[dict[str, Tensor], Tensor]:
    """Each group's pieces, and those that the server validates on: what each group's first tale begins with."""
    groups: dict[str, list[Tensor]] = {}
    for group, text in column(root / "text/grimm_tales.csv", "group", "text"):
        groups.setdefault(group, []).append(pieces(text))
    tokens = {group: torch.cat(each) for group, each in sorted(groups.items())}
    val = torch.cat([each[:HELD_OUT] for each in tokens.values()])
    return {group: each[HELD_OUT : HELD_OUT + most] for group, each in tokens.items()}, val


def shuffled(tokens: Tensor, seed: int) -> Tensor:
    """The same characters in another order."""
    order = torch.randperm(tokens.numel(), generator=torch.Generator().manual_seed(seed))
    return tokens.flatten()[order].view_as(tokens)


def federation(root: Path, bad: int | None, seed: int = 0, most: int = MOST) -> FederatedDataModule:
    """A client for each group of tales; the text of number ``bad`` is shuffled."""
    own, val = tales(root, most)
    clients = {
        group: Pieces(shuffled(tokens, seed) if number == bad else tokens)
        for number, (group, tokens) in enumerate(own.items())
    }
    return FederatedDataModule(clients=clients, val=Pieces(val), batch_size=16, labels=False)


def fit(
    network: Path,
    data: FederatedDataModule,
    metrics: dict[str, Any],
    rounds: int,
    seed: int = 0,
    algorithm: ClientAlgorithm | None = None,
    quiet: bool = True,
) -> FederatedLoop:
    """Fine-tune adapters over the clients."""
    L.seed_everything(seed, verbose=False)
    module = CausalLMClient(str(network), rank=4, optimizer=partial(torch.optim.SGD, lr=1.0))
    loop = FederatedLoop(
        metrics=metrics,
        share="trainable",
        client_algorithm=algorithm,
        reporting=Reporting(table=not quiet),
        seed=seed,
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[loop],
        default_root_dir="runs/language_model/fit",
        accelerator="auto",
        devices=1,
        logger=not quiet,
        enable_progress_bar=not quiet,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    return loop


def main(root: Path, rounds: int, bad: int, seed: int, steps: int, width: int) -> dict[str, Tensor]:
    network = pretrained(root, Path("runs/language_model/news"), steps, n_embd=width)
    metrics = {
        "agreement": CosineGradientShapley(),
        "gradient": GradientShapley(loss="val_loss", momentum=0.5),
        "gradient agreement": GradientAgreement(loss="val_loss"),
        "value": ShadowShapley(coalitions="both", performance="val_loss", mode="min"),
    }
    data = federation(root, bad, seed)
    loop = fit(network, data, metrics, rounds, seed, quiet=False)
    values = {name: loop.metrics[name].compute() for name in metrics}
    for number, name in enumerate(data.client_names):
        said = "  ".join(f"{metric} {value[number]:+.4f}" for metric, value in values.items())
        print(f"{name + (' (shuffled)' if number == bad else ''):36} {said}")
    return values


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=Path("data"), help="a folder with text/grimm_tales.csv"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--bad", type=int, default=1, help="number of the client whose text is shuffled"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=800, help="on news, where there is no model of them yet"
    )
    parser.add_argument("--width", type=int, default=160, help="of that model")
    main(**vars(parser.parse_args()))
