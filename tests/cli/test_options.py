"""Options and configuration files: how several are merged, and one-line errors for a wrong one."""

from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.options import with_sections_of_flsv
from flsv.cli.parser import make_cli
from helpers.runs import QUIET

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


def read_error(capsys, *arguments):
    try:
        status = main(list(arguments))
    except SystemExit as stopped:
        status = stopped.code

    assert status == 2

    error = capsys.readouterr().err
    assert "Traceback" not in error

    return error


FIT = "fit --config quickstart"
#: Wrong command lines, and a part of the error that each has.
WRONG_COMMANDS = [
    (f"{FIT} --trainer.callbacks EarlyStoping", "Did you mean EarlyStopping?"),
    (f"{FIT} --ckpt_path runs/last.ckpt", "there is no checkpoint runs/last.ckpt."),
    (f"{FIT} --data.source digit", "Did you mean digits?"),
    (f"{FIT} --data.source my_run", "Did you mean my_runs?"),
    # The parser would read a text file for the option's value, which here is a data set's name.
    (f"{FIT} --data.source notes.txt", "notes.txt' was found"),
    ("fit --data.source lacks.Data", "lacks cannot be imported"),
    ("fit --model zoo.configured.OfOtherPackage", "write `import lightning.pytorch as pl`"),
    (f"{FIT} --model.netwrk mlp", "Did you mean --model.network or"),
    # Only what the parser accepts is suggested: an option of the class, or of a class that the default one has.
    (f"{FIT} --model.lrr 0.1", "'lrr' is not accepted.\nDid you mean --model.optimizer.lr?\n"),
    (f"{FIT} --model own.WithRate --model.lrr 0.1", "not accepted.\nDid you mean --model.lr?\n"),
    (f"{FIT} --model own.WithRate --model.optimizer.lr 0.1", "arguments: --optimizer.lr=0.1.\n"),
    (f"{FIT} --model own.WithRate --netwrk mlp", "unrecognized arguments: --netwrk mlp\n"),
    (
        f"{FIT} --model.optimizer.lrr 1",
        "SGD: Option 'lrr' is not accepted.\nDid you mean --model.opt",
    ),
    (f"{FIT} --data.optimizer.lr 3", "Did you mean --optimizer or --fed"),
    (f"{FIT} --federation.metrics+ LeaveOneOut", "Add one with --federation.metrics.NAME, as in"),
    (f"{FIT} --model.network mpl", "Unknown network 'mpl'. Did you mean mlp?"),
    (f"{FIT} --model.network_args.hiden [32]", "the network has no such option"),
    (
        f"{FIT} --model.optimizer.lr abc",
        "error: --model.optimizer.lr: expected a number, got abc.\n",
    ),
    (f"{FIT} -q --model.optimizer.lr -1", "optimizer or lr_scheduler: Invalid learning rate"),
    (
        f"{FIT} --federation.optimizer_state keep",
        "--federation.optimizer_state: expected 'reset' or 'persist', got keep.\n",
    ),
    (
        f"{FIT} --federation.aggregator FedAvgM --federation.aggregator.momentum 2",
        "error: --federation.aggregator.momentum 2.0: expected a finite number in [0, 1).\n",
    ),
    (
        f"{FIT} --federation.sampler UniformSampler --federation.sampler.fraction 7",
        "UniformSampler: Option 'fraction' is not accepted.\n",
    ),
    (f"{FIT} --federation.sampler.cohort_size 3", "a class in federation.sampler first.\n"),
    (f"{FIT} --federation.metrics ShadowShapley", "expected {name: value}, got ShadowShapley.\n"),
    (
        f"{FIT} --federation.metrics.v ShadowShapley --federation.metrics.v.coalitions parts",
        "Did you mean pairs?",
    ),
    (f"{FIT} --federation.evaluation 5", "error: --federation.evaluation: expected a section"),
    ("fit quickstart", "unrecognized arguments: quickstart"),
    ("fti --config quickstart", "Did you mean fit?"),
    ("init --flower a --nvflare b", "not allowed with argument --flower"),
    ("report lightning_logs/versoin_0", "Did you mean lightning_logs/version_0?"),
    ("report . --budget -5", "error: --budget -5.0: expected a finite number above 0."),
    ("report . --budget 10 --currency EURO", "three letters, such as EUR"),
    ("report . --by value", "--by needs a budget: add --budget"),
    ("report . --client 1 --client=2", "--client is given 2 times"),
    ("report . --client Oslo", "has no contributions.csv"),
    ("report . --rule zeros", "Did you mean zero?"),
    ("retrain . --seeds 0", "error: --seeds 0: expected a whole number of at least 1."),
]


OWN_MODULE = """
import lightning as L
class WithRate(L.LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
"""


