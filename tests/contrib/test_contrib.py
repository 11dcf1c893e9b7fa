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
CHECKED = (aggregation.Aggregator, metrics.ContributionMetric, ClientAlgorithm)
CHECKS = """@parametrize_with_checks([{}()])
    def test_checks(check): check()"""


def missing_names(file: str, text: str) -> str:
    return f"{file}: add\n    {text}"


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_leaf_brings_paper_owner_caveat_example_and_test(leaf: str) -> None:
    file = f"flsv/contrib/{leaf}.py"
    tree = ast.parse((ROOT / file).read_text())
    docstring = ast.get_docstring(tree) or ""

    for name, line in LINES.items():
        assert re.search(rf"^{name}: \w", docstring, re.MULTILINE), missing_names(file, line)

    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"]
    assert classes, missing_names(file, "class Method(Aggregator): ...")

    for node in classes:
        part = getattr(flsv.contrib, node.name)
        assert issubclass(part, BASES), f"{file}: {node.name} is a subclass of none of {BASES}"
        for name, section in SECTIONS.items():
            text = ast.get_docstring(node) or ""
            assert f"\n{name}:\n" in text, missing_names(f"{file}: class {node.name}", section)

        if not issubclass(part, metrics.ContributionMetric):
            config = f"configs/{leaf}.yaml"
            assert (ROOT / config).is_file(), missing_names(config, "an example of use")
            entry = "# title: ...\n    # papers: []\n    # gives: ...\n    # not_for: ..."
            assert "\n# title: " in (ROOT / config).read_text(), missing_names(config, entry)

    test_file = f"tests/contrib/test_{leaf}.py"
    assert (ROOT / test_file).is_file(), missing_names(test_file, "a test against an own reference")

    test = (ROOT / test_file).read_text()
    for node in classes:
        part = getattr(flsv.contrib, node.name)
        assert has_checks(part, test), missing_names(test_file, CHECKS.format(node.name))


def has_checks(part: type, test: str) -> bool:
    """Whether a test runs the checks of flsv.testing on a part, if there are any for its kind."""
    if not issubclass(part, CHECKED):
        return True
    call = rf"(parametrize_with_checks|check_\w+)\(.*\b{part.__name__}\("
    return re.search(call, test) is not None


@pytest.mark.parametrize(
    ("part", "test", "expected"),
    [
        (aggregation.FedAvg, "@parametrize_with_checks([FedAvg()])", True),
        (aggregation.FedAvg, "assert FedAvg()", False),
        (sampling.UniformSampler, "assert UniformSampler(1)", True),
    ],
)
def test_checks_are_asked_for_where_there_are_any(part: type, test: str, expected: bool) -> None:
    assert has_checks(part, test) == expected


def test_a_leaf_is_found_by_its_name_alone_and_loaded_when_it_is_asked_for() -> None:
    assert "fedexp" in LEAVES
    assert "FedExP" in flsv.contrib.__all__
    assert flsv.contrib.FedExP.__module__ == "flsv.contrib.fedexp"
