"""Inference of a data dictionary: its questions, and what a site's dictionary reveals of its rows."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from flsv.data import OneClient
from flsv.tables import Column, Dictionary
from flsv.tables.inference import inferred_column, isolated_numbers
from flsv.tables.merger import merge
from flsv.tables.source import OpenQuestions
from helpers import refused, warns
from helpers.data import set_up_data

NUM_ROWS = 120


def make_columns(seed=0):
    """Columns of a hospital, of which no one is asked about."""
    draw = np.random.default_rng(seed)
    return {
        "age": draw.integers(18, 95, NUM_ROWS),
        "hb": draw.normal(13, 1.5, NUM_ROWS).round(1),
        "crp": draw.lognormal(2, 1.2, NUM_ROWS).round(1),
        "income": draw.lognormal(10.5, 0.7, NUM_ROWS).round(),
        "smoker": draw.integers(0, 2, NUM_ROWS),
        "died": draw.choice(["no", "yes"], NUM_ROWS),
    }


def infer_of(table, dictionary=None, pos_label=None):
    """Return what a site infers of its table."""
    source = table if isinstance(table, str) else pd.DataFrame(table)
    options = {"labels": "died", "pos_label": pos_label, "dictionary": dictionary}
    try:
        data = set_up_data(source, OneClient(), server_val=0.0, **options)
    except OpenQuestions as questions:
        return questions.dictionary
    return data.dictionary


def table_of(column, name="x"):
    """Return a table with one column beside a constant one."""
    cells = np.asarray(column, dtype=object)
    columns = {"constant": 1.5, name: np.resize(cells, NUM_ROWS), "died": make_columns()["died"]}
    return pd.DataFrame(columns).infer_objects()


def questions_of(column, name="x", **options):
    """Return what is asked about a column of a site's table."""
    table = table_of(column, name)
    inferred = infer_of(table, {"columns": {name: options}})
    return inferred.questions


# Isolated values


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("hb", -999),
        ("age", 999),
        ("age", -9),
        ("crp", 9999),
        ("smoker", 9),
        ("hb", -888),
        ("hb", 130),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 10])
def test_value_that_is_isolated_is_asked_about_however_few_its_rows(name, code, num_rows):
    column = make_columns()[name].astype(float)
    column[:num_rows] = code

    (question,) = questions_of(column, name)
    bound = "low" if code < 0 else "high"

    assert question.startswith(f"{name}: ")
    assert "is farther from all other values" in question
    assert not questions_of(column, name, **{bound: code})
    assert not questions_of(column, name, gaps=[str(code)])


def skewed_columns(draw, num_rows):
    is_zero = draw.random(num_rows) < 0.5
    hours = draw.uniform(30, 40, num_rows)
    log_odds = draw.normal(4, 1, num_rows)
    saturations = 100 / (1 + np.exp(-log_odds))
    return {
        "incomes": draw.lognormal(10, 0.8, num_rows).round(),
        "incomes with a heavy tail": draw.pareto(2.5, num_rows),
        "laboratory values": draw.lognormal(1, 1.5, num_rows).round(2),
        "counts": draw.poisson(0.3, num_rows),
        "counts of few": draw.negative_binomial(0.3, 0.1, num_rows),
        "hours, or none": np.where(is_zero, 0, hours),
        "saturations": saturations.round(),
        "changes": draw.standard_t(4, num_rows),
        "doses": draw.choice([5, 10, 20], num_rows),
        "two codes": draw.choice([8, 9], num_rows),
    }


def test_ordinary_skewed_columns_are_hardly_ever_asked_about():
    draw = np.random.default_rng(0)
    times_asked_about = Counter()
    for num_rows in [20] * 100 + [60] * 100 + [120] * 100 + [500] * 100:
        for name, column in skewed_columns(draw, num_rows).items():
            is_asked_about = len(isolated_numbers(column.astype(float))) > 0
            times_asked_about[name] += is_asked_about

    assert max(times_asked_about.values()) <= 4  # of 400


@pytest.mark.skipif(pd.__version__ < "3", reason="dates of pandas before 3 end in 2262")
def test_date_that_is_isolated_is_asked_about():
    dates = pd.date_range("2024-01-20", periods=NUM_ROWS)
    days = dates.strftime("%Y-%m-%d").tolist()
    days[3] = "9999-12-31"

    (question,) = questions_of(days, kind="days since 1970")

    assert "'9999-12-31' is farther" in question


def test_number_to_predict_that_is_isolated_is_warned_of():
    columns = make_columns()
    target = columns["hb"].copy()
    target[5] = -999

    with warns("-999 in the target 'died' is farther"):
        infer_of({**columns, "died": target}, {"task": "regression"})


# Codes, units and identifiers


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["01234", "10115", "80331"], "categories"),
        (["01", "02", "11"], "categories"),
        (["+4930", "+4989"], "categories"),
        (["-07", "12"], "categories"),
        (["12.5", "13"], "numbers"),
        (["+3", "0", "-2"], "whole numbers"),
    ],
)
@pytest.mark.parametrize("dtype", ["object", "string", "file"])
def test_text_codes_are_categories(texts, kind, dtype, tmp_path):
    table = table_of(texts)
    if dtype == "file":
        file = tmp_path / "Lyon.csv"
        table.to_csv(file, index=False)
        table = str(file)
    else:
        table = table.astype({"x": dtype})

    assert infer_of(table).columns["x"].kind == kind


