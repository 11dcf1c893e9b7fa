"""Updates that copy one another: named together, and kept in the model."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flsv.attacks import Alignment, Attack
from flsv.core import ClientUpdate
from flsv.federation import FederatedLoop
from flsv.filters import Cohort, CopyFilter, OutlierFilter
from flsv.metrics import CosineGradientShapley
from flsv.report import open_run, write_report
from flsv.uploads import UploadContext
from helpers.data import toy_data
from helpers.fits import assert_resumes, fit
from helpers.pages import text_of


class Sybil(Attack):
    """What its clients send differs by little, up to this round."""

    def __init__(self, clients: list[int], last: int = 99) -> None:
        super().__init__(clients)
        self.last = last

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        if context.round_index > self.last:
            return update
        common = torch.randn(len(update), generator=torch.Generator().manual_seed(context.round_index))
        return update.norm() * (common + 0.1 * torch.randn(len(update), generator=generator)) / len(update) ** 0.5


def seven() -> Any:
    return toy_data((4, 3, 4, 3, 4, 3, 4))


def told(loop: FederatedLoop, folder: Path, words: str, rounds: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, folder, data=seven(), rounds=rounds)
    return [str(w.message) for w in caught if words in str(w.message)]


def of_sybils(last: int = 99, **options: Any) -> FederatedLoop:
    return FederatedLoop(uploads=[Sybil([3, 1], last)], seed=1, **options)


def watching() -> dict[str, Any]:
    return {"filters": [OutlierFilter(), CopyFilter(0.7, gap=None)]}


def test_copies_are_reported_together_and_still_aggregated(tmp_path: Path) -> None:
    loop = of_sybils(metrics={"cgsv": CosineGradientShapley()}, **watching())
    said = told(loop, tmp_path / "run", "almost the same updates", 5)
    assert said[0].startswith("clients 1, 3 sent almost the same updates as each other, in several rounds, ")
    assert "round 3 (similarity 0.9" in said[0]
    assert "Look into it before you pay anything" in said[0]
    assert len(said) == 2  # when it was found, and at the end
    assert loop.participations.tolist() == [5] * 7
    assert [(each.what, each.client, each.times) for each in loop.events] == [("copy", 1, 3), ("copy", 3, 3)]
    assert loop.copies == [[1, 3]]
    assert loop.contributions["cgsv"].isfinite().all()
    silent = of_sybils()
    assert told(silent, tmp_path / "silent", "almost the same updates", 5) == silent.copies == []
    assert torch.equal(loop.state.model(), silent.state.model())


def test_reported_copies_stay_reported_in_a_resumed_run(tmp_path: Path) -> None:
    """Though the copying ends before the run is stopped."""
    loops = []
    assert_resumes(lambda: loops.append(of_sybils(2, **watching())) or loops[-1], tmp_path, data=seven, rounds=(3, 5))
    assert [loop.copies for loop in loops] == [[[1, 3]]] * 3
    ours, _, theirs = (each.state_dict()["filters"]["CopyFilter"]["pairs"] for each in loops)
    assert torch.equal(ours, theirs)
    assert ours.any()


def grams(similar: float, k: int = 6) -> Tensor:
    """Products of updates of which the first two are alike by so much, and the others by nothing."""
    gram = torch.eye(k, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = similar
    return gram


def sent(gram: Tensor, index: int) -> Cohort:
    values, vectors = torch.linalg.eigh(gram)
    rows, k = vectors * values.clamp_min(0).sqrt(), len(gram)
    updates = tuple(ClientUpdate(i, 1, row, num_steps=1) for i, row in enumerate(rows))
    return Cohort(index, updates, rows, (torch.zeros_like(rows[0]),) * k, torch.ones(k), num_parameters=rows.shape[1])


def compared(rounds: list[Tensor], threshold: float | None = None, gap: float | None = None) -> dict[int, int]:
    watch, federation = CopyFilter(threshold, gap), SimpleNamespace(num_clients=6, client_names=())
    watch.begin(federation)  # type: ignore[arg-type]
    for index, gram in enumerate(rounds):
        watch.apply(sent(gram, index))
    return watch.notices.state_dict()["copy"]


def test_isolated_group_in_the_first_three_rounds_counts_as_copies() -> None:
    apart, near = grams(0.65), grams(0.2)
    assert not compared([apart] * 2, gap=0.45)
    assert compared([apart] * 3, gap=0.45) == {0: 1, 1: 1}
    # Once found, it stays found; after the third round nobody is found any more.
    assert compared([apart] * 3 + [near] * 2, gap=0.45)[1] == 3
    assert not compared([near] * 3 + [apart] * 6, gap=0.45)
    assert not compared([grams(1.0), near, near], gap=0.45)  # a single round of a copy
    assert not compared([apart] * 6, threshold=0.7)


def test_sum_of_two_other_clients_updates_is_not_a_copy() -> None:
    updates = torch.randn(3, 6, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    updates[:, 2] = updates[:, 0] + updates[:, 1]
    rounds = [each @ each.T for each in updates]
    assert not compared(rounds, threshold=0.7, gap=0.45)
    updates[:, 2] = updates[:, 0]
    assert compared([each @ each.T for each in updates], threshold=0.7) == {0: 1, 2: 1}


def of_an_echo(folder: Path, mix: float = 1.0, rounds: int = 6) -> tuple[FederatedLoop, list[str]]:
    filters = [OutlierFilter(), CopyFilter(None, gap=None)]
    metrics = {"cgsv": CosineGradientShapley()}
    loop = FederatedLoop(uploads=[Alignment(mix, clients=[2])], metrics=metrics, filters=filters, seed=1)
    return loop, told(loop, folder, "last step back", rounds)


def test_client_that_sends_back_the_servers_last_step_is_reported_alone(tmp_path: Path) -> None:
    loop, said = of_an_echo(tmp_path)
    # Of six rounds the first has no step before it, and the attacker none to send; three have to speak.
    assert said[0].startswith("client 2 sent the server's own last step back, in several rounds, up to round 4 (")
    assert "(similarity 1.00): still aggregated and measured. Look into it" in said[0]
    assert [(each.what, each.client, each.times) for each in loop.events] == [("echo", 2, 3)]
    run = open_run(tmp_path)
    assert loop.copies == run.copies == [[2]]
    front = text_of(write_report(tmp_path)).partition("\nAppendix\n")[0]
    assert "This partner sent back the model's own last step, as one does who has not trained: client 2." in front


@pytest.mark.parametrize(("mix", "rounds"), [(0.5, 6), (1.0, 3)])
def test_partial_or_two_round_copies_of_the_server_are_not_reported(tmp_path: Path, mix: float, rounds: int) -> None:
    loop, said = of_an_echo(tmp_path, mix, rounds)
    assert (said, loop.copies, loop.events) == ([], [], [])
