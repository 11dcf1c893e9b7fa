"""Every configuration that ``flsv fit`` has written is read back by every command, as the same configuration."""

import json

import lightning.pytorch.callbacks as callbacks_of_lightning
import lightning.pytorch.loggers as loggers_of_lightning
import pytest
import yaml

from flsv import FederatedDataModule
from flsv.cli import main
from flsv.cli.options import option_parser
from flsv.cli.parser import make_cli
from flsv.cli.retrain_saved_run import add_same_run
from flsv.cli.runs_with_seeds import RUN_LIST_COLUMNS, _finished_runs
from flsv.configuration.identity import Identity
from flsv.configuration.option_texts import config_settings
from flsv.results.folder import RUNS
from flsv.utilities.csv_files import save_csv
from helpers import refused
from helpers.retrained import retrained_rows
from helpers.runs import fit_by_command, write_config_of_two_rounds

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")

#: Classes from which others are derived, and LitLogger, which needs a further package.
NOT_TESTED = {
    "BaseFinetuning",
    "BasePredictionWriter",
    "Callback",
    "Checkpoint",
    "LitLogger",
    "Logger",
    "ProgressBar",
}
#: Arguments of the callbacks and loggers that need some.
ARGUMENTS = {
    "CSVLogger": {"save_dir": "runs"},
    "EarlyStopping": {"monitor": "val_loss"},
    "GradientAccumulationScheduler": {"scheduling": {0: 2, 4: 1}},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
    "OnExceptionCheckpoint": {"dirpath": "checkpoints"},
    "StochasticWeightAveraging": {"swa_lrs": [0.1, 0.01]},
    "TensorBoardLogger": {"save_dir": "runs"},
    "ThroughputMonitor": {"batch_size_fn": "builtins.len"},
    "Timer": {"duration": {"hours": 1}},
}
#: Ways of writing callbacks and loggers that a command line accepts.
SHORTHANDS = [
    ["--trainer.callbacks=LearningRateMonitor"],
    ["--trainer.callbacks=lightning.pytorch.callbacks.LearningRateMonitor"],
    ["--trainer.callbacks={class_path: LearningRateMonitor}"],
    ["--trainer.callbacks=[{class_path: LearningRateMonitor}]"],
    ["--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks+=RichModelSummary"],
    ["--trainer.callbacks=RichModelSummary", "--trainer.callbacks.max_depth=2"],
    ["--trainer.callbacks+=RichModelSummary", "--trainer.callbacks.max_depth=2"],
    ["--trainer.callbacks=cli.own_callbacks.WithoutArguments"],
    ["--trainer.callbacks=[{class_path: cli.own_callbacks.WithoutArguments}]"],
    ["--trainer.callbacks=[]"],
    ["--trainer.callbacks=null"],
    ["--trainer.logger=false"],
    ["--trainer.logger=true"],
    ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=runs"],
    ["--trainer.logger=[{class_path: CSVLogger, init_args: {save_dir: runs}}]"],
]


def options_of(section, names):
    """The options that name each class alone, with the arguments that it needs."""
    rows = []
    for name in sorted(set(names) - NOT_TESTED):
        value = {"class_path": name, "init_args": ARGUMENTS.get(name, {})}
        option = f"--trainer.{section}={json.dumps(value)}"
        rows.append(pytest.param([option], id=name))
    return rows


ROWS = [
    *options_of("callbacks", callbacks_of_lightning.__all__),
    *options_of("logger", loggers_of_lightning.__all__),
    *[pytest.param(options, id=" ".join(options)) for options in SHORTHANDS],
]


@pytest.fixture(scope="module")
def fit_parser():
    return make_cli(["--config", "quickstart"], run=False, quiet=True).parser


@pytest.fixture(scope="module")
def data_parser():
    """The parser of ``flsv data``, which ignores the other sections, as that of ``flsv value`` does."""
    return option_parser("flsv data", None, {"data": FederatedDataModule})


def write_config_option(config, path):
    """Write a configuration, and return the option that names its file."""
    path.write_text(yaml.safe_dump(config))
    return ["--config", str(path)]


