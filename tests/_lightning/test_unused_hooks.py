"""What is left out of Lightning's hooks is put back, and a profiler that profiles is not touched."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import PassThroughProfiler, SimpleProfiler
from torch import nn
from toys import Plain, fit, toy_data, trainer_for

from flsv._lightning.patches import skip_unused_hooks
from flsv.loop import FederatedLoop


class Named(Plain):
    """Sees in what hook it is, and keeps attributes of all kinds."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.hook = self._current_fx_name
        self.also_net = self.net  # still registered as a submodule
        return super().training_step(batch, batch_idx)


def test_everything_is_put_back(tmp_path: Path) -> None:
    looked_at = training_epoch_loop.is_param_in_hook_signature
    loop, module = FederatedLoop(seed=0), Named()
    trainer = trainer_for(loop, tmp_path, rounds=1)
    profiler = trainer.profiler  # type: ignore[attr-defined]
    assert len(skip_unused_hooks(trainer)) == 3
    trainer.fit(module, toy_data())
    assert module.hook == "training_step"
    assert "also_net" in module._modules
    assert L.LightningModule.__setattr__ is nn.Module.__setattr__
    assert training_epoch_loop.is_param_in_hook_signature is looked_at
    assert profiler.profile.__func__ is PassThroughProfiler.profile


def test_a_profiler_goes_on_profiling(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    fit(FederatedLoop(seed=0), tmp_path, rounds=1, profiler=profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) > 5


def test_the_models_are_the_same_without(tmp_path: Path, monkeypatch: Any) -> None:
    states = []
    for spared in (True, False):
        if not spared:
            monkeypatch.setattr("flsv.loop.run.skip_unused_hooks", lambda trainer: [])
        states.append(fit(FederatedLoop(seed=0), tmp_path / str(spared), rounds=2).state_dict())
    assert all(tensor.equal(states[1][name]) for name, tensor in states[0].items())
