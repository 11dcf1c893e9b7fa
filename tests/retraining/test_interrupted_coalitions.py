"""Ctrl-C while coalitions are trained: the run ends, what is trained is kept, and a line says how to do the rest."""

from pathlib import Path
from typing import Any

import pytest

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from flsv.retraining.utility_store import UtilityStore
from helpers.fits import trainer_for
from helpers.hidden_state import SEED, Base, make_data


@pytest.mark.parametrize("writes_files", [True, False])
def test_interrupted_trainings_are_kept_and_the_rest_is_named(
    writes_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = UtilityStore.add

    def add_and_interrupt(*args: Any) -> None:
        add(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(UtilityStore, "add", add_and_interrupt)
    loop = FederatedLoop(
        metrics={"shadow": ShadowShapley(coalitions="singles")},
        seed=SEED,
        reporting=Reporting(table=False, files=writes_files),
    )
    if writes_files:
        message = "1 of 3 coalitions are trained, and kept in .*flsv retrain trains the rest"
    else:
        message = "1 of 3 coalitions are trained, and none is kept"

    with pytest.warns(UserWarning, match=message):
        trainer_for(loop, tmp_path, 2).fit(Base(), make_data())

    assert loop.round_index == 2
    assert loop.contributions["shadow"].isnan().all()

    stored = list(tmp_path.rglob("coalitions.csv"))
    assert len(stored) == writes_files
