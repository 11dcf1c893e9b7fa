"""The code of guides prints the tensors that comments in the code show."""

import re
from pathlib import Path

import pytest

from helpers import pages

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ["own_metric", "own_algorithm", pytest.param("hugging_face", marks=pytest.mark.long)]
)
def test_example_of_a_guide_prints_what_the_guide_says(
    page,
    tmp_path,
    monkeypatch,
    capsys,
):
    if page == "hugging_face":
        pytest.importorskip("peft")

    text = (HOWTO / f"{page}.md").read_text()
    # Such as "print(values)  # tensor([0.1, 0.2])".
    tensors_in_comments = re.findall(r"^print\(.*\)  # (tensor.*)$", text, flags=re.MULTILINE)
    assert tensors_in_comments

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert pages.run_page(text) == text.count("```") // 2
    output = capsys.readouterr().out
    printed_tensors = re.findall(r"^tensor.*$", output, flags=re.MULTILINE)

    for printed_tensor, tensor_in_comment in zip(printed_tensors, tensors_in_comments, strict=True):
        expected = pytest.approx(numbers_in(tensor_in_comment), abs=0.05, nan_ok=True)
        assert numbers_in(printed_tensor) == expected


def numbers_in(line: str) -> list[float]:
    values, _, _dtype = line.partition(", dtype")
    numerals = re.findall(r"-?\d+\.?\d*|nan", values)
    return [float(numeral) for numeral in numerals]