@pytest.mark.parametrize(
    ("texts", "unit", "numbers"),
    [
        (["4.2 mg/l", "12 mg/l", "0.5 mg/l"], "mg/l", [4.2, 12, 0.5]),
        (["89 %", "97 %", "91%"], "%", [89, 97, 91]),
        (["5mg", "10 mg", "20"], "mg", [5, 10, 20]),
    ],
)
def test_numbers_with_units_are_asked_about_and_read_by_their_unit(texts, unit, numbers):
    (question,) = questions_of(texts)
    assert "unit" in question

    inferred = infer_of(table_of(texts), {"columns": {"x": {"unit": unit}}})
    assert inferred.columns["x"].mean == pytest.approx(np.mean(numbers), abs=0.1)


@pytest.mark.parametrize(
    ("values", "options", "question"),
    [
        (
            ["4.2 mg/l", "0.4 mg/dl"],
            {"unit": "mg/l"},
            "the other fields are numbers, but this one is '0.4 mg/dl'",
        ),
        (["1 234,5", "78,5", "1\u202f250"], {}, "a number in another format"),
        ([1, "1"], {}, "has values of several types"),
        (["St", "St."], {}, "look like spellings of one name"),
    ],
)
def test_fields_of_unclear_meaning_are_asked_about(values, options, question):
    (question_of_column,) = questions_of(values, **options)
    assert question in question_of_column


@pytest.mark.parametrize("texts", [["1st", "2nd", "3rd"], ["A 1", "B 2"], ["1 A to", "x"]])
def test_words_with_numbers_are_categories(texts):
    assert not questions_of(texts)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("patient", range(1000, 1040)),  # each has three visits
        ("patient_id", [f"P{number}" for number in range(40)]),
        ("case", np.random.default_rng(0).integers(100_000, 999_999, 30).tolist()),
        ("x", range(5000, 5120)),
    ],
)
def test_identifiers_are_asked_about_also_if_they_repeat(name, values):
    (question,) = questions_of(list(values), name)
    assert "as an identifier of persons or cases has" in question
    assert not questions_of(list(values), name, kind="categories")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("case", [0, 1]),
        ("humidity", range(20, 90)),
        ("paid", range(40)),
    ],
)
def test_other_columns_are_no_identifiers(name, values):
    assert not questions_of(list(values), name)


# Merging


def infer_with_words(words, **options):
    column = {"kind": "categories", **options}
    return infer_of(table_of(words), {"columns": {"x": column}})


@pytest.mark.parametrize(
    ("words_of_sites", "is_asked"),
    [
        ([["0", "1"], ["1", "2"]], True),
        ([["0", "1"], ["no", "yes"]], True),
        ([["0", "1"], ["1", "2"], ["no", "yes"]], True),
        ([["01067", "04109"], ["10115", "80331"]], True),
        ([["A", "B"], ["B", "C"]], False),
        ([["A", "B", "C"], ["A"]], False),
    ],
)
def test_categories_that_tell_the_site_are_asked_about(words_of_sites, is_asked):
    dictionary_by_site = {}
    for number, words in enumerate(words_of_sites):
        dictionary_by_site[f"site {number}"] = infer_with_words(words)

    merged, _ = merge(dictionary_by_site)
    in_other_order, _ = merge(dict(reversed(dictionary_by_site.items())))

    assert bool(merged.questions) == is_asked
    assert sorted(merged.questions) == sorted(in_other_order.questions)


def test_question_about_categories_that_tell_the_site_is_answered_by_all_categories():
    words_of_sites = {"Boston": ["0", "1"], "Lyon": ["no", "yes"]}
    all_words = ["0", "1", "no", "yes"]
    inferred = {}
    answered = {}
    for site, words in words_of_sites.items():
        inferred[site] = infer_with_words(words)
        answered[site] = infer_with_words(words, categories=all_words)

    merged, _ = merge(inferred)
    merged_answers, _ = merge(answered)

    assert "the model would learn which site a row is from" in merged.questions[0]
    assert not merged_answers.questions


def test_sites_with_several_units_are_asked():
    dictionary_by_site = {}
    for number, unit in enumerate(["mg/l", "mg/dl"]):
        table = table_of(make_columns(number)["hb"])
        dictionary = {"columns": {"x": {"unit": unit}}}
        dictionary_by_site[f"site {number}"] = infer_of(table, dictionary)

    merged, _ = merge(dictionary_by_site)

    (question,) = merged.questions
    assert "mg/l at site 0 and mg/dl at site 1" in question


def test_site_with_one_class_is_told_how_to_name_both():
    columns = {**make_columns(), "died": ["no"] * NUM_ROWS}

    with refused('classes: \\["no", "yes"\\]'):
        infer_of(columns, pos_label="yes")

    inferred = infer_of(columns, {"classes": ["no", "yes"]}, pos_label="yes")
    assert inferred.class_counts == (NUM_ROWS, 0)


