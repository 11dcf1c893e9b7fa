"""Commands that pages name exist and run, and so does each program whose cost is measured."""

import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import cost_cases
import costs
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "tests/docs/figures.py",
    ROOT / "tools/README.md",
    ROOT / "Makefile",
]
#: ``python tools/bench.py --quick`` as ("tools/bench.py", " --quick").
COMMAND = re.compile(r"(?:python|\$\(PYTHON\)) (tools/\S+?\.py)\b([^\n`#|]*)")


def commands():
    found = []
    for path in PAGES:
        if path.name != "CHANGELOG.md":
            text = path.read_text(encoding="utf-8").replace('."""', "")  # ends of docstrings
            found += COMMAND.findall(text)
    return found


@pytest.mark.parametrize("script", sorted({script for script, _ in commands()}))
def test_script_that_a_page_names_prints_its_help(monkeypatch, capsys, script):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_pages_name_cases_and_programs_that_are_measured():
    cases = cost_cases.cases()
    groups = {name.split("/")[0] for name in cases}
    programs = {program for of_case in cases.values() for program in of_case}
    measured = [shlex.split(options) for script, options in commands() if "costs.py" in script]
    for words in measured:
        named_cases = [word for word in words if word.split("/")[0] in groups]
        assert set(named_cases) <= {*cases, *groups}
        if "--only" in words:
            assert set(words[words.index("--only") + 1 :]) <= programs

    assert len(measured) >= 5


IN_THIS_PROCESS = (
    "plain PyTorch",
    "Lightning's Trainer",
    "FederatedLoop",
    "+ CSSV, TensorBoard, CSV",
    "+ progress bar, checkpoints",
    "vmap",
)


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("program", IN_THIS_PROCESS)
def test_program_of_a_round_returns_its_seconds(monkeypatch, tmp_path, program):
    monkeypatch.chdir(tmp_path)
    setting = replace(cost_cases.ROUND_SETTINGS["softmax100"], num_clients=2, samples_of_client=8)
    monkeypatch.setattr(cost_cases, "ROUND_SETTINGS", {"tiny": setting})
    numbers = cost_cases.cases()["round/tiny"][program]()

    assert numbers["round_s"] > 0


def test_ratios_are_those_to_the_first_program():
    table = pd.DataFrame({"case": "round", "program": ["plain", "loop"], "round_s": [2.0, 3.0]})

    assert costs.with_ratios(table)["round_s"].tolist() == ["2 (1.00)", "3 (1.50)"]


def test_measured_program_keeps_its_compiled_bytecode_as_users_do(monkeypatch):
    environments = []

    def run(command, env, **_):
        environments.append(env)
        Path(command[-1]).write_text("{}")

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(costs.subprocess, "run", run)

    costs.measure_in_process("case", "alone", "cpu", Path("checkout"))

    (environment,) = environments
    assert environment["PYTHONPATH"] == "checkout"
    assert "PYTHONDONTWRITEBYTECODE" not in environment


def test_programs_stay_in_order_whichever_repetition_was_the_best(monkeypatch):
    seconds = iter([3.0, 5.0, 2.0, 9.0])
    monkeypatch.setattr(costs, "measure_in_process", lambda *_: {"processor_s": next(seconds)})

    best = costs.measure_case("case", ["alone", "valued"], [Path("main")], "cpu", repeats=2)

    assert best["program"].tolist() == ["alone", "valued"]
    assert best["processor_s"].tolist() == [2.0, 5.0]