@pytest.mark.by_turn
@pytest.mark.fast_rows("report*", "init*", "fti*", "fit --model*", "*EarlyStoping*", "*model.lrr*")
@pytest.mark.parametrize(("line", "message"), WRONG_COMMANDS)
def test_wrong_command_is_refused_with_the_nearest_word_or_what_is_expected(
    line, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("notes.txt").write_text("digits")
    Path("lacks.py").write_text("import nowhere")
    Path("own.py").write_text(OWN_MODULE)
    Path("my_runs").mkdir()
    run = Path("lightning_logs/version_0")
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")

    error = read_error(capsys, *line.split())
    assert message in error
    if message.endswith("\n"):
        assert error.endswith(message)  # without a suggestion
    assert not list(tmp_path.rglob("*.ckpt"))


def load_loop(*configs, arguments=()):
    options = [f"--config={config}" for config in configs]
    return make_cli([*options, *arguments], run=False).loop


@pytest.mark.slow
def test_metrics_of_a_later_file_are_added_or_replace_their_namesakes(tmp_path):
    later_file = tmp_path / "again.yaml"
    cssv = "{class_path: ClassSpecificShapley, init_args: {momentum: 0.5}}"
    later_file.write_text(f"federation: {{metrics: {{cssv: {cssv}, loo: LeaveOneOut}}}}")

    metrics = load_loop("digits", later_file, "afedsv").metrics

    assert sorted(metrics) == ["cssv", "loo", "ssv"]
    assert metrics["cssv"].momentum == 0.5


@pytest.mark.slow
def test_no_metrics_in_a_file_remove_those_of_earlier_files_only(tmp_path):
    without_metrics = tmp_path / "none.yaml"
    without_metrics.write_text("federation: {metrics: {}, aggregator: FedAvg}\n")
    assert load_loop("digits", without_metrics).metrics == {}

    arguments = ("--federation.metrics.loo", "LeaveOneOut")
    loop = load_loop("digits", without_metrics, "afedsv", arguments=arguments)
    assert sorted(loop.metrics) == ["loo", "ssv"]


#: A section of a file, the misspelt part, and the advice.
MISSPELT = {
    "section": ("federations: {share: all}", "federations", "Did you mean federation or"),
    "option": ("federation: {local_epoch: 2}", "local_epoch", "mean federation.local_epochs or"),
    "of another section": (
        "federation:\n  partitioner: {class_path: IIDPartitioner}",
        "partitioner",
        "Did you mean data.partitioner or",
    ),
    "class": ("federation: {aggregator: FedAvgg}", "FedAvgg", "Did you mean FedAvg or"),
    "own class": ("model: helpers.models.Plainn", "Plainn", "Did you mean Plain or"),
    "own module": ("model: helperss.models.Plain", "helperss", "No module named 'helperss'"),
    "yaml": ("federation:\n  metrics: :", "metrics: :", "mapping values are not allowed here"),
    "value": ("federation:\n  local_epochs: two", "two", "expected a number of epochs"),
    "value in a class": (
        "model:\n  class_path: ClassifierClient\n  init_args:\n    optimizer:\n"
        "      class_path: torch.optim.SGD\n      init_args:\n        lr: fast",
        "fast",
        "model.optimizer.lr: expected a number, got fast.\n",
    ),
    "share": ("data:\n  splits: {server_val: 1.5}", "server_val", "100 is 100 samples"),
    "metric": (
        "federation:\n  metrics: {v: LeaveOneOut}\n  aggregator: {class_path: ShapFedWA, init_args: {metric: w}}",
        "metric: w",
        "'v']. Add a metric with this name there, as in w: ClassSpecificShapley",
    ),
}


@pytest.mark.by_turn
@pytest.mark.fast_rows("yaml")
@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_configuration_is_refused_with_its_line_and_the_nearest_name(
    name, tmp_path, capsys
):
    text, misspelt_word, advice = MISSPELT[name]
    path = tmp_path / "mine.yaml"
    path.write_text(f"# A federation.\n{text}\n")

    error = read_error(capsys, "fit", "-q", "--config", "digits", "--config", str(path))

    text_before_word, _, _ = path.read_text().partition(misspelt_word)
    line_number = 1 + text_before_word.count("\n")
    assert f"flsv: error: {path}, line {line_number}: " in error
    assert advice in error


def test_uploads_of_several_configuration_files_are_merged():
    uploads = load_loop("digits", "scenarios/private", "topk").uploads
    assert [type(upload).__name__ for upload in uploads] == ["GaussianPrivacy", "TopK"]


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (b"federation: {seed: 1}\n# \x07\n", "this is not valid YAML: unacceptable character"),
        (bytes(range(256)), "mine.yaml: 'utf-8' codec can't decode"),
        (
            b"federation:\n  server_lr: 1\n  server_lr: 0.5\n",
            "line 3: the key 'server_lr' is in line 2",
        ),
        (b"federation: {evaluation: null}\n", "line 1: federation.evaluation: expected a section"),
    ],
)
def test_unusable_configuration_file_is_a_one_line_error(content, advice, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    configs = ["--config", "digits", "--config", str(path)]
    folder = f"--trainer.default_root_dir={tmp_path}"

    error = read_error(capsys, "fit", "-q", *configs, folder, *QUIET)

    lines = error.splitlines()
    (message,) = [line for line in lines if not line.startswith(("INFO", "Seed set"))]
    assert message.startswith("flsv: error: ")
    assert advice in message


SGD = "torch.optim.SGD, init_args: {lr: 0.5, weight_decay: 0.3}"
SLOWER_SGD = "torch.optim.SGD, init_args: {lr: 0.1}"
ADAM = "torch.optim.Adam"
MODEL = "{model: {class_path: ClassifierClient, init_args: {optimizer: {class_path: %s}}}}"


def load_config(optimizers, *options):
    """Load the configurations with these optimizers, one after the other, and further options."""
    words = [f"--config={MODEL % optimizer}" for optimizer in optimizers]
    config = make_cli([*words, *options], run=False).config.as_dict()
    del config["config"]
    return config


@pytest.mark.by_turn
@pytest.mark.fast_rows("*model.optimizer=*", "*init_args.optimizer={*")
@pytest.mark.parametrize(
    "option",
    [
        "--model.init_args.optimizer=torch.optim.Adam",
        "--model.optimizer=Adam",
        "--model.init_args.optimizer.class_path=Adam",
        "--model.init_args.optimizer={class_path: Adam}",
        "--config={model: {init_args: {optimizer: {class_path: Adam}}}}",
    ],
)
def test_optimizer_of_another_class_keeps_no_options(option):
    assert load_config([SGD], option) == load_config([ADAM])


@pytest.mark.parametrize(
    ("aggregator", "expected_server_lr"),
    [("FedAvg", 0.125), ("TrimmedMean", 1)],
    ids=["same class", "another class"],
)
def test_aggregator_keeps_options_of_the_same_class_only(aggregator, expected_server_lr, tmp_path):
    path = tmp_path / "averages.yaml"
    path.write_text("federation: {aggregator: {class_path: FedAvg, init_args: {server_lr: 0.125}}}")

    loop = load_loop("quickstart", path, arguments=[f"--federation.aggregator={aggregator}"])

    assert loop.aggregator.server_lr == expected_server_lr


def test_optimizer_of_the_same_class_in_a_later_file_keeps_other_options():
    config = load_config([SGD, SLOWER_SGD])
    optimizer = config["model"]["init_args"]["optimizer"]
    assert optimizer["init_args"]["lr"] == 0.1
    assert optimizer["init_args"]["weight_decay"] == 0.3


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--federation.metrics={loo: LeaveOneOut}",), ["cssv", "loo"]),
        (("--federation.metrics", "{}"), []),
    ],
)
def test_metrics_of_the_command_line_are_merged_as_those_of_files(words, names):
    assert sorted(load_loop("digits", arguments=words).metrics) == names


