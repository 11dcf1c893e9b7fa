"""ShadowShapley of groups: the game of groups by hand, and where it is said that values are of groups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from resuming import assert_resumes
from shadow_cases import ROUNDS, SEED, Kept, by_a_plain_loop, data, loop
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from toys import Plain, fit, network

from flsv import FederatedLoop
from flsv.cli import main
from flsv.errors import ConfigurationError
from flsv.metrics import ShadowShapley
from flsv.metrics.shadow import coalition_masks

PROPORTIONS = (4, 1, 2, 3)
GROUPS = [[0, 3], [1, 2]]


def grouped(**options: Any) -> ShadowShapley:
    return ShadowShapley(**{"coalitions": "all", "performance": "negative_loss", "groups": GROUPS, **options})


def test_values_are_those_of_the_game_of_groups(tmp_path: Path) -> None:
    """Of two groups by hand: (U(a) - U(nobody) + U(all) - U(b)) / 2, half of it to each client. The groups' models
    are those of a plain loop."""
    module = Plain(network(batch_norm=False))
    federation = loop(Kept(coalitions="all", groups=GROUPS, performance="negative_loss"))
    start, dealt = copy.deepcopy(module), data(PROPORTIONS)
    fit(federation, tmp_path, module, dealt, rounds=ROUNDS)
    models = federation.metrics["shadow"].models
    x, y = (torch.cat(parts) for parts in zip(*dealt.val_dataloader()))

    def worth(clients: list[int]) -> Tensor:
        federation.space.write(module, models[tuple(client in clients for client in range(4))])
        with torch.no_grad():
            return -nn.functional.cross_entropy(module.eval()(x).double(), y)

    assert len(models) == 4
    nobody, first, second, everybody = worth([]), worth([0, 3]), worth([1, 2]), worth([0, 1, 2, 3])
    value = (first - nobody + everybody - second) / 2, (second - nobody + everybody - first) / 2
    expected = torch.stack([value[0], value[1], value[1], value[0]]) / 2
    found = federation.contributions["shadow"].double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(), everybody - nobody, rtol=1e-5, atol=1e-6)
    assert (value[0] - value[1]).abs() > 1e-3
    for members in GROUPS:
        own = by_a_plain_loop(start, members, [[0, 1, 2, 3]] * ROUNDS, dealt=data(PROPORTIONS))
        mask = tuple(client in members for client in range(4))
        torch.testing.assert_close(models[mask].double(), own, rtol=1e-5, atol=1e-5)


def test_groups_of_one_are_clients(tmp_path: Path) -> None:
    values = []
    for metric in (ShadowShapley(coalitions="all"), ShadowShapley(coalitions="all", groups=[[0], [1], [2]])):
        federation = loop(metric)
        fit(federation, tmp_path, Plain(network(batch_norm=False)), data(), rounds=2)
        values.append(federation.contributions["shadow"])
    assert torch.equal(*values)


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    assert_resumes(
        lambda: loop(grouped()), tmp_path, lambda: Plain(network(batch_norm=False)), lambda: data(PROPORTIONS)
    )


def test_who_never_came_has_no_value_and_its_group_has() -> None:
    metric = grouped(num_clients=4)
    masks = coalition_masks("all", 4, GROUPS)
    metric.update(torch.tensor([0, 1, 2]), masks, lambda masks: masks.double().sum(1))
    assert metric.compute().tolist()[:3] == [1.0, 1.0, 1.0]
    assert metric.compute()[3].isnan()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": [[0, 1], [1, 2]]}, r"groups=\[\[0, 1\], \[1, 2\]\]\): expected the members of each group, each"),
        ({"groups": [[0], []]}, "expected the members of each group"),
        ({"groups": []}, "expected each of the clients 0 to 3 in one group"),
        ({"groups": [[0, 1], [2]]}, "expected each of the clients 0 to 3 in one group"),
        ({"groups": [[0, 1], [2, 3, 4]]}, "expected each of the clients 0 to 3 in one group"),
        ({"coalitions": [[2]]}, r"names clients \[2\], and the federation has 0 to 1"),
        ({"metrics": {"other": grouped(groups=[[0, 1], [2, 3]])}}, "are of different coalitions, groups or parts"),
    ],
)
def test_what_are_no_groups(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    def attempt() -> None:
        more = {"metrics": options.pop("metrics")} if "metrics" in options else {}
        fit(loop(grouped(**options), **more), tmp_path, Plain(network(batch_norm=False)), data(PROPORTIONS), rounds=1)

    with pytest.raises(ConfigurationError, match=match):
        attempt()


def test_it_is_said_that_values_are_of_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table at the end, in TensorBoard, in the report of all and in that of one, which names nobody else."""
    from lightning.pytorch.loggers import TensorBoardLogger

    said = "2 groups of 2, 2 clients; a group's value is dealt out equally to its clients."
    federation = FederatedLoop(metrics={"shadow": grouped()}, seed=SEED)
    board = TensorBoardLogger(tmp_path, name="", version="")
    fit(federation, tmp_path, Plain(network(batch_norm=False)), data(PROPORTIONS), rounds=1, logger=board)
    assert f"shadow: values of {said}" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path)).Reload()
    text = events.Tensors("how to read/shadow/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"| values of | {said}" in text
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "all.html")]) == 0
    assert said in (tmp_path / "all.html").read_text().replace("&#39;", "'")
    assert ShadowShapley().guide().lines().keys() == {"unit", "sign", "needs", "cost"}
