"""Examples in guides end as the guides say: what they print is what stands beside it."""

import re
from pathlib import Path

import pytest

HOWTO = Path(__file__).parents[2] / "docs" / "howto"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["own_metric", "own_algorithm", "hugging_face"])
def test_example_of_a_guide_prints_what_the_guide_says(
    page,
    tmp_path,
    monkeypatch,
    capsys,
):
    if page == "hugging_face":
        pytest.importorskip("peft")

    monkeypatch.chdir(tmp_path)
    text = (HOWTO / f"{page}.md").read_text()
    blocks = re.findall(r"```python.*?\n(.*?)```", text, flags=re.DOTALL)
    code = "\n".join(blocks)
    shown_lines = re.findall(r"^print\(.*\)  # (tensor.*)$", code, flags=re.MULTILINE)

    assert shown_lines

    namespace = {"__name__": "guide"}
    exec(code, namespace)
    output = capsys.readouterr().out
    printed_lines = re.findall(r"^tensor.*$", output, flags=re.MULTILINE)

    for printed_line, shown_line in zip(printed_lines, shown_lines, strict=True):
        expected = pytest.approx(numbers_in(shown_line), abs=0.05, nan_ok=True)
        assert numbers_in(printed_line) == expected


def numbers_in(line: str) -> list[float]:
    values, _, _dtype = line.partition(", dtype")
    numerals = re.findall(r"-?\d+\.?\d*|nan", values)
    return [float(numeral) for numeral in numerals]