@pytest.fixture
def dictionary_with_a_question():
    """A merged dictionary with a question about the column x, as YAML has it."""
    inferred = {"Boston": infer_with_words(["0", "1"]), "Lyon": infer_with_words(["no", "yes"])}
    merged, _ = merge(inferred)
    return merged.to_plain()


def test_question_is_answered_by_excluding_the_column(dictionary_with_a_question):
    excluded_columns = {"x": "no question"}

    answered = Dictionary.from_plain({**dictionary_with_a_question, "excluded": excluded_columns})

    assert answered.is_complete
    assert not answered.questions


def test_question_is_not_answered_by_the_kind_of_the_column_alone(dictionary_with_a_question):
    columns = {**dictionary_with_a_question["columns"], "x": {"kind": "categories"}}

    incomplete = Dictionary.from_plain(
        {**dictionary_with_a_question, "columns": columns, "excluded": {}}
    )

    assert "categories of 'x' are missing" in incomplete.missing_parts


def test_inferred_dictionary_has_no_local_path(tmp_path):
    columns = make_columns()
    columns["hb"][3] = -999
    file = tmp_path / "Lyon.csv"
    pd.DataFrame(columns).to_csv(file, index=False)

    inferred = infer_of(str(file))

    (question,) = inferred.questions
    assert question.startswith("hb: Lyon.csv, line 5: '-999")
    assert str(tmp_path) not in inferred.to_text()


# What an inferred dictionary reveals


def guess_age_by_difference(inferred):
    """As an attacker does who knows that ``derived`` has all ages but one: subtract the two columns' sums."""
    sum_of_all = NUM_ROWS * inferred.columns["age"].mean
    sum_of_others = (NUM_ROWS - 1) * inferred.columns["derived"].mean
    return sum_of_all - sum_of_others


def test_inferred_dictionary_reveals_no_value_of_a_row_with_a_gap_beside_it():
    errors = []
    for row in range(20):
        columns = make_columns(row)
        age = columns["age"].astype(float)
        derived = age.copy()
        derived[row] = np.nan
        inferred = infer_of({"age": age, "derived": derived, "died": columns["died"]})

        derived_column = inferred.columns["derived"]
        assert derived_column.missing == 0
        assert derived_column.count == NUM_ROWS
        assert derived_column.gaps  # as the features need
        errors.append((guess_age_by_difference(inferred) - age[row]) / age.std())

    # Who guesses the mean of all errs by one deviation.
    assert np.sqrt(np.mean(np.square(errors))) > 0.35
    is_close = np.abs(errors) < 0.02
    assert is_close.mean() < 0.2


@pytest.mark.parametrize("num_rows", [0, 1, 2, 4])
def test_inferred_dictionary_hides_what_fewer_than_five_rows_have(num_rows):
    is_of_few = np.arange(NUM_ROWS) < num_rows
    hb = make_columns()["hb"]
    columns = {
        "code": is_of_few.astype(int),
        "truth": is_of_few,
        "word": np.where(is_of_few, "A", "B"),
        "few_gaps": np.where(is_of_few, np.nan, hb),
        "few_values": np.where(is_of_few, hb, np.nan),
        "died": np.where(is_of_few, "yes", "no"),
    }

    inferred = infer_of(columns, {"classes": ["no", "yes"]})

    assert inferred.class_counts == (NUM_ROWS - num_rows, 0)
    assert inferred.columns["word"].categories == ("B",)
    for name in ("code", "truth"):
        assert inferred.columns[name].mean == 0
        assert inferred.columns[name].scale == 0
    assert inferred.columns["few_gaps"].count == NUM_ROWS
    assert inferred.columns["few_values"].count == 0
    assert inferred.columns["few_values"].mean == 0
    assert inferred.columns["few_values"].low is None


def test_inferred_dictionary_reveals_the_largest_value_by_its_first_digit_only():
    ratios = []
    for seed in range(25):
        draw = np.random.default_rng(seed)
        incomes = draw.lognormal(10.5, 1.2, NUM_ROWS)
        high = infer_of(table_of(incomes)).columns["x"].high
        assert high is not None
        assert high > incomes.max()
        ratios.append(high / incomes.max())

    # An attacker divides by the usual ratio.
    errors = np.abs(ratios / np.median(ratios) - 1)
    is_close = errors < 0.0047
    assert is_close.mean() < 0.15


def test_means_and_scales_of_sites_have_three_digits():
    numbers = np.random.default_rng(0).normal(62, 14, 20_000)
    mean = numbers.mean()
    deviation = numbers.std()

    column = inferred_column(Column("numbers"), pd.Series(numbers), leaves_site=True)

    digits_of_scale = f"{column.scale:g}".replace(".", "")
    assert len(digits_of_scale) <= 4
    assert column.scale == pytest.approx(deviation, rel=1 / 1000)
    assert column.mean == pytest.approx(mean, abs=deviation / 1000)
    assert column.mean != pytest.approx(mean, abs=deviation / 1e6)
