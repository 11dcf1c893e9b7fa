"""Programs whose coalitions would be wrong if they trained at once: what they share differs in each coalition."""

import pytest
from retraining.test_at_once import (
    AT_ONCE,
    Classifier,
    fit_with_coalitions,
    is_trained_at_once,
)

pytestmark = pytest.mark.slow


# ---- the line that says why


class SwallowsRefusal(Classifier):
    weight = 1.0

    def on_train_epoch_start(self):
        try:
            self.weight = 1 / (1 + float(self.network[0].weight.norm()))
        except Exception:
            self.weight = 1.0

    def training_step(self, batch, batch_idx):
        return self.weight * super().training_step(batch, batch_idx)


class LoadsWeights(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 2:
            self.load_state_dict({name: tensor * 0.9 for name, tensor in self.first.items()})

    def on_train_start(self):
        self.first = {name: tensor.clone() for name, tensor in self.state_dict().items()}


class ReadsRateInHook(Classifier):
    def on_train_epoch_end(self):
        self.rate = self.optimizers().param_groups[0]["lr"]


REASONS = {
    SwallowsRefusal: "a hook reads 'network.0.weight' of the module, which each coalition has for itself.",
    LoadsWeights: "a hook reads 'network.0.weight' of the module, which each coalition has for itself.",
    ReadsRateInHook: "a hook reads trainer.strategy, which each coalition has for itself.",
}


@pytest.mark.parametrize("make_module", REASONS)
def test_one_line_says_what_a_hook_reads(make_module, monkeypatch, caplog, tmp_path):
    result = fit_with_coalitions(monkeypatch, caplog, tmp_path, AT_ONCE, make_module)
    assert not is_trained_at_once(result)
    assert any(line.endswith(REASONS[make_module]) for line in result.lines), result.lines
