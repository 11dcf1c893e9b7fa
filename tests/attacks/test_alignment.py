"""Updates and classifier heads that go where the server went last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from toys import fit

from flsv.attacks import Alignment, HeadAlignment
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.uploads import UploadContext


def context(state: dict[str, torch.Tensor], start: torch.Tensor, client: int = 1) -> UploadContext:
    return UploadContext(client, 3, num_parameters=3, round_index=1, state=state, start=start)


def test_half_way_between_the_own_direction_and_the_servers() -> None:
    state: dict[str, torch.Tensor] = {}
    attack = Alignment(mix=0.5)
    update = torch.tensor([0.0, 3.0, 4.0, 9.0])  # the last is a buffer
    assert torch.equal(attack.apply(update, context(state, torch.zeros(4))), update)
    sent = attack.apply(update, context(state, torch.tensor([2.0, 0.0, 0.0, 5.0])))
    assert sent[:3].norm().item() == pytest.approx(5)
    assert sent[3] == 9
    expected = torch.tensor([1.0, 0.6, 0.8]) / 2**0.5 * 5
    torch.testing.assert_close(sent[:3], expected)
    # The step is counted from when it last took part.
    torch.testing.assert_close(state["attack.0.start"], torch.tensor([2.0, 0.0, 0.0]))


def test_nothing_to_turn_to() -> None:
    still = {"attack.0.start": torch.ones(3)}
    update = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(Alignment().apply(update, context(dict(still), torch.ones(3))), update)
    assert not Alignment().apply(torch.zeros(3), context(dict(still), torch.zeros(3))).any()
    opposite = Alignment(mix=0.5).apply(torch.tensor([1.0, 0.0, 0.0]), context(still, torch.tensor([0.0, 1.0, 1.0])))
    assert opposite.isfinite().all()


def test_in_a_federation_the_whole_mix_is_the_servers_last_step(tmp_path: Path) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Seen(Alignment):
        def attack(self, update, context, generator):
            seen.append((context.start.clone(), super().attack(update, context, generator)))
            return seen[-1][1]

    fit(FederatedLoop(uploads=[Seen(mix=1.0, clients=[1])], seed=1), tmp_path, rounds=3)
    (first, _), (second, sent), (third, last) = seen
    for got, step in ((sent, second - first), (last, third - second)):
        cosine = torch.nn.functional.cosine_similarity(got, step[: len(sent)], dim=0)
        assert cosine.item() == pytest.approx(1, abs=1e-5)


def test_rows_are_the_servers_at_their_own_length_and_all_else_stays() -> None:
    space = ParameterSpace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert space.head is not None
    generator = torch.Generator().manual_seed(0)
    update, first, second = torch.randn(3, space.size, generator=generator)
    attack, state = HeadAlignment(classes=[1]), {}
    attack.check(space)

    def sent(start: torch.Tensor) -> torch.Tensor:
        return attack.apply(update, UploadContext(0, 2, space.num_parameters, 1, state=state, start=start))

    torch.testing.assert_close(sent(first), update)
    after = sent(second)
    mine, own, step = (space.head.rows(each) for each in (after, update, second - first))
    torch.testing.assert_close(mine[0], own[0])
    torch.testing.assert_close(mine[1], step[1] * own[1].norm() / step[1].norm())
    before_head = space.head.weight.start
    assert torch.equal(after[:before_head], update[:before_head])


def test_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no classes \[7\]; they are 0 .. 2"):
        fit(FederatedLoop(uploads=[HeadAlignment(classes=[7])]), tmp_path)
    with pytest.raises(ConfigurationError, match="has none that is shared"):
        HeadAlignment().check(ParameterSpace(nn.Conv1d(2, 2, 1)))
