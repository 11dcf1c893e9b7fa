"""The scripts of examples/, whole, with one round and little data."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_ROUND = {
    "hospitals.py": ["--rounds", "1"],
    "language_model.py": ["--root", "data", "--rounds", "1", "--steps", "3", "--width", "8"],
    "lightning_project.py": ["--epochs", "1", "--clients", "3"],
    "text.py": ["--rounds", "1", "--characters", "1500"],
    "vision_timm.py": ["--rounds", "1", "--network", "test_resnet"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    tales = {group: f"once upon a time there was a {group} who went into the wood. " * 30 for group in ("king", "wolf")}
    for name, rows in (
        ("grimm_tales.csv", [["group", "text"], *map(list, tales.items())]),
        (
            "reuters_r8_train.csv",
            [["label", "text"], *(["earn", "profits rose by a dollar a share " * 8] for _ in range(3))],
        ),
    ):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


def transformers_with_peft() -> Any:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'flsv[lora]'")
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'flsv[lora]'")


def test_all_are_run_here() -> None:
    assert sorted(ONE_ROUND) == sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", sorted(ONE_ROUND))
def test_a_script_runs_and_measures(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *ONE_ROUND[name]])
    if name == "language_model.py":
        transformers_with_peft()
        write_texts(folder / "data" / "text")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    (written,) = folder.glob("runs/**/contributions.csv")
    rows = list(csv.DictReader(written.open()))
    assert {row["metric"] for row in rows} & {"value", "cssv"}


def test_the_validation_loss_is_that_of_a_predicted_token(tmp_path: Path) -> None:
    from examples.language_model import CausalLMClient

    transformers, tokens, length = transformers_with_peft(), 12, 6
    sizes = {"vocab_size": tokens, "n_positions": length, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    module = CausalLMClient(str(tmp_path), rank=2).eval()
    texts, losses = [], []
    for index in range(11):
        mask = (torch.arange(length) < 3 + index % 4).long()
        text = (5 * index + torch.arange(length)) % tokens
        texts.append({"input_ids": text * mask, "attention_mask": mask})
        known = text[mask.bool()]
        with torch.no_grad():
            losses += F.cross_entropy(module(known[None])[0, :-1], known[1:], reduction="none").tolist()
    for size in (1, 4, 11):
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        (logged,) = trainer.validate(module, DataLoader(texts, size), verbose=False)  # type: ignore[arg-type]
        assert logged["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
