"""Pictures for the client's own eyes."""

from pathlib import Path

from matplotlib.figure import Figure
from toys import fit

from flsv.local_artifacts import keep_artifact
from flsv.local_data import LocalData
from flsv.loop import FederatedLoop
from flsv.personalization import Standalone


def test_a_fit_writes_each_clients_pictures_into_a_folder_of_its_own(tmp_path: Path) -> None:
    class Drawing(Standalone):
        def report(self, local: LocalData) -> dict[str, float]:
            keep_artifact(local, "mine", Figure)
            return {}

    fit(FederatedLoop(personalizer=Drawing(), figures_every=2), tmp_path, rounds=3)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("clients/**/*.png"))
    assert written == ["clients/0/mine.png", "clients/1/mine.png", "clients/2/mine.png"]
    # After the second round and after the last one.
    assert len(list(tmp_path.glob("clients/1/events*"))) == 2
