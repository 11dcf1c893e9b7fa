"""What is wrong with a command line or a configuration file is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flsv import ConfigurationError, FederatedLoop
from flsv.cli import main
from flsv.cli.options import check_keys, one_line, suggestion
from flsv.cli.parser import FederatedCLI, make_cli

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")


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
    ("wrong", "line", "near"),
    [
        (["--federation.sever_lr", "1"], "--federation.sever_lr 1", "--federation.server_lr"),
        (["--data.sauce", "digits"], "--data.sauce digits", "--data.source"),
        (["--federaton.server_lr", "1"], "--federaton.server_lr", "--federation.server_lr"),
        (["--data.partitioner.alfa", "3"], "DirichletPartitioner': Option 'alfa' is not accepted", "alpha"),
    ],
)
def test_a_wrong_option(capsys: pytest.CaptureFixture[str], wrong: list[str], line: str, near: str) -> None:
    error = said(capsys, "fit", "--config", QUICKSTART, *wrong)
    assert line in error
    assert error.endswith(f"Did you mean {near}?")


@pytest.mark.parametrize(
    ("text", "line", "near"),
    [
        ("federation: {sever_lr: 1}", "'federation.sever_lr'", "--federation.server_lr"),
        (
            "federation: {aggregator: {class_path: ShapFedWA, init_args: {metrc: x}}}",
            "'metrc' is not accepted",
            "metric",
        ),
    ],
)
def test_a_wrong_key_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str, near: str
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    error = said(capsys, "fit", "--config", QUICKSTART, "--config", str(tmp_path / "wrong.yaml"))
    assert line in error
    assert error.endswith(f"Did you mean {near}?")


def test_a_wrong_command_and_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "fitt").endswith("Did you mean fit?")
    assert said(capsys, "value", "--config", QUICKSTART, "--suport", "3").startswith("flsv: error: unrecognized")
    assert said(capsys, "compare", "--config", QUICKSTART, "--data.sauce", "x").endswith("mean --data.source?")


def test_a_value_of_another_type(capsys: pytest.CaptureFixture[str]) -> None:
    error = said(capsys, "fit", "--config", QUICKSTART, "--trainer.max_epochs", "many")
    assert error == """flsv: error: "trainer.max_epochs": Expected a <class 'int'> Given value: many."""


@pytest.mark.parametrize(
    "wrong",
    [
        ["--federation.server_lr", ".nan"],
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
        check_keys(path)
    file = tmp_path / "fine.yaml"
    for text in ("a: {b: 1}\nc: {b: 2}\n", "- {a: 1}\n- {a: 2}\n", "", "a: [", "3"):
        file.write_text(text)
        check_keys(file)
    file.write_text("a:\n- {b: 1, b: 2}\n")
    with pytest.raises(ConfigurationError, match=r"line 2: the key 'b' is in line 2 already"):
        check_keys(file)


def federation(*configs: str | Path, arguments: tuple[str, ...] = ()) -> FederatedLoop:
    options = [word for config in configs for word in ("--config", str(config))]
    cli = make_cli([*options, *arguments], run=False)
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedLoop))


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_metrics_of_several_files_come_together(tmp_path: Path) -> None:
    loop = federation(QUICKSTART, CONFIGS / "afedsv.yaml")
    assert sorted(loop.metrics) == ["cssv", "ssv"]
    assert repr(loop.aggregator).startswith("ShapleyWeighted(metric='ssv'")
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


def test_lines_and_suggestions() -> None:
    union = "Parser key \"a.b\":\n  Does not validate\n  Errors:\n    - Bad.\n    - Expected a <class 'NoneType'>\n"
    assert one_line(union) == '"a.b": Does not validate Bad.'
    assert suggestion("something else", ["a"]) is None
    assert suggestion("unrecognized arguments: --zzz 1", ["data.source"]) is None
    assert suggestion("Problem with class_path 'no.such.Class': Option 'x' is not accepted", ["a"]) is None


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
