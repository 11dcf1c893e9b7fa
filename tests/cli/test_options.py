"""What is wrong with a command line or a configuration file is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flsv import ConfigurationError, FederatedLoop
from flsv.cli import main
from flsv.cli.configs import check_file
from flsv.cli.parser import FederatedCLI, make_cli

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "digits.yaml")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that the command line ends with."""
    try:
        code = main(list(arguments))
    except SystemExit as stopped:
        code = stopped.code  # type: ignore[assignment]
    assert code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if not line.startswith(("INFO", "Seed set"))]
    assert len(lines) == 1, lines
    assert lines[0].startswith("flsv: error: ")
    return lines[0]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--trainer.limit_train_batches", "0"],
        ["--trainer.limit_train_batches", "0.0"],
        ["--federation.sampler", "BernoulliSampler", "--federation.sampler.expected_cohort", "1e-9"],
        ["--federation.metrics.x", "FedSV", "--federation.metrics.x.estimator_args", "{bugdet: 3}"],
    ],
)
def test_numbers_and_arguments_that_cannot_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    wrong = ["flsv.metrics.PartialFederatedShapley" if word == "FedSV" else word for word in wrong]
    quiet = ["--trainer.enable_model_summary", "false", "--trainer.enable_progress_bar", "false"]
    said(capsys, "fit", "--config", QUICKSTART, "--trainer.default_root_dir", str(tmp_path), *quiet, *wrong)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_key_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("trainer: {max_epochs: 1}\nfederation:\n  server_lr: 1\n  local_epochs: 2\n  server_lr: 0.5\n")
    for command in ("fit", "value"):
        error = said(capsys, command, "--config", QUICKSTART, "--config", str(file))
        assert f"{file}, line 5: the key 'server_lr' is in line 3 already" in error


def test_keys_that_are_not_twice(tmp_path: Path) -> None:
    for path in CONFIGS.rglob("*.yaml"):
        check_file(path)
    file = tmp_path / "fine.yaml"
    for text in ("a: {b: 1}\nc: {b: 2}\n", "b: &x {a: 1}\nc: [*x, *x]\n", "a: ["):
        file.write_text(text)
        check_file(file)
    file.write_text("a:\n- {b: 1, b: 2}\n")
    with pytest.raises(ConfigurationError, match=r"line 2: the key 'b' is in line 2 already"):
        check_file(file)


def federation(*configs: str | Path, arguments: tuple[str, ...] = ()) -> FederatedLoop:
    options = [word for config in configs for word in ("--config", str(config))]
    cli = make_cli([*options, *arguments], run=False)
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedLoop))


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_metrics_of_several_files_come_together(tmp_path: Path) -> None:
    loop = federation(QUICKSTART, CONFIGS / "afedsv.yaml")
    assert sorted(loop.metrics) == ["cssv", "ssv"]
    assert repr(loop.aggregator).startswith("ShapleyWeighted(")
    again, none = tmp_path / "again.yaml", tmp_path / "none.yaml"
    again.write_text(
        "federation: {metrics: {cssv: {class_path: flsv.metrics.ClassSpecificShapley, init_args: {momentum: 0.5}}}}\n"
    )
    none.write_text("federation: {metrics: {}, aggregator: FedAvg}\n")
    assert federation(QUICKSTART, again).metrics["cssv"].momentum == 0.5
    assert federation(QUICKSTART, none).metrics == {}
    assert sorted(federation(QUICKSTART, none, CONFIGS / "afedsv.yaml").metrics) == ["ssv"]
    more = ("--federation.metrics.loo", "flsv.metrics.LeaveOneOut")
    assert sorted(federation(QUICKSTART, CONFIGS / "afedsv.yaml", arguments=more).metrics) == ["cssv", "loo", "ssv"]


def test_only_the_subcommand_that_is_asked_for_has_a_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside the one that chooses among them; making all four took half of the time before a fit. With options before
    the subcommand it is not known which it will be."""
    made: list[int] = []
    make = FederatedCLI.init_parser
    monkeypatch.setattr(FederatedCLI, "init_parser", lambda self, **options: made.append(1) or make(self, **options))
    for arguments, parsers in ((["fit", "--help"], 1 + 1), (["--help"], 1 + 4)):
        made.clear()
        with pytest.raises(SystemExit):
            make_cli(arguments)
        assert len(made) == parsers


NOT_MEANT = {
    "binary": (bytes(range(256)), "binary.yaml is no YAML file: it is not text in UTF-8"),
    "utf16": ("trainer: {}".encode("utf-16"), "utf16.yaml is no YAML file"),
    "empty": (b"", "empty.yaml has no sections"),
    "list": (b"- 1\n", "list.yaml has no sections: expected trainer:"),
    "word": (b"hello\n", "word.yaml has no sections"),
    "trainer": (
        b"seed_everything: 1\ntrainer: null\n",
        "trainer.yaml: trainer has nothing. Give its options, or",
    ),
    "federation": (b"federation:\n", "federation.yaml: federation has nothing"),
    "data": (b"data: digits\n", "data.yaml: data has no options by name"),
    "model": (b"model: null\n", "model has nothing"),
    "number": (b"trainer: 3\n", "trainer has no options by name"),
    "sequence": (b"federation: [1]\n", "federation has no options by name"),
    "seed": (b"seed_everything: -5\n", "seed_everything: -5 is out of range"),
    "accelerator": (b"trainer: {accelerator: gpuu}\n", "invalid accelerator name"),
    "devices": (b"trainer: {accelerator: cpu, devices: -7}\n", "should be an int > 0"),
    "hidden": (
        b"model: {class_path: flsv.ClassifierClient, init_args: {network: mlp, network_args: {hidden: [0]}}}\n",
        "MLP(hidden=[0]): expected a list (each: a whole number of at least 1)",
    ),
    "hidden_word": (
        b"model: {class_path: flsv.ClassifierClient, init_args: {network: mlp, network_args: {hidden: abc}}}\n",
        "MLP(hidden='abc'): expected a list",
    ),
}


@pytest.mark.parametrize("name", NOT_MEANT)
def test_a_file_that_cannot_be_meant(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"{name}.yaml"
    file.write_bytes(NOT_MEANT[name][0])
    options = ("--trainer.default_root_dir", str(tmp_path), "--trainer.max_epochs", "1")
    assert NOT_MEANT[name][1] in said(capsys, "fit", "-q", "--config", "digits", "--config", str(file), *options)


@pytest.mark.parametrize("name", ["federation.evaluation", "federation.reporting", "data.splits", "data.loader"])
def test_a_group_of_options_without_any_is_told_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    section, option = name.split(".")
    assert main(["fit", "--config", "digits", "--config", f"{section}: {{{option}: null}}"]) == 2
    assert f"{name}: null: expected its options" in capsys.readouterr().err
