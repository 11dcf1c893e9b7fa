"""Steps of many models at once in the fit of one: what they must not do, and how to see that they do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn

from flsv._lightning.patches import unlogged
from flsv.errors import ConfigurationError

#: What Lightning and torch keep on a module.
_LIGHTNINGS = frozenset({"_current_fx_name", "_trainer", "_fabric", "log", "log_dict", "_parameters", "_modules"})


@contextmanager
def batched_steps(trainer: L.Trainer) -> Iterator[None]:
    """Within it many models take steps in the fit of one: in its precision, with its trainer out of reach. What
    torch.func cannot do is a refusal."""
    module = trainer.lightning_module
    with refusing(module), pure_step(module), trainer.precision_plugin.train_step_context():
        yield


@contextmanager
def purely(module: nn.Module) -> Iterator[None]:
    """Within it, whatever is raised is a refusal, and so is it to draw, or to change what the module keeps."""
    watch = Watch(module)
    with refusing(module, (Exception,)):
        yield
    if reason := watch.changed():
        raise refusal(module, reason)


@contextmanager
def refusing(module: nn.Module, errors: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Within it, what torch.func cannot do is a refusal, and so is each of these errors."""
    try:
        yield
    except Exception as error:
        text = str(error) or type(error).__name__
        refused = "vmap" in text or isinstance(error, (ConfigurationError, *errors))
        if isinstance(error, NotBatched) or is_oom_error(error) or not refused:
            raise
        raise refusal(module, text.splitlines()[0].rstrip(".")) from error


class Watch:
    """Whether steps of a module draw random numbers, or change what it keeps, from now on."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._before, self._drawn = module, dict(_kept(module)), _random_state()

    def changed(self) -> str:
        """What they have done; empty: nothing."""
        if self._drawn != _random_state():
            return "it draws random numbers, as dropout does"
        before, now = self._before, dict(_kept(self._module))
        names = sorted(name for name in before.keys() | now.keys() if not _same(before.get(name), now.get(name)))
        return (
            f"it changes what the module keeps beside parameters and buffers: {', '.join(names[:3])}" if names else ""
        )


class NotBatched(ConfigurationError):
    """A module whose steps cannot be batched; ``reason`` says why."""

    reason = ""


def refusal(module: nn.Module, reason: str) -> NotBatched:
    error = NotBatched(
        f'engine="vmap" trains many clients as one batched model, and training_step of {type(module).__name__} does '
        f'not allow it: {reason}. Use engine="sequential", or change that.'
    )
    error.reason = reason
    return error


def _kept(module: nn.Module) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What a module and its layers have as attributes, and by what to see that it has changed."""
    for prefix, layer in module.named_modules():
        for name, value in vars(layer).items():
            if name in _LIGHTNINGS:
                continue
            mark: Any = None
            if isinstance(value, Tensor) and not value.is_inference():
                mark = value._version
            elif name == "_buffers" and isinstance(value, dict):
                mark = {key: id(buffer) for key, buffer in value.items()}
            elif isinstance(value, (list, dict, set, tuple)):
                mark = len(value)
            yield f"{prefix}.{name}" if prefix else name, (value, mark)


def _same(before: tuple[Any, Any] | None, now: tuple[Any, Any] | None) -> bool:
    if before is None or now is None:
        return before is now
    if type(before[0]) is type(now[0]) and isinstance(now[0], (int, float, str)):
        return bool(before[0] == now[0])
    return before[0] is now[0] and before[1] == now[1]


def _random_state() -> tuple[Any, ...]:
    legacy: Any = np.random.get_state(legacy=False)  # noqa: NPY002
    cuda = [s.numpy().tobytes() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else None
    return random.getstate(), repr(legacy), torch.get_rng_state().numpy().tobytes(), repr(cuda)


#: What a Trainer has for one client that trains in it.
_OF_ONE_CLIENT = frozenset(
    {"callbacks", "fit_loop", "global_step", "is_last_batch", "lr_scheduler_configs", "optimizers", "strategy"}
)


class _ManyClients:
    """A trainer as many clients at once may see it."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE_CLIENT:
            raise ConfigurationError(
                f"training_step asks for trainer.{name}, which of clients that train at once is not one."
            )
        return getattr(self._trainer, name)


@contextmanager
def pure_step(module: L.LightningModule) -> Iterator[None]:
    """Within it, what ``training_step`` logs is left out, and asking the trainer for what belongs to one client raises
    a ConfigurationError."""
    own: dict[str, Any] = vars(module)
    trainer = module.trainer
    with unlogged(module):
        own["_trainer"] = _ManyClients(trainer)
        try:
            yield
        finally:
            own["_trainer"] = trainer
