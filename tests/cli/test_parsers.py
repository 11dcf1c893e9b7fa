"""Arguments are checked before anything is imported that takes seconds."""

from __future__ import annotations

import csv
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import lightning as L
import pytest
import torch
import yaml

from flsv import ClassifierClient
from flsv.benchmark.run import CONDITIONS
from flsv.benchmark.stress import CHEATS, SAFEGUARDS
from flsv.cli import main
from flsv.cli.brief_help import TRAINER
from flsv.cli.names import arguments_of, declared, unknown_option
from flsv.cli.options import OptionParser
from flsv.cli.parser import WritePredictions
from flsv.data import FederatedDataModule, Loader, SizePartitioner
from flsv.loop import FederatedLoop
from flsv.valuation import FedBary

WRONG = [
    ("fit --trainer.max_epoch 3", "Did you mean --trainer.max_epochs?"),
    ("fit --federation.norm_cap 3", "norm_cap is now filters=[NormCap(...)]."),
    ("test --data.sauce digits", "Did you mean --data.source?"),
    ("retrain . --trainings som", "invalid choice: 'som'"),
    ("retrain . --trainer.max_epoch 3", "Did you mean --trainer.max_epochs?"),
    ("retrain . --roundz 3", "Did you mean --rounds?"),
    ("compare --config a --modls b", "Did you mean --models?"),
    ("repeat many --config a", "how many runs?"),
    ("stress --attacks zzz", "invalid choice: 'zzz'"),
    ("bench --conditions zzz", "invalid choice: 'zzz'"),
    ("pay . --bugdet 3", "unrecognized arguments: --bugdet"),
    ("report . --clinet 3", "unrecognized arguments: --clinet"),
    ("board . --prot 3", "unrecognized arguments: --prot"),
    ("new metrics X", "invalid choice: 'metrics'"),
    ("init --confg quickstart", "unrecognized arguments: --confg"),
    ("value --data.sauce digits", "Did you mean --data.source?"),
    ("value --value.suport 3", "Did you mean --value.support?"),
    ("data --data.sauce digits", "Did you mean --data.source?"),
    ("data --ot 3", "unrecognized arguments: --ot"),
    ("value --pictres 3", "Did you mean --pictures?"),
    ("value --trainer.max_epochs 3", "flsv value trains nothing"),
    ("fit --config quickstrat", "Did you mean --config quickstart"),
    ("repeat 3 --config quickstrat", "Did you mean --config quickstart"),
    ("compare --base quickstrat --config a", "Did you mean --config quickstart"),
    ("fit --federation.local_epochs abc", "--federation.local_epochs abc: expected a whole number."),
    ("fit --trainer.max_epochs=2.5", "--trainer.max_epochs 2.5: expected a whole number."),
    ("fit --federation.aggregator Nope", "there is no class Nope. There are Bucketing, CGSV, "),
    ("fit --federation.aggregator flsv.aggregation.FedAvgg", "Did you mean flsv.aggregation.FedAvg?"),
    ("fit --federation.sampler TopK", "TopK is no ClientSampler. There are "),
    ("fit --federation.uploads+ TopKK", "Did you mean flsv.uploads.TopK?"),
    ("fit --federation.client_optimizer rset", "expected one of reset, keep."),
    ("fit --federation.evaluation.every often", "expected a whole number."),
    ("fit --config quickstart --federation.aggregator.server_lrr 1", "Did you mean server_lr?"),
    ("fit --config quickstart --data.partitioner.alpha much", "expected a number."),
    ("fit --model.num_classes some", "expected a whole number."),
    ("test --ckpt_path nope.ckpt", "there is no checkpoint nope.ckpt."),
    ("value --value.support many", "--value.support many: expected a whole number."),
    ("data --data.batch_size many", "--data.batch_size many: expected a whole number."),
    ("repeat 3 --aggregator FedAvgg", "Did you mean flsv.aggregation.FedAvg?"),
    ("retrain . --metric acuracy", "expected one of accuracy, "),
    ("retrain . --federation.aggregator FedAvgg", "Did you mean flsv.aggregation.FedAvg?"),
    ("compare --config fedavg --trainer.max_epochs few", "expected a whole number."),
    ("bench --metric cgvs", "Did you mean cgsv?"),
    ("bench --metric flsv.metrics.Nope", "there is no class Nope."),
    ("bench --federations clinic", "Did you mean clinics?"),
    ("stress --metric cgvs", "Did you mean cgsv?"),
]


def test_a_typo_waits_for_nothing() -> None:
    code = """if True:
        import sys
        from flsv.cli import main
        for line in sys.argv[1:]:
            try:
                status = main(line.split())
            except SystemExit as exit:
                status = exit.code
            assert status == 2, line
        try:
            main(["fit", "--help"])
        except SystemExit as exit:
            assert exit.code == 0
        slow = {"torch", "lightning", "matplotlib", "pandas", "jsonargparse"} & sys.modules.keys()
        assert not slow, slow
    """
    command = [sys.executable, "-c", code, *(line for line, _ in WRONG)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("line", "said"), WRONG)
