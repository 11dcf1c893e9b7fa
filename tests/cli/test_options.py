"""What is wrong with a command line or a configuration file is said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flsv import FederatedLoop
from flsv.cli import main
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


@pytest.mark.parametrize("configs", [("fedadam", "topk"), ("topk", "fedadam"), ("scenarios/private", "topk")])
def test_uploads_come_together_with_aggregators_and_other_uploads(configs: tuple[str, ...]) -> None:
    loop = federation("digits", *configs)
    uploads = [type(upload).__name__ for upload in loop.uploads]
    assert uploads == (["TopK"] if "fedadam" in configs else ["GaussianPrivacy", "TopK"])
    assert (type(loop.aggregator).__name__ == "FedAdam") is ("fedadam" in configs)


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
    "binary": (bytes(range(256)), "binary.yaml: 'utf-8' codec can't decode"),
    "twice": (b"federation:\n  server_lr: 1\n  server_lr: 0.5\n", "line 3: the key 'server_lr' is in line 2 already"),
    "group": (b"federation: {evaluation: null}\n", "federation.evaluation: null: expected its options"),
    "accelerator": (b"trainer: {accelerator: gpuu}\n", "invalid accelerator name"),
    "hidden": (
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
