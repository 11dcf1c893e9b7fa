"""A text of a configuration is the same text after each reading and writing."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO

import pytest
import yaml
from hypothesis import given, settings, strategies as st
from jsonargparse import Namespace

from flsv.cli import main
from flsv.cli.config_texts import read_config, takes_texts, write_config
from flsv.cli.options import instantiated, option_parser
from flsv.cli.parser import make_cli
from helpers.retrained import retrained_rows

from .own_callbacks import WithTexts

pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")

#: Texts that YAML or jsonargparse reads as something else, and some that must be escaped.
READ_OTHERWISE = [
    "", " ", "-999", "+1", "1", "08", "0x1f", "0o17", "0b1", "1_000", "12:30", "٣", "9" * 30,
    "1.5", "1.", ".5", "1e3", "1e-3", "-1E5", ".inf", "-.inf", ".nan", "nan", "inf", "Infinity",
    "null", "Null", "NULL", "~", "none", "true", "True", "false", "yes", "no", "on", "off", "y",
    "2020-01-01", "2020-01-01 10:00:00", "[1]", "[", "{a: 1}", "{a}", "{}", "a: b", "a:", "- a",
    "# no", " # no", "=", "<<", "*a", "&a", "!a", "%a", "@a", "`", "|", ">", "?", ":", "'1'", '"1"',
    "?", "\n", "1\n", "a\n b\n", "\t", "\x00", "\x85", "\u2028", "\ufeff", "😀", "a: 'b", "0b_",
]  # fmt: skip
TEXTS = st.sampled_from(READ_OTHERWISE) | st.text(max_size=8)


@pytest.fixture(scope="module")
def parser():
    return option_parser("flsv own", None, {"own": WithTexts})


@pytest.fixture(scope="module")
def fit_parser():
    return make_cli(["--config", "quickstart"], run=False, quiet=True).parser


def texts_everywhere(text):
    """Arguments of :class:`WithTexts` that hold a text wherever they can."""
    arguments = {
        "text": text,
        "text_or_nothing": text,
        "number_or_text": text,
        "list_or_text": text,
        "texts": [text, *READ_OTHERWISE],
        "numbers_or_texts": [text, 1],
        "by_name": {"a": text, "b": [text], "c": {"d": [{"e": text}]}, text: 1},
        "anything": {"a": [text, 1, None]},
        "without_type": text,
    }
    nested = {"class_path": "cli.own_callbacks.WithTexts", "init_args": dict(arguments)}
    return {**arguments, "anything": text, "callback": nested}


def test_default_text_is_written_as_the_same_text(parser):
    written = parser.dump(parser.parse_args([]))

    assert yaml.safe_load(written)["own"]["codes"] == ["-999", "null"]


def sections_written(parser, config, path):
    """Return a configuration's own section as it is written, and as ``--print_config`` prints what was written."""
    path.write_text(write_config({"own": config}))
    parsed = parser.parse_args(["--config", str(path)])
    written = parser.dump(parsed)
    path.write_text(written)

    printed = StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        parser.parse_args(["--config", str(path), "--print_config"])
    return [yaml.safe_load(text)["own"] for text in (written, printed.getvalue())]


def of_config(section, names):
    """Return the named options of a section, and of the callback in it."""
    options = {name: section[name] for name in names if name != "callback"}
    if isinstance(section.get("callback"), Mapping):
        nested = section["callback"]["init_args"]
        options["callback"] = {name: nested[name] for name in names if name != "callback"}
    return options


@given(text=TEXTS)
@settings(deadline=None, max_examples=50)
def test_written_text_is_read_as_the_same_by_both_readers(text):
    config = {"a": text, "b": [text, {text: text}], "c": READ_OTHERWISE}
    written = write_config(config)

    assert read_config(written) == config
    assert yaml.safe_load(written) == config


@pytest.mark.slow
@given(text=TEXTS)
@settings(deadline=None, max_examples=5)
def test_text_of_a_file_is_written_again_as_the_same_text(text, parser, tmp_path_factory):
    config = texts_everywhere(text)
    path = tmp_path_factory.getbasetemp() / "texts.yaml"
    expected = {**config, "callback": config["callback"]["init_args"]}

    for section in sections_written(parser, config, path):
        assert of_config(section, expected) == expected


