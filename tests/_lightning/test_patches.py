"""Patched attributes leave no trace; states of metrics that cannot be put together are refused."""

from __future__ import annotations

import pickle

import pytest
from torchmetrics import PearsonCorrCoef

from flsv._lightning.patches import PatchedAttributes
from flsv._lightning.several_processes import _merge_states, _state


def test_a_state_that_has_no_reduction_is_refused() -> None:
    metric = PearsonCorrCoef()
    with pytest.raises(RuntimeError, match="PearsonCorrCoef .* has no reduction: .* Log its values"):
        _merge_states(metric, [_state(metric), _state(metric)])


class Speaks:
    word = "yes"

    def say(self) -> str:
        return self.word


def test_a_method_is_its_class_s_again() -> None:
    speaker = Speaks()
    patched = PatchedAttributes([(speaker, "say", lambda: "no"), (speaker, "word", "maybe")])
    assert (speaker.say(), speaker.word) == ("no", "maybe")
    patched.give_back()
    assert (speaker.say(), speaker.word) == ("yes", "yes")
    assert "say" not in vars(speaker)
    assert pickle.loads(pickle.dumps(speaker)).say() == "yes"