def config_of_arguments(parser, arguments):
    """Return the configuration that ``flsv fit`` would write for these arguments."""
    config = parser.parse_args(arguments)
    return yaml.safe_load(parser.dump(config, skip_none=False))


@pytest.mark.by_turn
@pytest.mark.fast_rows("DeviceStatsMonitor", "CSVLogger", "*WithoutArguments")
@pytest.mark.parametrize("options", ROWS)
def test_written_configuration_is_read_as_the_same_by_every_command(
    options, fit_parser, data_parser, tmp_path
):
    config = config_of_arguments(fit_parser, ["--config", "quickstart", *options])
    assert "Unable to serialize" not in str(config)

    config_option = write_config_option(config, tmp_path / "config.yaml")
    config_read = config_of_arguments(fit_parser, config_option)
    data_parser.parse_args(config_option)

    identity = Identity(config_settings(config), {})
    assert config_read["trainer"] == config["trainer"]
    assert Identity(config_settings(config_read), {}).other_settings(identity) == []

    add_same_run(config_read, tmp_path, seed=0, rounds=1, changes=["some"], say=str)
    config_option = write_config_option(config_read, tmp_path / "retrained.yaml")
    config_to_retrain = config_of_arguments(fit_parser, config_option)
    *_, last_callback = config_to_retrain["trainer"]["callbacks"]
    assert last_callback["class_path"] == "flsv.cli.same_run.SameRun"


def test_empty_arguments_are_no_changed_setting():
    without_arguments = Identity({"trainer.callbacks.0.class_path": "'Own'"}, {})
    settings = {**without_arguments.settings, "trainer.callbacks.0.init_args": "{}"}
    with_empty_arguments = Identity(settings, {})

    assert with_empty_arguments.other_settings(without_arguments) == []
    assert without_arguments.other_settings(with_empty_arguments) == []


@pytest.mark.slow
def test_configuration_of_a_resumed_run_is_read_by_commands_that_resume_none(fit_parser, tmp_path):
    config = config_of_arguments(fit_parser, ["--config", "quickstart"])
    resumed_config = {**config, "ckpt_path": "last", "weights_only": True}

    config_option = write_config_option(resumed_config, tmp_path / "config.yaml")
    assert config_of_arguments(fit_parser, config_option) == config


@pytest.mark.slow
@pytest.mark.parametrize(
    "callbacks",
    ["[{class_path: DeviceStatsMonitor}]", "cli.own_callbacks.WritesBesideItsLog"],
    ids=["needs a logger", "writes beside its log"],
)
def test_run_with_callbacks_that_need_its_logger_is_retrained(callbacks, tmp_path, capsys):
    config = write_config_of_two_rounds(
        tmp_path / "federation.yaml", {"cssv": "ClassSpecificShapley"}
    )
    run = fit_by_command(tmp_path, config, f"--trainer.callbacks={callbacks}")

    assert main(["retrain", str(run), "--seeds", "1", "--trainings", "singles"]) == 0

    assert "not compared" not in capsys.readouterr().out
    assert len(retrained_rows(run)) == 3


def test_failed_runs_do_not_fix_the_settings_of_the_next(tmp_path):
    assert _finished_runs(tmp_path, {"rounds": "1"}) == {}
    (tmp_path / "seed_0").mkdir()

    assert _finished_runs(tmp_path, {"rounds": "2"}) == {}


@pytest.mark.parametrize("path", ["seed_0/checkpoints/last.ckpt", "seed_0/run_1/last-v1.ckpt"])
def test_stopped_runs_with_a_checkpoint_fix_the_settings_of_the_next(path, tmp_path):
    _finished_runs(tmp_path, {"rounds": "1"})
    checkpoint = tmp_path / path
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()

    with refused("runs with other settings: rounds is 2 and was 1"):
        _finished_runs(tmp_path, {"rounds": "2"})


def test_finished_runs_fix_the_settings_of_the_next(tmp_path):
    _finished_runs(tmp_path, {"rounds": "1"})
    save_csv(tmp_path / RUNS, [RUN_LIST_COLUMNS, ("seed_0", "seed_0")])

    with refused("runs with other settings: rounds is 2 and was 1"):
        _finished_runs(tmp_path, {"rounds": "2"})