def test_it_is_said_what_is_wrong(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        assert main(line.split()) == 2
    assert said in capsys.readouterr().err


def test_what_is_read_off_the_source_is_what_there_is() -> None:
    import inspect

    kinds = {"trainer": L.Trainer, "data": FederatedDataModule, "federation": FederatedLoop, "value": FedBary}
    kinds["model"] = ClassifierClient
    for section, kind in kinds.items():
        names = set(inspect.signature(kind.__init__).parameters) - {"self"}
        assert arguments_of(section) == names, section
    assert declared("benchmark/stress.py", "CHEATS") == tuple(CHEATS)
    assert declared("benchmark/stress.py", "SAFEGUARDS") == tuple(SAFEGUARDS)
    assert declared("benchmark/run.py", "CONDITIONS") == tuple(CONDITIONS)
    with pytest.raises(LookupError, match="has no NOTHING"):
        declared("benchmark/run.py", "NOTHING")


def test_what_there_is_passes() -> None:
    given = "--config a -c b --trainer.callbacks+=X --trainer.logger.save_dir runs --model.network mlp --data=x.yaml"
    given += " --federation.aggregator.help ShapFedWA --federation.uploads+ TopK --seed_everything 3 --print_config"
    assert unknown_option(given.split()) is None
    assert unknown_option(["--rounds", "3"], ["--rounds"]) is None


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_the_help_of_a_fit_is_two_screens(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    named = {word for line in lines for word in line.split()[:1] if word.startswith("--")}
    for section in ("federation", "data", "model"):
        assert {f"--{section}.{name}" for name in arguments_of(section)} <= named, section
    assert {f"--trainer.{name}" for name in TRAINER} <= named
    assert any("--print_config" in line for line in lines)
    assert not [line for line in lines if line.startswith("  --") and len(line.split()) == 1]  # each is explained


def test_no_option_by_its_first_letters() -> None:
    parser = OptionParser()
    parser.add_argument("--epochs", type=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--epoch", "3"])


@pytest.mark.slow
def test_an_evaluation_makes_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--config", "quickstart", "--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", *options, "--trainer.max_epochs", "1", "-q"]) == 0
    before = {path for path in tmp_path.rglob("*") if path.is_dir()}
    for command in ("test", "validate", "predict"):
        for checkpoint in ("last", "best"):
            assert main([command, *options, "--ckpt_path", checkpoint]) == 0
    said = capfd.readouterr()
    assert "dirpath has changed" not in said.err + said.out
    assert {path for path in tmp_path.rglob("*") if path.is_dir()} == before
    assert (tmp_path / "lightning_logs/version_0/predictions.csv").is_file()


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_predictions_have_the_rows_own_ids(wrapped: bool, preload: bool, tmp_path: Path) -> None:
    draws = random.Random(0)

    def rows(first: int, count: int) -> list[str]:
        made = [(draws.gauss(0, 1), draws.choice("AB")) for _ in range(count)]
        return ["patient,age,ill,ward", *(f"P{first + i},{x:.2f},{int(x > 0)},{w}" for i, (x, w) in enumerate(made))]

    (tmp_path / "train.csv").write_text("\n".join(rows(0, 60)))
    held = rows(100, 12)
    held[3] = "P102,0.5,,A"  # nothing to predict: the row is left out
    (tmp_path / "test.csv").write_text("\n".join(held))
    config: dict[str, object] = {"labels": "ill", "groups": "ward", "columns": {"exclude": ["patient"]}}
    config |= {"source": str(tmp_path / "train.csv"), "test": str(tmp_path / "test.csv")}
    if wrapped:
        given = {"path": "train.csv", "test_path": "test.csv", "target": "ill", "group": "ward", "root": str(tmp_path)}
        source = {"class_path": "flsv.data.TableData", "init_args": {**given, "exclude": ["patient"]}}
        config = {"source": source, "partitioner": "flsv.data.GroupPartitioner"}
    config["loader"] = {"preload": preload}
    file = tmp_path / "run.yaml"
    trainer = {"accelerator": "cpu", "default_root_dir": str(tmp_path / "runs"), "logger": False}
    file.write_text(yaml.safe_dump({"data": config, "trainer": trainer}))
    assert main(["predict", "--config", str(file), "-q"]) == 0
    with next(tmp_path.rglob("predictions.csv")).open() as opened:
        found = list(csv.DictReader(opened))
    kept = [(place, line.split(",")) for place, line in enumerate(held[1:], 2) if line.split(",")[2]]
    assert [row["patient"] for row in found] == [cells[0] for _, cells in kept]
    assert [row["client"] for row in found] == [cells[3] for _, cells in kept]
    assert [row["line"] for row in found] == [str(place) for place, _ in kept]
    assert list(found[0])[:5] == ["index", "line", "client", "patient", "prediction"]


class Patients(torch.utils.data.Dataset):
    """A data set of one's own, whose rows have ids."""

    row_names: ClassVar = {"patient": [f"P{i}" for i in range(6)]}

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), index % 2


@pytest.mark.parametrize("preload", [False, True])
def test_preloaded_data_keep_the_rows_own_ids(preload: bool, tmp_path: Path) -> None:
    data = FederatedDataModule(Patients(), SizePartitioner([1, 1]), test=Patients(), loader=Loader(preload=preload))
    writer = WritePredictions()
    trainer = L.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, callbacks=[writer])
    trainer.predict(ClassifierClient("softmax", num_classes=2, input_shape=(2,)), data, return_predictions=False)
    with next(tmp_path.rglob("predictions.csv")).open() as opened:
        assert [row["patient"] for row in csv.DictReader(opened)] == Patients.row_names["patient"]