LOOP = "flsv.FederatedLoop"


@pytest.mark.parametrize(
    ("callback", "federation"),
    [
        ({"class_path": LOOP, "init_args": {"seed": 3}}, {"seed": 3}),
        ({"class_path": LOOP, "init_args": None}, {}),
        ({"class_path": LOOP}, {}),
        (LOOP, {}),
    ],
)
def test_loop_among_the_callbacks_of_a_file_is_the_section_federation(callback, federation):
    config = {"trainer": {"max_epochs": 2, "callbacks": [callback, "Timer"]}, "federation": None}

    sections = with_sections_of_flsv(config)

    assert sections["federation"] == federation
    assert sections["trainer"] == {"max_epochs": 2, "callbacks": ["Timer"]}


def test_federated_data_module_of_a_file_is_the_section_data():
    data = {"class_path": "flsv.FederatedDataModule", "init_args": {"source": "digits"}}
    assert with_sections_of_flsv({"data": data}) == {"data": {"source": "digits"}}

    own_data = {"class_path": "project.Digits"}
    assert with_sections_of_flsv({"data": own_data}) == {"data": {"source": own_data}}


def test_text_like_a_number_stays_a_text_in_a_file_with_the_loop(tmp_path):
    path = tmp_path / "project.yaml"
    path.write_text(
        f"""
trainer:
  callbacks: [{{class_path: {LOOP}}}]
  logger: {{class_path: CSVLogger, init_args: {{save_dir: {tmp_path}, name: "1e-3"}}}}
"""
    )

    cli = make_cli(["--config", str(path)], run=False)

    assert cli.trainer.logger.name == "1e-3"