@pytest.mark.parametrize("text", ["-999", "1e3", "null", "word"])
def test_objects_are_built_with_plain_texts(text, parser, tmp_path):
    config = texts_everywhere(text)
    path = tmp_path / "texts.yaml"
    path.write_text(write_config({"own": config}))
    built = instantiated(parser, ["--config", str(path)]).own

    arguments = dict(built.arguments)
    nested = arguments.pop("callback").arguments
    numbers_or_texts = (text, 1)
    for name, value in config["callback"]["init_args"].items():
        expected = numbers_or_texts if name == "numbers_or_texts" else value
        assert nested[name] == expected
        if name != "anything":
            assert arguments[name] == expected

    assert arguments["anything"] == text
    texts = [arguments["number_or_text"], arguments["by_name"]["b"][0], arguments["anything"]]
    assert [type(item) for item in texts] == [str, str, str]


def test_number_in_quotation_marks_is_a_number_where_only_numbers_fit(parser, tmp_path):
    path = tmp_path / "number.yaml"
    path.write_text("own: {number: '1e-3'}")

    assert parser.parse_args(["--config", str(path)]).own.number == 0.001


def test_word_of_the_command_line_is_read_as_yaml(parser):
    words = ["--own.number_or_text=5", "--own.by_name={a: 5, b: '5'}", "--own.anything=null"]
    own = parser.parse_args(words).own

    assert own.number_or_text == 5
    assert own.by_name == {"a": 5, "b": "5"}
    assert own.anything is None


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize("text", ["-999", "1e3", "null", "2020-01-01", "yes", "[1]"])
def test_every_option_of_a_fit_that_takes_a_text_keeps_it(text, fit_parser, tmp_path):
    names = [
        action.dest
        for action in fit_parser._actions
        if takes_texts(getattr(action, "_typehint", None)) and not action.dest.endswith(".help")
    ]
    assert {"data.pos_label", "data.dictionary", "federation.share"} <= set(names)

    config = fit_parser.parse_args(["--config", "quickstart"])
    sections = Namespace()
    for name in names:
        sections[name] = text
    path = tmp_path / "texts.yaml"
    path.write_text(write_config(sections.as_dict()))
    config = fit_parser.parse_args(["--config", "quickstart", "--config", str(path)])
    written = fit_parser.dump(config)
    path.write_text(written)

    read_again = fit_parser.parse_args(["--config", str(path)])
    texts = {name: read_again.get(name) for name in names}
    assert texts == dict.fromkeys(names, text)
    assert fit_parser.dump(read_again) == written


def write_table(path):
    """A table with -999 for a missing age, and words that look like numbers."""
    lines = ["clinic,age,ward,outcome"]
    for row in range(240):
        age = -999 if row % 9 == 4 else 40 + row % 37
        lines.append(f"{'ABC'[row % 3]},{age},{row // 3 % 2 + 1},{row * 7 % 5 // 3}")
    path.write_text("\n".join(lines))


FEDERATION = """
data:
  source: table.csv
  labels: outcome
  groups: clinic
  dictionary: {"columns": {"age": {"gaps": ["-999"]}, "ward": {"categories": ["1", "2"]}}}
  files: {root: .}
model: {class_path: ClassifierClient, init_args: {network: mlp}}
federation: {metrics: {value: ShadowShapley}}
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false}
"""


@pytest.mark.slow
@pytest.mark.long
def test_run_with_quoted_codes_is_retrained_and_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_table(tmp_path / "table.csv")
    (tmp_path / "federation.yaml").write_text(FEDERATION)

    assert main(["fit", "--config", "federation.yaml"]) == 0

    run = tmp_path / "lightning_logs" / "version_0"
    config_of_run = str(run / "config.yaml")
    dictionary = yaml.safe_load(FEDERATION)["data"]["dictionary"]
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["dictionary"] == dictionary

    assert main(["retrain", str(run), "--seeds", "1", "--trainings", "singles"]) == 0
    assert len(retrained_rows(run)) == 3
    assert main(["repeat", "1", "--config", config_of_run]) == 0
    assert main(["fit", "--config", config_of_run]) == 0

    first_values = (run / "contributions.csv").read_text()
    assert (run.with_name("version_1") / "contributions.csv").read_text() == first_values
