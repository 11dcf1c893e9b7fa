"""Configurations by name, copies of them to edit, and the wheel that holds them."""

from pathlib import Path

import pytest

from flsv.cli import main
from flsv.cli.configs import find_config, packaged_names

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_packaged_configuration_is_found_by_its_name():
    files = {path.resolve() for path in CONFIGS.rglob("*.yaml")}
    assert len(files) > 60
    assert {find_config(name).resolve() for name in packaged_names()} == files
    assert len(packaged_names()) == len(files)


def test_init_copies_the_quick_start_which_then_takes_precedence():
    assert main(["init"]) == 0
    packaged = CONFIGS / "quickstart.yaml"
    assert Path("quickstart.yaml").read_text() == packaged.read_text()
    assert find_config("quickstart") == Path("quickstart.yaml")


def test_init_copies_named_configurations_and_prints_how_to_fit(capsys):
    command = "init mine --config fedsv --config scenarios/guo_noisy"
    assert main(command.split()) == 0
    names = sorted(path.name for path in Path("mine").iterdir())
    assert names == ["fedsv.yaml", "guo_noisy.yaml"]
    assert (
        "flsv fit --config mine/fedsv.yaml --config mine/guo_noisy.yaml" in capsys.readouterr().out
    )


def test_init_overwrites_no_file(capsys):
    Path("quickstart.yaml").write_text("mine")

    assert main(["init"]) == 2

    assert "is there already" in capsys.readouterr().err
    assert Path("quickstart.yaml").read_text() == "mine"


@pytest.mark.parametrize("options", ["quickstart.yaml/mine", "--nvflare quickstart.yaml"])
def test_init_into_a_file_is_refused(options, capsys):
    Path("quickstart.yaml").touch()

    assert main(["init", *options.split()]) == 2

    assert "nothing can be written into quickstart.yaml" in capsys.readouterr().err


@pytest.mark.parametrize("network", ["flower", "nvflare"])
def test_init_of_a_network_writes_a_sites_limits_and_refuses_a_full_folder(network, capsys):
    assert main(["init", f"--{network}", "mine"]) == 0
    assert "functions = []" in Path("mine/flsv-site.toml").read_text()
    assert "mine/README.md explains how to run it" in capsys.readouterr().out

    assert main(["init", f"--{network}", "mine"]) == 2
    assert "mine is not empty" in capsys.readouterr().err
