"""An installed package's parts: found by their entry points, and named in YAML by their class names alone."""

import gc
import re
import sys

import pytest

from flsv.cli import main
from flsv.cli.config_errors import OptionError, explain
from flsv.cli.parser import make_cli
from flsv.metrics import ContributionMetric
from flsv.results import read_run
from flsv.utilities import plugins
from helpers import warns

CODE = """
import torch

from flsv.training.algorithms import ClientAlgorithm
from flsv.metrics.base import ContributionMetric, latest


class UpdateNorm(ContributionMetric):
    per_class = False

    def init_states(self, num_clients, num_classes):
        self.add_state("norms", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def update(self, client_ids, client_updates):
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)

    def compute(self):
        return self.norms


class Still(ClientAlgorithm):
    def gradients(self, context, parameters, gradients):
        for gradient in gradients:
            gradient.zero_()


class NoMetric:
    pass
"""
ENTRIES = """
[flsv.metrics]
UpdateNorm = flsv_mything:UpdateNorm
NoMetric = flsv_mything:NoMetric
Gone = flsv_mything_gone:Gone
[flsv.client_algorithms]
Still = flsv_mything:Still
"""
CONFIG = """
seed_everything: 0
data:
  source: digits
  splits: {max_samples: 100}
  partitioner: {class_path: IIDPartitioner, init_args: {num_clients: 3}}
federation:
  client_algorithm: Still
  metrics: {norm: UpdateNorm}
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false}
"""


def install(site, module, entries):
    metadata_folder = site / f"{module}-1.0.dist-info"
    metadata_folder.mkdir(parents=True)
    (metadata_folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n"
    )
    (metadata_folder / "entry_points.txt").write_text(entries)
    (site / f"{module}.py").write_text(CODE)


@pytest.fixture
def installed_package(tmp_path, monkeypatch):
    """As its installation leaves it."""
    install(tmp_path / "site", "flsv_mything", ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "argv", ["flsv"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    plugins.installed.cache_clear()
    yield
    plugins.installed.cache_clear()

    for module in ("flsv_mything", "flsv_another"):
        sys.modules.pop(module, None)

    gc.collect()  # a class that is gone is no subclass any more


@pytest.mark.slow
def test_plugin_is_found_by_its_class_name_in_a_file(installed_package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(CONFIG)
    with warns("flsv-mything provides") as warned:
        assert main(["fit", "--config", "mine.yaml"]) == 0

    messages = [str(warning.message) for warning in warned]
    first_message, second_message = [
        message for message in messages if "flsv-mything provides" in message
    ]

    assert "NoMetric" in first_message
    assert "expected a subclass of" in first_message

    excluded = "flsv_mything_gone:Gone as one of flsv.metrics, but it cannot be loaded"
    assert excluded in second_message
    assert plugins.installed("flsv.metrics", ContributionMetric) == (
        sys.modules["flsv_mything"].UpdateNorm,
    )

    (run,) = [path.parent for path in tmp_path.rglob("contributions.csv")]
    values = read_run(run).query("metric == 'norm'")["value"]

    assert values.dropna().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_a_short_name_of_two_packages_is_refused_with_both_class_paths(installed_package, tmp_path):
    install(
        tmp_path / "site", "flsv_another", "[flsv.metrics]\nUpdateNorm = flsv_another:UpdateNorm\n"
    )
    with warns("cannot be loaded"), pytest.raises(OptionError) as refused:
        make_cli(["--federation.metrics.norm=UpdateNorm"], run=False)

    message = explain(refused.value, files=[])
    class_paths = set(re.findall(r"[\w.]+\w", message))

    assert class_paths >= {"flsv_mything.UpdateNorm", "flsv_another.UpdateNorm"}
    assert "UpdateNorm" in message

    cli = make_cli(["--federation.metrics.norm=flsv_another.UpdateNorm"], run=False)
    assert type(cli.config_init.federation.metrics["norm"]).__module__ == "flsv_another"
