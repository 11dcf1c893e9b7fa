"""Natural federations, from configuration files to contributions."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from flsv._lightning.patches import find_loop
from flsv.cli.parser import make_cli

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs" / "natural"
ROOT = os.environ.get("FLSV_DATA_ROOT")
QUICK = {
    "trainer.max_epochs": 2,
    "trainer.logger": "false",
    "trainer.enable_checkpointing": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "federation.reporting.table": "false",
    "federation.reporting.figures": 0,
}
#: A cohort of 3 is 8 coalitions, and a small recurrent layer is enough to see that it works.
SMALLER = {
    "schools": {"federation.sampler.init_args.cohort_size": 3},
    "districts": {"federation.sampler.init_args.cohort_size": 3},
    "tales": {
        "model.init_args.hidden": 8,
        "trainer.limit_train_batches": 5,
        "data.splits.server_val": 0.02,
    },
}
#: How many clients the files have.
CLIENTS = {"clinics": 4, "districts": 60, "reuters": 5, "schools": 65, "tales": 5}


@pytest.mark.by_turn
@pytest.mark.parametrize("name", CLIENTS)
def test_a_natural_federation_learns_and_values_its_clients(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it
    config = CONFIGS / f"{name}.yaml"
    source = yaml.safe_load(config.read_text())["data"]["source"]
    is_table = isinstance(source, str)
    path = source if is_table else source["init_args"]["path"]

    if ROOT is None or not Path(ROOT, path).exists():
        pytest.skip(f"FLSV_DATA_ROOT is not set, or has no {path}")

    smaller = SMALLER.get(name, {})
    options = {**QUICK, **smaller}
    arguments = ["--config", str(config)]
    arguments += [f"--{key}={value}" for key, value in options.items()]
    cli = make_cli(arguments, run=False)

    cli.trainer.fit(cli.model, cli.datamodule)
    loop = find_loop(cli.trainer.callbacks)
    values = loop.metrics["shapley"].compute()
    is_seen = ~values.isnan()

    assert values.shape == (CLIENTS[name],)
    smallest_cohort = 3
    assert is_seen.sum() >= smallest_cohort
    gain_of_the_model = values[is_seen].sum()
    assert gain_of_the_model > 1e-4
    assert cli.datamodule.client_names == loop.metrics["shapley"].client_names
