"""LoggedValues: models of any task by what the module logs when it validates, and the gradient of such a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from flsv._lightning.evaluation import free_cached
from flsv._lightning.precision import tolerance
from flsv._lightning.validation import ValidationRun, number
from flsv.errors import ConfigurationError
from flsv.games.replica import Build, named_tensors, rows_of
from flsv.games.step_values import NotByStep, StepValues
from flsv.games.validated import NamedScores, ValidatedModels

Backend = Literal["auto", "vmap", "serial"]
#: Models at once under vmap. Not by free memory: a resumed run is to round as the run before.
_CHUNK = 16


class LoggedValues(ValidatedModels):
    """Scores models by what they log: runs ``validation_step`` and the validation hooks around it.

    On CUDA models are evaluated some at a time under ``torch.func.vmap``, and what they have in common, such as a
    frozen network below adapters, is computed once. That is tried first: it must give what Lightning's validation gives
    one by one, and where it cannot, models are evaluated so. On a CPU they are evaluated one by one.

    Args:
        names: what is asked for, among the names of ``trainer.callback_metrics`` after a validation.
        derived: those of them whose gradients are asked for.
        asking: who asks for each of them, for messages.
        backend: ``"vmap"``, ``"serial"``, or ``"auto"``: vmap on CUDA.

    Raises:
        ConfigurationError: while evaluating, a name that is not logged, or not as one number; from ``attempt``, a name
            that has no gradient.
    """

    def __init__(
        self,
        *args: Any,
        names: Sequence[str],
        derived: Sequence[str] = (),
        asking: Mapping[str, str] | None = None,
        backend: Backend = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.names, self._derived, self._asking = list(dict.fromkeys(names)), derived, asking or {}
        where = self._trainer.strategy.root_device.type
        self.backend: Backend = ("vmap" if where == "cuda" else "serial") if backend == "auto" else backend
        self._chunk, self._tried = _CHUNK, False

    def attempt(self) -> None:
        super().attempt()
        start = self.space.read(self._trainer.lightning_module)
        for name in self._derived:
            self._check_gradient(name, start)

    def evaluate(self, build: Build, count: int) -> NamedScores:
        if self.backend == "serial" or count < 2:
            return super().evaluate(build, count)
        if not self._tried:
            self._try(build)
            return self.evaluate(build, count)
        found: list[NamedScores] = []
        start = 0
        while start < count:
            rows = range(start, min(start + self._chunk, count))
            try:
                found.append(self._at_once(build, rows))
                start = rows.stop
            except RuntimeError as error:
                if not is_oom_error(error) or len(rows) == 1:
                    raise
                self._chunk = len(rows) // 2
            if start < rows.stop:  # by now the failed chunk's tensors are gone
                free_cached(self._trainer.strategy.root_device)
        return NamedScores.cat(found)

    def gradient(self, vector: Tensor, name: str) -> Tensor:
        """float64 ``[P']``: the gradient of what is logged under ``name`` at a model ``[P]``, over the leading P'
        entries, the parameters.

        Raises:
            ConfigurationError: it is not logged by ``validation_step`` with its graph.
        """
        return self._derive(vector, name)[1]

    def _derive(self, vector: Tensor, name: str) -> tuple[Tensor, Tensor]:
        private = None if self._private is None else self._private()
        with self._validation(rows_of(vector[None]), 0, private) as run:
            own = {n: p for n, p in run.module.named_parameters() if n in self.space.names}
            trained = {n: p.requires_grad for n, p in own.items()}
            try:
                for parameter in own.values():
                    parameter.requires_grad_(True)
                value, slopes = StepValues(run, [name]).gradient(name, list(own.values()))
            except NotByStep as error:
                raise ConfigurationError(
                    f"{self._asking.get(name, 'a metric')} asks for the gradient of {name!r}, and {error}. Let "
                    f"validation_step log the loss itself, self.log({name!r}, loss), or take a metric that evaluates "
                    "models instead."
                ) from error
            finally:
                for n, parameter in own.items():
                    parameter.requires_grad_(trained[n])
        by_name = dict(zip(own, slopes))
        return value, torch.cat([by_name[n].flatten() for n in self.space.names if n in by_name])

    def _check_gradient(self, name: str, start: Tensor) -> None:
        """What is derived must be what Lightning logs."""
        (logged,) = super().evaluate(rows_of(start[None]), 1).value(name).tolist()
        derived = float(self._derive(start, name)[0])
        if not abs(derived - logged) <= tolerance(self._trainer) * max(1.0, abs(logged)):
            raise ConfigurationError(
                f"{self._asking.get(name, 'a metric')} asks for the gradient of {name!r}. What validation_step "
                f"logs averages to {derived:.6g}, and the trainer logs {logged:.6g}: hooks around the step have a part "
                "in it. Log the loss in validation_step, or take a metric that evaluates models instead."
            )

    def _at_once(self, build: Build, rows: range) -> NamedScores:
        private = None if self._private is None else self._private()
        with self._validation(build, rows.start, private) as run, torch.no_grad():
            own = dict(named_tensors(run.module))
            device = next(iter(own.values())).device
            vectors = torch.empty(len(rows), self.space.size, dtype=self.space.dtype, device=device)
            for row, index in enumerate(rows):
                build(index, vectors[row])
            states = {n: tensor.to(own[n].dtype) for n, tensor in self.space.unflatten(vectors).items()}
            return NamedScores(StepValues(run, self.names).of_many(states))

    def _try(self, build: Build) -> None:
        """Whether two models at once give what each gives alone; else they are evaluated one by one from here on."""
        self._tried = True
        expected = super().evaluate(build, 2)
        try:
            found, why = self._at_once(build, range(2)), ""
        except Exception as error:
            if is_oom_error(error):
                raise
            found, why = expected, str(error).partition("\n")[0] or type(error).__name__
        gaps = [(found.value(n) - expected.value(n)).abs() / expected.value(n).abs().clamp_min(1) for n in self.names]
        if not why and not bool((torch.stack(gaps) <= tolerance(self._trainer)).all()):
            why = f"it gives values that differ by {float(torch.stack(gaps).max()):.2g}"
        if why:
            self.backend = "serial"
            name = type(self._trainer.lightning_module).__name__
            rank_zero_info(f"Coalitions' models of {name} are evaluated one at a time: torch.func.vmap cannot ({why}).")

    def _evidence(self, run: ValidationRun) -> Mapping[str, Any]:
        return run.logged()

    def _score(self, run: ValidationRun) -> Mapping[str, float]:
        logged = run.logged()
        for name in self.names:
            if name not in logged:
                who, module = self._asking.get(name, "a utility"), type(self._trainer.lightning_module).__name__
                raise ConfigurationError(
                    f"{who}: {module} logs no {name!r} when it validates. It logs {sorted(logged)}. Log it in "
                    f"validation_step, self.log({name!r}, value), or name one of those; what callbacks log does not "
                    "count."
                )
        return {name: number(name, logged) for name in self.names}
