"""Inputs of ``fuzz_inputs.py``: command lines and YAML files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from fuzz_cases import Make, add, command, fitted

QUICK = yaml.safe_load((Path(__file__).parents[1] / "configs" / "quickstart.yaml").read_text())
SHORT = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2", "--trainer.logger=false"]
SHORT += ["--trainer.enable_progress_bar=false", "--federation.reporting.table=false"]


def fit(*arguments: str) -> Make:
    def run(folder: Path) -> str:
        command("fit", *arguments, *SHORT, "--trainer.default_root_dir", str(folder))
        return fitted(folder)

    return run


def text_config(content: bytes) -> Make:
    def run(folder: Path) -> str:
        (folder / "mine.yaml").write_bytes(content)
        return fit("--config", str(folder / "mine.yaml"))(folder)

    return run


def changed(*path: Any, **values: Any) -> Make:
    """The quick start with something else at a place: ``changed("data", batch_size=0)``."""
    config = json.loads(json.dumps(QUICK))
    place = config
    for key in path:
        place = place[key]
    place.update(values)
    return text_config(yaml.safe_dump(config).encode())


WHOLE = yaml.safe_dump(QUICK).encode()

for name, given in {
    "unknown option": ["--federation.locl_epochs=2"],
    "option without a value": ["--federation.local_epochs"],
    "word for a number": ["--federation.local_epochs=two"],
    "negative epochs": ["--federation.local_epochs=-1"],
    "fraction of epochs": ["--federation.local_epochs=1.5"],
    "server_lr nan": ["--federation.aggregator=flsv.aggregation.FedAvg", "--federation.aggregator.server_lr=nan"],
    "unknown metric": ["--federation.metrics={cssv: flsv.metrics.ClassSpecificShaply}"],
    "metric that the aggregator lacks": ["--federation.aggregator.init_args.metric=cgsv"],
    "unknown engine": ["--federation.engine=ranks"],
    "unknown aggregator": ["--federation.aggregator=FedAverage"],
    "module for a class": ["--federation.aggregator=flsv.aggregation"],
    "unknown source": ["--data.source=digit"],
    "no configuration of that name": ["--config=quickstrat"],
    "checkpoint that is not there": ["--ckpt_path=nowhere.ckpt"],
    "no clients": ["--data.partitioner.init_args.num_clients=0"],
    "more clients than samples": ["--data.partitioner.init_args.num_clients=100000"],
    "alpha nan": ["--data.partitioner.init_args.alpha=nan"],
    "all samples are the server's": ["--data.splits.server_val=1.0"],
    "learning rate below 0": ["--model.optimizer.init_args.lr=-1"],
    "seed of words": ["--seed_everything=abc"],
    "unknown device": ["--trainer.accelerator=abacus"],
    "share of nothing": ['--federation.share=["nothing_here"]'],
}.items():
    add("command line", name, fit("--config", "quickstart", *given))
add("command line", "ordinary", fit("--config", "quickstart"), "same")
add("command line", "twice the same", fit("--config", "quickstart", "--config", "quickstart"), "same")
add("command line", "whole number as a float", fit("--config", "quickstart", "--data.batch_size=16.0"), "either")
add("command line", "underscores in a number", fit("--config", "quickstart", "--data.batch_size=1_6"), "either")
for name, given in {
    "no such subcommand": ["fti", "--config", "quickstart"],
    "retrain without a run": ["retrain"],
    "retrain what is no run": ["retrain", "."],
    "report what is no run": ["report", "."],
    "report what is not there": ["report", "nowhere"],
    "repeat without a number": ["repeat", "--config", "quickstart"],
    "repeat once": ["repeat", "1", "--config", "quickstart"],
    "repeat x": ["repeat", "x", "--config", "quickstart"],
    "bench of no metric": ["bench", "--metric", "nothing"],
    "bench of no federation": ["bench", "--federations", "nowhere"],
    "compare of nothing": ["compare"],
    "compare with what is not there": ["compare", "--config", "nowhere"],
    "stress of nothing": ["stress", "--metric", "nothing"],
    "value of nothing": ["value", "--config", "nowhere"],
    "test what was never trained": ["test", "--config", "quickstart", "--ckpt_path", "last"],
}.items():

    def run_command(folder: Path, given: list[str] = given) -> str:
        command(*given)
        return "ended"

    add("command line", name, run_command)

add("YAML", "ordinary", text_config(WHOLE), "same")
add("YAML", "CRLF", text_config(WHOLE.replace(b"\n", b"\r\n")), "same")
add("YAML", "byte order mark", text_config(b"\xef\xbb\xbf" + WHOLE), "either")
add("YAML", "end of document twice", text_config(WHOLE + b"...\n"), "same")
add("YAML", "flow style", text_config(json.dumps(QUICK).encode()), "same")
add("YAML", "comments only behind", text_config(WHOLE + b"\n# the end\n\n"), "same")
for name, content in {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "UTF-16": WHOLE.decode().encode("utf-16"),
    "Latin-1": b"# caf\xe9\n" + WHOLE,
    "zeros": b"\0" * 100,
    "tabs": WHOLE.replace(b"  ", b"\t"),
    "a list": b"- 1\n- 2\n",
    "a word": b"quickstart\n",
    "two documents": WHOLE + b"---\n" + WHOLE,
    "a key twice": WHOLE + b"trainer:\n  max_epochs: 3\n",
    "an open bracket": WHOLE + b"more: [1, 2\n",
    "an alias of nothing": b"data: *nothing\n",
    "a Python object": b"data: !!python/object/apply:os.system ['touch evil']\n",
    "cut in the middle": WHOLE[: len(WHOLE) // 2],
}.items():
    add("YAML", name, text_config(content))
for section in ("trainer", "federation", "data", "model"):
    add("YAML", f"{section}: null", changed(**{section: None}), "refused", section)
    add("YAML", f"{section}: a number", changed(**{section: 3}), "refused", section)
for name, run in {
    "unknown section": changed(federaton={"local_epochs": 2}),
    "unknown key": changed("data", batchsize=4),
    "batch of nothing": changed("data", batch_size=0),
    "batch of a word": changed("data", batch_size="many"),
    "hidden layer of no width": changed("model", "init_args", network_args={"hidden": [0]}),
    "hidden layer below 0": changed("model", "init_args", network_args={"hidden": [-4]}),
    "network of another name": changed("model", "init_args", network="mpl"),
    "argument of no network": changed("model", "init_args", network_args={"hiden": [4]}),
    "metrics as a list": changed("federation", metrics=["flsv.metrics.CGSV"]),
    "metric of no class": changed("federation", metrics={"cssv": 3}),
    "metric with a slash": changed("federation", metrics={"a/b": "flsv.metrics.GradientAgreement"}),
    "aggregator that is a metric": changed("federation", aggregator="flsv.metrics.GradientAgreement"),
    "evaluate every -1": changed("federation", "evaluation", every=-1),
    "fraction of all": changed("data", "splits", client_test=1.0),
    "fraction nan": changed("data", "splits", client_test=float("nan")),
    "fraction below 0": changed("data", "splits", client_test=-0.5),
    "partitioner that is a word": changed("data", partitioner="even"),
    "optimizer that is none": changed("model", "init_args", optimizer="torch.nn.Linear"),
    "learning rate of a word": changed("model", "init_args", "optimizer", init_args={"lr": "fast"}),
}.items():
    add("YAML", name, run)
