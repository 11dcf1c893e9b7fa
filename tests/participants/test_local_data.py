"""A client's data, pictures and what it keeps: read in a question to it, and nowhere else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from resuming import assert_resumes
from toys import fit, toy_data

from flsv import Reporting
from flsv.data import ClosedSetLabelNoise
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import ContributionMetric
from flsv.participants import LocalData
from flsv.participants.artifacts import keep_artifact, write_artifacts
from flsv.personalization import Personalizer, Standalone
from flsv.round import Round
from flsv.valuation import clients_of


class Asking(Personalizer):
    """Asks every client something after each round."""

    def __init__(self, question: Any) -> None:
        self.question, self.answers = question, list[list[Any]]()

    def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
        assert round.clients is not None
        self.answers.append([client.ask(self.question, round) for client in round.clients])
        return {}


def ask(question: Any, folder: Path, data: Any = None, **kwargs: Any) -> tuple[list[Any], FederatedLoop]:
    asking = Asking(question)
    loop = FederatedLoop(personalizer=asking, **kwargs)
    fit(loop, folder, data=data, rounds=1)
    return asking.answers[0], loop


def test_the_samples_are_those_that_the_client_trains_on(tmp_path: Path) -> None:
    data = toy_data(corruptions=[ClosedSetLabelNoise(clients=[1])])
    answers, _ = ask(lambda local, round: local.samples(), tmp_path, data)
    for client, (x, y) in enumerate(answers):
        indices = data.client_indices(client)
        clean = data.source[0].tensors  # type: ignore[index]
        torch.testing.assert_close(x, clean[0][indices])
        assert torch.equal(y, (clean[1][indices] + (client == 1)) % 3)


def test_models_are_evaluated_on_each_clients_own_samples(tmp_path: Path) -> None:
    def question(local: LocalData, round: Round) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y = local.samples("test")
        accuracy = [(local.module(vector)(x).argmax(-1) == y).double().mean() for vector in round.client_vectors]
        return local.evaluate(round.client_vectors, "test").value("accuracy"), torch.stack(accuracy), len(y)

    answers, _ = ask(question, tmp_path)
    assert len({size for *_, size in answers}) == 3  # three sets, of different sizes
    for given, expected, _ in answers:
        torch.testing.assert_close(given, expected)


def test_nobody_reads_the_data_outside_of_a_question(tmp_path: Path) -> None:
    leaked, loop = ask(lambda local, round: local, tmp_path)
    for read in (
        lambda local: local.samples(),
        lambda local: local.class_counts,
        lambda local: local.model,
        lambda local: local.evaluate(torch.zeros(1, 9)),
        lambda local: local.module(torch.zeros(9)),
    ):
        with pytest.raises(PermissionError, match="client 1 .* outside"):
            read(leaked[1])

    def curious(local: LocalData, round: Round) -> None:
        leaked[0].samples()  # another client's

    with pytest.raises(PermissionError, match="client 0"):
        ask(curious, tmp_path)

    def meanwhile(local: LocalData, round: Round) -> None:
        with ThreadPoolExecutor(1) as somebody_elses, pytest.raises(PermissionError):
            somebody_elses.submit(local.samples).result()

    ask(meanwhile, tmp_path)


# ---- what a client keeps is its own


def count(local: LocalData) -> int:
    """How often this client has been asked."""
    local.state["asked"] = local.state.get("asked", torch.tensor(0)) + 1
    return int(local.state["asked"])


class Asked(ContributionMetric):
    """What every client's own counter reads, ``[n]``."""

    per_class = False

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("counts", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids: torch.Tensor, clients: Any) -> None:
        self.counts[client_ids] = torch.tensor([float(client.ask(count)) for client in clients])

    def compute(self) -> torch.Tensor:
        return self.counts


def test_a_counter_reads_the_same_after_a_resume(tmp_path: Path) -> None:
    loop = assert_resumes(lambda: FederatedLoop(metrics={"asked": Asked()}, seed=0), tmp_path)
    assert loop.contributions["asked"].tolist() == [4.0, 4.0, 4.0]
    first, second = clients_of([(torch.zeros(2, 1), torch.tensor([0, 1]))] * 2)
    first.ask(lambda local: local.memory.update(a=1))
    assert (first.ask(lambda local: dict(local.memory)), second.ask(lambda local: dict(local.memory))) == ({"a": 1}, {})


# ---- Pictures for the client's own eyes


def test_a_fit_writes_each_clients_pictures_into_a_folder_of_its_own(tmp_path: Path) -> None:
    class Drawing(Standalone):
        reports = ("drawn",)

        def report(self, local: LocalData) -> dict[str, float]:
            keep_artifact(local, "mine", Figure)
            return {"drawn": 1.0}

    fit(FederatedLoop(personalizer=Drawing(), reporting=Reporting(figures=2)), tmp_path, rounds=3)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("clients/**/*.png"))
    assert written == ["clients/0/mine.png", "clients/1/mine.png", "clients/2/mine.png"]
    # After the second round and after the last one.
    assert len(list(tmp_path.glob("clients/1/pictures/events*"))) == 2


def test_no_picture_leaves_the_clients_folder(tmp_path: Path) -> None:
    (client,) = clients_of([(torch.zeros(2, 1), torch.tensor([0, 1]))])
    folder = tmp_path / "run" / "clients" / "0"
    with pytest.raises(ConfigurationError, match="picture .*: expected a plain name"):
        client.ask(keep_artifact, "a/b", Figure)
    client.ask(lambda local: local.memory.update(artifacts={"../../x": Figure}))
    with pytest.raises(ConfigurationError, match="expected a plain name"):
        client.ask(write_artifacts, folder)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
