"""pFedSV's tables at the size of a test, and their report on made-up results."""

from __future__ import annotations

from dataclasses import replace

import pfedsv_communication
import pytest
import torch
from personalization.judged import Judged
from pfedsv_cells import ORDER, WEIGHTS, judged, measured
from pfedsv_informed import one_by_one
from run_table import cells
from table_runs import Cell, built, federated_loop

from flsv.participants.local_data import at
from flsv.personalization.base import OWN_MODEL

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


SMALL = {
    "data.source": "digits",
    "data.splits.max_samples": None,
    "model.init_args.network": "softmax",
    "trainer.max_epochs": 2,
}


METHODS = [name for name in ORDER if name != "FedAvg+FT"]


def of(row: str, column: str) -> list[Cell]:
    return [cell for cell in cells("pfedsv", False, [0]) if cell.column == column and cell.row == row]


def small(row: str, partition: str = "pathological", clients: int = 10) -> Cell:
    column = f"{partition}, MNIST" + (f", {clients} clients" if clients != 10 else "")
    (cell,) = of(row, column)
    more = {"data.partitioner.init_args.min_samples": 20} if partition == "Dirichlet" else {}
    return replace(cell, overrides={**cell.overrides, **SMALL, **more})


# ---- cells


def test_all_make_the_same_number_of_gradient_steps() -> None:
    """A batch of pFedMe's has five passes, so it makes a fifth of the local epochs."""
    steps = {row: measured(small(row), "data")["steps"] for row in ("Separate", "FedAvg", "pFedMe", "FedAMP")}
    assert len(set(steps.values())) == 1


def test_pfedsv_and_its_judgment() -> None:
    found = measured(small("pFedSV"), "data")
    assert len(found["received"]) == len(found["trained"]) == len(found["found"]) == 10
    assert 0 <= found["auroc"] <= 1
    assert 0 <= found["distance_auroc"] <= 1
    assert torch.tensor(found["relevance"]).shape == torch.tensor(found["overlap"]).shape == (10, 10)
    assert len(found["downloads"]) == 2
    assert all(2 <= count <= 7 for count in found["downloads"])


def test_algorithms_are_those_of_their_files() -> None:
    loops = {}
    for row in METHODS:
        with built(small(row, "Dirichlet"), "data") as cli:
            loops[row] = federated_loop(cli.trainer)
            assert cli.config.data.splits.client_test == 0.6
    assert loops["FedProx"].client_algorithm.mu == 0.01
    assert loops["FedAMP"].personalizer.self_weight == 0.5
    assert loops["pFedMe"].local_epochs == 1
    assert loops["FedAvg"].local_epochs == 5
    assert [loops[row].personalizer.safeguard for row in ("pFedSV", "pFedSV, safeguarded")] == [False, True]
    assert loops["pFedSV, shared extractor"].personalizer.mode == "extractor"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_figure_4_downloads_who_is_relevant(weights: str) -> None:
    (cell,) = of(weights, "figure 4, MNIST")
    found = measured(replace(cell, overrides={**cell.overrides, **SMALL}), "data")
    looked_at = ~torch.tensor(found["relevance"]).isnan().fill_diagonal_(True)
    assert torch.equal(looked_at, (torch.tensor(found["overlap"]) > 0).fill_diagonal_(False))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        # By distance its own model counts as at the mean of the others' distances, 2: 1/2, 1, 1/3.
        ("by distance", [3 / 11, 6 / 11, 2 / 11]),
        ("equally", [1 / 3, 1 / 3, 1 / 3]),
        # By loss: it started at a loss of 4, has come to 2 in a step of 1, and the others' losses are 0 and 8.
        ("by loss", [2 / (2 + 4 / 2**0.5), 4 / 2**0.5 / (2 + 4 / 2**0.5), 0]),
    ],
)
def test_one_by_one(weights: str, expected: list[float]) -> None:
    """Two others, at distances 1 and 3 of the parameters; the last entry is a buffer."""
    start, own = torch.tensor([0.0, -1, 0, 0]), torch.zeros(4)
    others = [torch.tensor([1.0, 0, 0, 9]), torch.tensor([0.0, 0, 3, 9])]
    losses = {tuple(v.tolist()): loss for v, loss in zip([start, own, *others], (4.0, 2.0, 0.0, 8.0))}
    client = Judged(0, lambda vector: -losses[tuple(vector.tolist())])
    client.data.visit(start, own)
    with at(client.data):
        found = one_by_one(client.data, others, None, weights=weights, num_parameters=3, generator=torch.Generator())
        torch.testing.assert_close(found.float(), torch.tensor(expected))
        mixed = torch.tensor([expected[1], 0, 3 * expected[2], 9 * (expected[1] + expected[2])])
        torch.testing.assert_close(client.data.state[OWN_MODEL], mixed)


# ---- what is measured


def test_judged() -> None:
    """Client 0 has looked at everybody after round 2, client 1 at its two after round 1, client 2 never at one."""
    ring = torch.eye(6) + torch.eye(6).roll(1, 1)
    truth = (ring @ ring.T > 0).fill_diagonal_(False)
    scores = torch.full((3, 6, 6), float("nan"))
    scores[1:, 0] = truth[0].float() - 0.5
    scores[:, 1, [0, 2]] = 0.5
    scores[:, 2, 1] = -0.5
    found = judged(scores, truth)
    assert found["found"] == [2, 1, None, None, None, None]
    assert found["bound"] == [2] * 6
    # Relevant: .5 .5 .5 .5 -.5; others: -.5 three times. 12 wins and 3 ties of 15.
    assert found["auroc"] == pytest.approx(13.5 / 15)
    assert found["above"] == [pytest.approx(100 * 4 / 12), 0.0]


# ---- the report


RING = torch.eye(10) + torch.eye(10).roll(1, 1)


def test_communication() -> None:
    """LeNet-5: 20 models up; down 2 x 5 + 18 x 2 = 46, of which, with a shared extractor, 20 extractors."""
    text = pfedsv_communication.report(torch.cat([torch.full((2, 3), 5), torch.full((18, 3), 2)]))
    row = next(line for line in text.splitlines() if line.startswith("| LeNet-5 |"))
    size, head = 44426, 84 * 10 + 10
    both, dynamic, fixed, fedavg = 20 * size + 20 * (size - head) + 46 * head, 66 * size, 120 * size, 40 * size
    expected = [f"{number / 1e6:.2f}" for number in (both, dynamic, fixed, fixed, fedavg, fedavg)]
    assert [cell.strip() for cell in row.split("|")][5:11] == expected
