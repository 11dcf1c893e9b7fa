"""Pictures for the client's own eyes."""

from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from toys import fit

from flsv import Reporting
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.participants import LocalData
from flsv.participants.artifacts import keep_artifact, write_artifacts
from flsv.personalization import Standalone
from flsv.valuation import clients_of


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
