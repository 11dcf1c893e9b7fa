"""Copies: similarities and groups against NumPy and trying all groups, and the filter in federations."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv.attacks import Alignment, Attack
from flsv.core import ClientUpdate
from flsv.federation import FederatedLoop
from flsv.filters import Cohort, CopyFilter, OutlierFilter
from flsv.filters.copies import (
    groups_of,
    isolated_groups,
    last_step_similarity,
    same_group_pairs,
    similarities,
)
from flsv.metrics import CosineGradientShapley
from flsv.report import open_run, write_report
from flsv.uploads import UploadContext
from helpers.data import toy_data
from helpers.fits import assert_resumes, fit
from helpers.pages import text_of


@pytest.mark.parametrize("bad", [0.0, 1e30])
def test_centered_cosine_similarities_equal_numpys_and_are_0_without_a_direction(
    bad: float,
) -> None:
    """Updates without a direction are no part of it."""
    updates = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    e = updates[:4].double().numpy()
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    e -= e.mean(0)
    expected = (e @ e.T) / np.outer(np.linalg.norm(e, axis=1), np.linalg.norm(e, axis=1))
    updates[4] = bad
    found = similarities(updates @ updates.T)
    np.testing.assert_allclose(found[:4, :4].numpy(), expected, atol=1e-6)
    assert not found[4].any()


def test_sum_of_two_updates_is_in_no_group_of_copies() -> None:
    updates = torch.randn(80, 2000, generator=torch.Generator().manual_seed(3))
    updates[1] += 0.3 * updates[0]
    updates[2] = updates[0] + updates[1]
    updates[4] = updates[3] + 0.1 * updates[4]
    similar = similarities(updates @ updates.T)
    assert similar[2, :2].min() > 0.7
    assert groups_of(same_group_pairs(similar)) == [[3, 4]]


def written_out(updates: np.ndarray, step: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """For each of the two means, of the updates' directions and the step's."""
    k = len(updates)
    lengths = np.linalg.norm(updates, axis=1)
    u, g = updates / lengths[:, None], step / np.linalg.norm(step)
    found = []
    for weights in (np.full(k, 1 / k), samples * lengths / (samples * lengths).sum()):
        c = k / (k + 1) * weights @ u + g / (k + 1)
        found.append([(d - c) @ (g - c) / np.linalg.norm(d - c) / np.linalg.norm(g - c) for d in u])
    return np.minimum(*np.array(found))


def test_last_step_similarity_equals_the_formula_written_out() -> None:
    draw = np.random.default_rng(0)
    updates, step, samples = draw.normal(size=(5, 9)), draw.normal(size=9), draw.integers(1, 50, 5)
    updates[2] = 0.3 * step
    mine = torch.from_numpy(updates), torch.from_numpy(step)
    found = last_step_similarity(
        mine[0] @ mine[0].T, mine[0] @ mine[1], float(mine[1] @ mine[1]), torch.from_numpy(samples)
    ).numpy()
    np.testing.assert_allclose(found, written_out(updates, step, samples), atol=1e-12)
    assert found[2] == pytest.approx(1)
    assert found.argmax() == 2


def by_trying_all(similar: np.ndarray, gap: float) -> np.ndarray:
    """Every subset of two to k / 2 clients."""
    k = len(similar)
    found = np.zeros((k, k), dtype=bool)
    for mask in range(1, 2**k):
        members = [i for i in range(k) if mask >> i & 1]
        others = [i for i in range(k) if not mask >> i & 1]
        if not 2 <= len(members) <= k / 2:
            continue
        within = min(similar[i, j] for i in members for j in members if i != j)
        if within - max(similar[i, j] for i in members for j in others) >= gap:
            for i in members:
                for j in members:
                    found[i, j] = i != j
    return found


@pytest.mark.parametrize("seed", range(4))
def test_isolated_groups_equal_those_of_trying_all_groups(seed: int) -> None:
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(8, 30))
    for copy in range(seed % 4):  # groups of up to four
        directions[7 - copy] = directions[0] + 0.3 * generator.normal(size=30)
    similar = np.corrcoef(directions)
    for gap in (0.1, 0.3, 0.6):
        found = isolated_groups(torch.from_numpy(similar), gap).numpy()
        np.testing.assert_array_equal(found, by_trying_all(similar, gap))


def test_fewer_than_six_clients_have_no_isolated_group() -> None:
    similar = torch.full((7, 7), -0.5)
    similar[:3, :3] = 0.9
    assert groups_of(isolated_groups(similar.fill_diagonal_(1), 0.4)) == [[0, 1, 2]]
    assert not isolated_groups(similar[1:6, 1:6], 0.4).any()


class Sybil(Attack):
    """What its clients send differs by little, up to this round."""

    def __init__(self, clients: list[int], last: int = 99) -> None:
        super().__init__(clients)
        self.last = last

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        if context.round_index > self.last:
            return update
        common = torch.randn(
            len(update), generator=torch.Generator().manual_seed(context.round_index)
        )
        return (
            update.norm()
            * (common + 0.1 * torch.randn(len(update), generator=generator))
            / len(update) ** 0.5
        )


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
    assert said[0].startswith(
        "clients 1, 3 sent almost the same updates as each other, in several rounds, "
    )
    assert "round 3 (similarity 0.9" in said[0]
    assert "Look into it before you pay anything" in said[0]
    assert len(said) == 2  # when it was found, and at the end
    assert loop.participations.tolist() == [5] * 7
    assert [(each.what, each.client, each.times) for each in loop.events] == [
        ("copy", 1, 3),
        ("copy", 3, 3),
    ]
    assert loop.copies == [[1, 3]]
    assert loop.contributions["cgsv"].isfinite().all()
    silent = of_sybils()
    assert told(silent, tmp_path / "silent", "almost the same updates", 5) == silent.copies == []
    assert torch.equal(loop.state.model(), silent.state.model())


def test_reported_copies_stay_reported_in_a_resumed_run(tmp_path: Path) -> None:
    """Though the copying ends before the run is stopped."""
    loops = []
    assert_resumes(
        lambda: loops.append(of_sybils(2, **watching())) or loops[-1],
        tmp_path,
        data=seven,
        rounds=(3, 5),
    )
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
    return Cohort(
        index,
        updates,
        rows,
        (torch.zeros_like(rows[0]),) * k,
        torch.ones(k),
        num_parameters=rows.shape[1],
    )


def compared(
    rounds: list[Tensor], threshold: float | None = None, gap: float | None = None
) -> dict[int, int]:
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
    updates = torch.randn(
        3, 6, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    updates[:, 2] = updates[:, 0] + updates[:, 1]
    rounds = [each @ each.T for each in updates]
    assert not compared(rounds, threshold=0.7, gap=0.45)
    updates[:, 2] = updates[:, 0]
    assert compared([each @ each.T for each in updates], threshold=0.7) == {0: 1, 2: 1}


def of_an_echo(folder: Path, mix: float = 1.0, rounds: int = 6) -> tuple[FederatedLoop, list[str]]:
    filters = [OutlierFilter(), CopyFilter(None, gap=None)]
    metrics = {"cgsv": CosineGradientShapley()}
    loop = FederatedLoop(
        uploads=[Alignment(mix, clients=[2])], metrics=metrics, filters=filters, seed=1
    )
    return loop, told(loop, folder, "last step back", rounds)


def test_client_that_sends_back_the_servers_last_step_is_reported_alone(tmp_path: Path) -> None:
    loop, said = of_an_echo(tmp_path)
    # Of six rounds the first has no step before it, and the attacker none to send; three have to speak.
    assert said[0].startswith(
        "client 2 sent the server's own last step back, in several rounds, up to round 4 ("
    )
    assert "(similarity 1.00): still aggregated and measured. Look into it" in said[0]
    assert [(each.what, each.client, each.times) for each in loop.events] == [("echo", 2, 3)]
    run = open_run(tmp_path)
    assert loop.copies == run.copies == [[2]]
    front = text_of(write_report(tmp_path)).partition("\nAppendix\n")[0]
    assert re.search(r"\| client 2 \|.*\| sent the model's last step back \|", front)


@pytest.mark.parametrize(("mix", "rounds"), [(0.5, 6), (1.0, 3)])
def test_partial_or_two_round_copies_of_the_server_are_not_reported(
    tmp_path: Path, mix: float, rounds: int
) -> None:
    loop, said = of_an_echo(tmp_path, mix, rounds)
    assert (said, loop.copies, loop.events) == ([], [], [])
