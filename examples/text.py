"""Four authors train a language model of characters, and one of them writes backwards.

    python examples/text.py --rounds 3

The texts are the chapters of Python's own manual that every installation has (``help("if")`` shows one), so nothing is
downloaded. Each client has the chapters on one subject; those of "formats" are written backwards. A client's
value is how much it lowers the loss that the module logs in validation, in nats per character: its Shapley value over
all coalitions. A recurrent network cannot train in one batched model, so each coalition is trained after the run, by a
fit of its own: 7 more fits in all. The server validates on a tenth of everybody's text, so backward
text counts as much as any other, and the only author of it is worth as much as the others: a value says what a client
adds *for this validation set*. This is one seed: before you pay,
retrain with several (``flsv retrain``). The script takes about half a minute.
"""

from __future__ import annotations

import argparse
import csv
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch

from flsv import FederatedDataModule, FederatedLoop
from flsv.data import GroupPartitioner
from flsv.metrics import ShadowShapley
from flsv.models import CharacterModel
from flsv.tables import CharacterData

CLIENTS = {
    "formats": ["formatstrings", "strings", "numbers"],
    "operators": ["comparisons", "binary", "calls", "subscriptions"],
    "statements": ["if", "for", "try", "with", "import", "assignment"],
    "types": ["typesseq", "typesmapping", "typesnumeric"],
}


def write_table(path: Path, characters: int) -> None:
    """One row per chapter: whose it is, and its text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "text"])
        for client, names in CLIENTS.items():
            text = "\n".join(topics[name] for name in names if name in topics)[:characters]
            writer.writerow([client, text[::-1] if client == "formats" else text])


def main(rounds: int, characters: int) -> dict[str, float]:
    L.seed_everything(0)
    path = Path("runs/text/manual.csv")
    write_table(path, characters)
    texts = CharacterData(str(path), text="text", group="client", length=32, batch_size=32)
    data = FederatedDataModule(texts, GroupPartitioner())
    module = CharacterModel(hidden=64, optimizer=partial(torch.optim.Adam, lr=0.005))
    loop = FederatedLoop(
        metrics={"value": ShadowShapley(coalitions="all", performance="val_loss", mode="min")}
    )
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[loop],
        default_root_dir="runs/text",
        accelerator="auto",
        devices=1,
    )
    trainer.fit(module, data)

    return dict(
        zip(data.client_names, loop.contributions["value"].tolist())
    )  # the table shows the shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters", type=int, default=15_000, help="of every client's text")
    options = parser.parse_args()
    main(options.rounds, options.characters)
