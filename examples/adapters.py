"""Three newsrooms adapt a language model of GPT-2's size, on the CPU: what crosses, what it costs, who it helped.

    python examples/adapters.py --root /path/to/data

The data are Reuters news (``text/reuters_r8_train.csv`` and ``text/reuters_r8_test.csv``, columns ``label`` and
``text``) and tales (``text/grimm_tales.csv``, column ``text``). A tokenizer is trained on the news. Two clients have
news and one has tales; the server validates on news. The transformer has random weights, so nothing is downloaded: it
is frozen, and only the adapters' matrices B are trained and cross. A client's value is what it adds to the mean
log-probability of a token, in nats: each client alone is trained once more, and the log-probabilities of all other
coalitions are predicted. The script prints the seconds and the memory, and takes minutes on one core.
"""

from __future__ import annotations

import argparse
import csv
import os
import resource
import select
import time
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv import FederatedDataModule, FederatedLoop
from flsv.metrics import ShadowShapley
from flsv.models.lora import freeze_a
from flsv.scores.likelihood import MeanLogLikelihood


class AdaptedLM(L.LightningModule):
    """A GPT-2 of ``transformers``, frozen but for adapters of ``peft``.

    A batch is tokens and what is to be predicted, int64 ``[B, L]`` and ``[B, L - 1]``.
    """

    def __init__(
        self, vocabulary: int, layers: int = 12, width: int = 768, rank: int = 8, lr: float = 1e-2
    ) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        self.save_hyperparameters()
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        sizes = {
            "vocab_size": vocabulary,
            "n_layer": layers,
            "n_embd": width,
            "n_head": max(1, width // 64),
        }
        layer = ["c_attn", "c_proj", "c_fc"]
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layer, fan_in_fan_out=True)
        self.network = get_peft_model(GPT2LMHeadModel(GPT2Config(**sizes, **ends)), config)
        freeze_a(self.network)  # so that the average of adapters is the average of what they do

    def forward(self, tokens: Tensor) -> Tensor:
        """The log-probability of each token, given those before, ``[B, L - 1]``."""
        logits = self.network(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -self(batch[0]).mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", -self(batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [each for each in self.parameters() if each.requires_grad], lr=self.hparams["lr"]
        )


def read(path: Path, *labels: str) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        return [row["text"] for row in csv.DictReader(file) if not labels or row["label"] in labels]


def federation(
    root: Path, vocabulary: int, length: int, pieces: int, val: int
) -> FederatedDataModule:
    """Two clients with news and one with tales, ``pieces`` of ``length`` tokens each."""
    from tokenizers import ByteLevelBPETokenizer

    news, tales = root / "text/reuters_r8_train.csv", root / "text/grimm_tales.csv"
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [*read(news), *read(tales)], vocab_size=vocabulary, show_progress=False
    )

    def cut(texts: list[str], most: int) -> TensorDataset:
        tokens = torch.tensor(
            [token for text in texts for token in tokenizer.encode(text).ids][: most * length]
        )
        tokens = tokens[: len(tokens) // length * length].view(-1, length)
        return TensorDataset(tokens, tokens[:, 1:])

    clients = {"earnings": read(news, "earn"), "takeovers": read(news, "acq"), "tales": read(tales)}
    return FederatedDataModule(
        clients={name: cut(texts, pieces) for name, texts in clients.items()},
        val=cut(read(root / "text/reuters_r8_test.csv"), val),
        batch_size=8,
        labels=False,
    )


def memory(process: int) -> float:
    """GiB of a process and its children; pages that they share count once (Linux)."""
    try:
        pages = Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss:")[1].split()[0]
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except (OSError, IndexError):  # it has ended
        return 0.0
    return int(pages) / 2**20 + sum(memory(int(each)) for each in children)


def watched() -> Callable[[], float]:
    """Watch this process and its children from a fork; the result is a function that returns the most memory."""
    (requested, request), (told, tell), process = os.pipe(), os.pipe(), os.getpid()
    if os.fork() == 0:
        os.close(request)
        most = 0.0
        while not select.select([requested], [], [], 0.2)[0]:
            most = max(most, memory(process))
        os.write(tell, str(most).encode())
        os._exit(0)

    def most_memory() -> float:
        os.write(request, b".")
        return float(os.read(told, 64))

    return most_memory


def processor_time() -> float:
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def main(
    root: Path,
    rounds: int,
    layers: int,
    width: int,
    vocabulary: int,
    length: int,
    pieces: int,
    val: int,
    values: bool,
) -> dict[str, float]:
    L.seed_everything(0, verbose=False)
    data = federation(root, vocabulary, length, pieces, val)
    module = AdaptedLM(vocabulary, layers, width)
    all_numbers = sum(each.numel() for each in module.parameters())
    value = ShadowShapley(performance=MeanLogLikelihood())
    loop = FederatedLoop(metrics={"value": value} if values else {}, share="trainable", seed=0)
    trainer = L.Trainer(
        max_epochs=rounds,
        callbacks=[loop],
        default_root_dir="runs/adapters",
        accelerator="cpu",
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    before, began, processor = memory(os.getpid()), time.monotonic(), processor_time()
    most_memory = watched()
    trainer.fit(module, data)
    print(
        f"{all_numbers:,} parameters ({all_numbers / 2**28:.2f} GiB), of which {loop.space.size:,} cross"
    )
    print(
        f"{time.monotonic() - began:.0f} s, {processor_time() - processor:.0f} s of processor time"
    )
    print(
        f"memory {before:.2f} GiB before the fit, at most {most_memory():.2f} with all coalitions' processes"
    )
    found = dict(zip(data.client_names, loop.contributions["value"].tolist())) if values else {}
    print("  ".join(f"{name} {each:+.3f}" for name, each in found.items()))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path("data"), help="a folder with text/")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=20_000)
    parser.add_argument("--length", type=int, default=64, help="tokens of a piece")
    parser.add_argument("--pieces", type=int, default=16, help="of each client")
    parser.add_argument("--val", type=int, default=16, help="pieces on which the server validates")
    parser.add_argument("--no-values", dest="values", action="store_false", help="only the run")
    main(**vars(parser.parse_args()))
