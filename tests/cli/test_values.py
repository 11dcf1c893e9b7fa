"""Values are checked by the source alone: what is refused would be refused by the parser, too, which takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import lightning as L
import pytest

from flsv import FederatedDataModule, FederatedLoop
from flsv.cli import main
from flsv.cli.classes import arguments_of_class, classes, is_a, no_class
from flsv.cli.configs import SECTIONS, packaged_names
from flsv.cli.names import arguments_of
from flsv.cli.options import PlainParser
from flsv.cli.values import check_values
from flsv.errors import ConfigurationError

VALUES = (
    *(
        "abc",
        "2.5",
        "3",
        "-1",
        "true",
        "yes",
        "null",
        "FedAvg",
        "TopK",
        "[1]",
        "[a]",
        "{a: 1}",
        "1e-3",
        "1_000",
        "0x10",
    ),
    *("inf", "1.0", "''", "fixed", "2020-13-45", "{class_path: FedAvg}", "{class_path: Nope}", "[TopK]", "{sv: Nope}"),
    *("flsv.aggregation.FedAvg", "flsv.aggregation.Nope", "{class_path: FedAvg, init_args: {server_lr: abc}}"),
    *("{sv: CumulativeShapley}", "{sv: {class_path: CumulativeShapley, init_args: {weighting: nope}}}", "{every: x}"),
)


def accepted(parser: PlainParser, *words: str) -> bool:
    try:
        parser.parse_args(words)
    except (Exception, SystemExit):  # whatever a constructor's own checks raise
        return False
    return True


def refused(*words: str) -> bool:
    try:
        check_values(words, SECTIONS)
    except ConfigurationError:
        return True
    return False


@pytest.mark.slow
def test_what_is_refused_the_parser_would_refuse() -> None:
    kinds = {"federation": FederatedLoop, "data": FederatedDataModule, "trainer": L.Trainer}
    parser, early = PlainParser(exit_on_error=False), 0
    for section, kind in kinds.items():
        parser.add_class_arguments(kind, section)
    for section in kinds:
        for option in (f"--{section}.{name}{more}" for name in arguments_of(section) for more in ("", "+")):
            for value in VALUES:
                if refused(option, value):
                    early += 1
                    assert not accepted(parser, option, value), (option, value)
    assert early > 500


@pytest.mark.parametrize("name", packaged_names())
def test_every_configuration_passes(name: str) -> None:
    check_values(["--config", name], (*SECTIONS, "value"))


@pytest.mark.parametrize(
    "given",
    [
        "--federation.aggregator my_package.Mine --federation.aggregator.anything abc",
        "--federation.metrics.mine.anything abc",
        "--config quickstart --federation.aggregator FedAvg --federation.aggregator.server_lr 0.5",
        "--federation.metrics.sv CumulativeShapley --federation.metrics.sv.compute_on_cpu true",
        "--trainer.logger false --trainer.callbacks+ RichProgressBar --trainer.devices auto",
        "--model my_package.Module --model.num_classes abc",
        "--federation.evaluation.every 3 --federation.uploads+ TopK --ckpt_path last",
        "--data.partitioner={class_path:\u0020flsv.data.IIDPartitioner}",
    ],
)
def test_what_the_source_does_not_decide_passes(given: str) -> None:
    check_values([word.replace("\u0020", " ") for word in given.split(" ")], SECTIONS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("federation: {local_epochs: many}", "federation.local_epochs: expected a whole number."),
        ("federation: {local_epoch: 3}", "Did you mean --federation.local_epochs?"),
        ("federation: {norm_cap: 3}", r"norm_cap is now filters="),
        ("federation: {uploads: [{class_path: TopKK}]}", "federation.uploads.0.class_path: there is no class TopKK."),
        ("data: {splits: {server_val: some}}", "data.splits.server_val: expected a number."),
        (
            "federation: {metrics: {sv: {class_path: CumulativeShapley, init_args: {weighting: nope}}}}",
            "federation.metrics.sv.init_args.weighting: expected one of uniform, samples",
        ),
        (
            "federation: {aggregator: {class_path: flsv.aggregation.FedAvg, init_args: {server_lrr: 1}}}",
            "init_args.server_lrr: FedAvg has no argument server_lrr. Did you mean server_lr?",
        ),
    ],
)
def test_files_are_checked_too(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=said.replace("?", r"\?")) as error:
        check_values(["--config", str(file)], SECTIONS)
    assert str(file) in str(error.value)


def test_what_is_read_off_the_source_is_what_is_there() -> None:
    import inspect

    import flsv.aggregation as there

    for name in there.__all__:
        kind = getattr(there, name)
        assert is_a(name, "Aggregator") == issubclass(kind, there.Aggregator)
        arguments, more = arguments_of_class(name)
        if not more:
            assert set(arguments) == set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"}
    assert "CumulativeShapley" in classes()
    assert no_class("torch.optim.Nope", "Aggregator") is None


@pytest.mark.parametrize("command", ["report RUN --client", "pay RUN --release", "stress RUN --partner"])
def test_a_client_that_a_run_has_not(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"clients": ["Boston", "Lyon"]}))
    assert main([*command.replace("RUN", str(tmp_path)).split(), "Oslo"]) == 2
    assert "'Oslo': the run has no such client. It has Boston, Lyon." in capsys.readouterr().err
