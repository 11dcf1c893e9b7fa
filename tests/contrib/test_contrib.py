"""What each file of flsv.contrib has to bring. A failure names the file and what to add to it."""

import ast
import re
from pathlib import Path

import pytest

import flsv.contrib
from flsv import aggregation, attacks, filters, metrics, personalization, sampling, uploads
from flsv.training.algorithms import ClientAlgorithm

ROOT = Path(flsv.contrib.__file__).parents[2]
FILES = (ROOT / "flsv/contrib").glob("*.py")
LEAVES = sorted(file.stem for file in FILES if not file.stem.startswith("_"))
#: Lines of the docstring at the top of a leaf.
LINES = {
    "Paper": 'Paper: authors, "title", venue and year, equation or algorithm, address',
    "Owner": "Owner: who answers questions about it",
}
SECTIONS = {
    "When not to use it": "When not to use it:\n        Where ...",
    "Example": "Example:\n        >>> ...",
}
BASES = (
    aggregation.Aggregator,
    attacks.Attack,
    filters.UpdateFilter,
    metrics.ContributionMetric,
    personalization.Personalizer,
    sampling.ClientSampler,
    ClientAlgorithm,
    uploads.Upload,
)


#: The kinds of parts that flsv.testing can check.
CHECKED = (
    aggregation.Aggregator,
    metrics.ContributionMetric,
    sampling.ClientSampler,
    ClientAlgorithm,
)
CHECKS = """@parametrize_with_checks([{}()])
    def test_checks(check): check()"""


CONFIG_ENTRY = """# title: ...
    # papers: []
    # gives: ...
    # not_for: ..."""


def message_to_add(file, missing_text):
    return f"{file}: add\n    {missing_text}"


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_brings_paper_owner_caveat_example_and_test(leaf):
    file = f"flsv/contrib/{leaf}.py"
    tree = ast.parse((ROOT / file).read_text())
    classes = public_classes(tree)

    assert_has_paper_and_owner(file, ast.get_docstring(tree) or "")
    assert classes, message_to_add(file, "class Method(Aggregator): ...")

    parts = []
    for node in classes:
        part = getattr(flsv.contrib, node.name)
        assert issubclass(part, BASES), f"{file}: {node.name} is a subclass of none of {BASES}"
        assert_has_sections(f"{file}: class {node.name}", ast.get_docstring(node) or "")
        parts.append(part)

    if not all(issubclass(part, metrics.ContributionMetric) for part in parts):
        assert_has_example_config(f"configs/{leaf}.yaml")
    assert_has_test(f"tests/contrib/test_{leaf}.py", parts)


def public_classes(tree):
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in classes if not node.name.startswith("_")]


def assert_has_paper_and_owner(file, docstring):
    for name, line in LINES.items():
        assert re.search(rf"^{name}: \w", docstring, re.MULTILINE), message_to_add(file, line)


def assert_has_sections(name_of_class, docstring):
    for title, section in SECTIONS.items():
        assert f"\n{title}:\n" in docstring, message_to_add(name_of_class, section)


def assert_has_example_config(config):
    path = ROOT / config
    assert path.is_file(), message_to_add(config, "an example of use")
    assert "\n# title: " in path.read_text(), message_to_add(config, CONFIG_ENTRY)


def assert_has_test(test_file, parts):
    path = ROOT / test_file
    assert path.is_file(), message_to_add(test_file, "a test against an own reference")

    test = path.read_text()
    for part in parts:
        assert has_checks(part, test), message_to_add(test_file, CHECKS.format(part.__name__))


def has_checks(part, test):
    """Return whether a test runs the checks of flsv.testing on a part, if there are any for its kind."""
    if not issubclass(part, CHECKED):
        return True
    call = rf"(parametrize_with_checks|check_\w+)\(\s*\[?{part.__name__}\("
    return re.search(call, test) is not None


def test_a_leaf_is_found_by_its_name_alone_and_loaded_when_it_is_asked_for():
    assert "fedexp" in LEAVES
    assert "FedExP" in flsv.contrib.__all__
    assert flsv.contrib.FedExP.__module__ == "flsv.contrib.fedexp"
