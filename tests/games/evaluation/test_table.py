"""Every coalition is evaluated once, whichever metrics ask for it."""

from __future__ import annotations

import pytest
import torch
from games.naive import CLASSES, FIXED, a_round, all_masks, batches, module

from flsv.games import CoalitionGames, ModelEvaluator


def test_metrics_of_a_round_share_every_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    net = module()
    round = a_round(net)
    evaluator = ModelEvaluator(net, round.space, batches(), num_classes=CLASSES)
    evaluated: list[int] = []
    original = evaluator.evaluate
    monkeypatch.setattr(evaluator, "evaluate", lambda build, count: evaluated.append(count) or original(build, count))
    games = CoalitionGames(evaluator)
    games.begin(round)
    accuracy, loss = games.utility("accuracy"), games.utility("negative_loss")
    twice = torch.tensor([[True, True, False, False], [True, True, False, False], [False, False, False, False]])
    first = accuracy(twice)
    assert first[0] == first[1]
    assert evaluated == [2]
    everything = loss(all_masks(4))
    assert evaluated == [2, 14]
    assert torch.equal(accuracy(all_masks(4))[[12, 12, 0]], first)
    assert loss(twice).equal(everything[[12, 12, 0]])
    assert evaluated == [2, 14]
    assert accuracy.evaluations == loss.evaluations == games.evaluations == 16

    # Other weightings are other models, apart from the empty coalition's.
    games.utility("accuracy", "samples")(all_masks(4))
    assert evaluated == [2, 14, 15]
    games.utility("accuracy", FIXED)(all_masks(4))
    games.utility("negative_loss", FIXED.double())(all_masks(4))
    games.utility("accuracy", FIXED.clone())(all_masks(4))
    assert evaluated[:4] == [2, 14, 15, 15]
    games.begin(a_round(net))
    assert games.evaluations == 0
    games.utility()(twice)
    assert evaluated[-1] == 2
    games.end()
    with pytest.raises(RuntimeError, match="begin"):
        games.utility()
