"""CausalLMClient: any causal language model of Hugging Face's, fine-tuned by LoRA adapters in a federation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.models.lora import add_lora, freeze_a
from flsv.models.tasks import _Task


class CausalLMClient(_Task):
    """A causal language model of ``transformers`` that is frozen except for LoRA adapters.

    Batches are what the model takes by name, ``{"input_ids": int64 [B, L], "labels": ..., "attention_mask": ...}``, or
    ``(tokens int64 [B, L],)``, as :class:`flsv.data.CharacterData` gives them for a model of bytes. Without labels each
    token is to be predicted from those before it; labels of -100 do not count. ``training_step`` returns the mean
    cross-entropy per token in nats, and validation and test log it as ``val_loss`` or ``test_loss``.

    With ``FederatedLoop(share="trainable")`` the adapters alone travel. The frozen network must be the same everywhere.

    Args:
        network: a folder that ``save_pretrained`` has written, or a model's name at the Hugging Face hub, which is
            downloaded.
        rank: r of the adapters.
        alpha: their factor is alpha / r.
        targets: see :func:`flsv.models.lora.add_lora`; ``"all-linear"`` leaves out the layer that gives the logits.
        exact: freeze A (FFA-LoRA), so that the average of adapters is the average of what they do; see
            :mod:`flsv.models.lora`.
        optimizer: from the parameters that are trained to an optimizer. In YAML, ``class_path`` and ``init_args``.
        scheduler: from the optimizer to a learning-rate scheduler, stepped once an epoch. None: constant rate.

    Raises:
        ConfigurationError: ``transformers`` or ``peft`` is not installed; no model of that name; no layer to adapt; a
            batch without tokens.

    Example:
        >>> import tempfile
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1}
        >>> config = GPT2Config(vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0, **sizes)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     GPT2LMHeadModel(config).save_pretrained(folder)
        ...     client = CausalLMClient(folder, rank=2)
        >>> sum(p.numel() for p in client.parameters() if p.requires_grad)
        144
    """

    def __init__(
        self,
        network: str,
        rank: int = 4,
        alpha: float = 8.0,
        targets: list[str] | str = "all-linear",
        exact: bool = True,
        optimizer: OptimizerCallable = lambda params: torch.optim.SGD(params, lr=0.1),
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        check_number(self, "rank", rank, least=1, whole=True)
        self.save_hyperparameters("network", "rank", "alpha", "targets", "exact")
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        with torch.device("cpu"):  # so that a seed gives the same adapters everywhere
            self.network = add_lora(_pretrained(network), rank, alpha, targets)
        if exact:
            freeze_a(self.network)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, L, V]`` of the token after each of ``[B, L]``."""
        return self.network(input_ids=tokens, use_cache=False).logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Mean cross-entropy per token, a scalar."""
        return self._loss(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Probabilities ``[B, L, V]`` of the token after each."""
        return self(_named(batch)["input_ids"]).softmax(-1)

    def configure_optimizers(self) -> Any:
        """The optimizer over the adapters and, if there is one, the scheduler."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = self._make_optimizer(trained)
        return optimizer if self._make_scheduler is None else ([optimizer], [self._make_scheduler(optimizer)])

    def _loss(self, batch: Any) -> Tensor:
        given = _named(batch)
        return self.network(**{"labels": given["input_ids"], **given}, use_cache=False).loss

    def _log_scores(self, stage: str, batch: Any) -> None:
        self.log(f"{stage}_loss", self._loss(batch), batch_size=len(_named(batch)["input_ids"]))


def _named(batch: Any) -> Mapping[str, Any]:
    """What a model is given by name."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return batch
    tokens = batch[0] if isinstance(batch, tuple | list) and len(batch) == 1 else batch
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        raise ConfigurationError(
            "CausalLMClient needs batches {'input_ids': int64 [B, L], ...} or (tokens int64 [B, L],); this one is a "
            f"{type(batch).__name__}."
        )
    return {"input_ids": tokens}


def _pretrained(network: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigurationError(
            "CausalLMClient is a model of transformers, which is not installed: pip install 'flsv[lora]'."
        ) from error
    looks_local = network.startswith((".", "/", "~")) or len(Path(network).parts) > 2
    if looks_local and not (Path(network).expanduser() / "config.json").is_file():
        raise ConfigurationError(
            f"CausalLMClient(network={network!r}): there is no folder of this name with a config.json, as "
            "save_pretrained writes it. examples/language_model.py makes one."
        )
    try:
        found = AutoModelForCausalLM.from_pretrained(str(Path(network).expanduser()) if looks_local else network)
    except (OSError, ValueError) as error:
        said = str(error).partition("\n")[0]
        raise ConfigurationError(f"CausalLMClient(network={network!r}): {said}") from error
    return found.train()  # it comes in evaluation mode, in which dropout would do nothing
