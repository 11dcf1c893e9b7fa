"""Sentences with figures, of README and of the pages that a newcomer reads first, computed from the files of results.

A source's docstring says by which command its file was made.
"""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import yaml
from scipy import stats

ROOT = Path(__file__).parents[2]
NUMBER = r"[+-]?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:e[+-]\d+)?"


def table(file, where="index == index", by=None):
    """A CSV file's rows. One of cells is a dictionary by (table, row, column)."""
    rows = pd.read_csv(ROOT / file).query(where)
    if [*rows] == ["table", "row", "column", "value"]:
        cells = rows.set_index(["table", "row", "column"])
        assert cells.index.is_unique, f"{file} has a cell twice"
        return cells["value"].map(number_of_cell).to_dict()
    if by is None:
        return rows
    indexed = rows.set_index(by)
    assert indexed.index.is_unique, f"{file} has a row twice"
    return indexed


def number_of_cell(cell):
    return float(cell) if re.fullmatch(NUMBER, str(cell)) else cell


def numbers(text):
    return [float(number) for number in re.findall(NUMBER, text)]


def read_yaml(folder):
    """What the YAML files of a folder say."""
    return [yaml.safe_load(path.read_text()) for path in sorted((ROOT / folder).glob("*.yaml"))]


@cache
def quickstart():
    """By: flsv fit --config quickstart, then python tools/quickstart_picture.py RUN, which draws them, too."""
    t = table("docs/results/quickstart.csv", by=["what", "client"])
    low = t.number["low"]
    high = t.number["high"]
    start = 100 * t.number["accuracy at the start"].iloc[0]
    end = 100 * t.number["accuracy at the end"].iloc[0]
    return SimpleNamespace(**locals())


@cache
def hospitals():
    """By: flsv fit --config federation.yaml."""
    t = table("docs/results/hospitals.csv", by=["what", "client_name"])
    gains = t.number["value"].clip(lower=0)
    shares = 100 * gains / gains.sum()
    negatives = 100 * t.number["share of no"].iloc[0]
    return SimpleNamespace(**locals())


@cache
def predicted():
    """By: tools/studies/predicted.py of commit 1e773190."""
    t = table("docs/results/predicted.csv")
    means = t.groupby("way")[["misallocated_percent", "rank"]].mean()
    wide = t.pivot(index="federation", columns="way", values="misallocated_percent")
    over = wide["alone, predicted"] - wide["exact"]
    half = stats.t.ppf(0.95, len(over) - 1) * over.sem()
    return SimpleNamespace(**locals())


@cache
def ordinary():
    """By: python tools/costs.py ordinary."""
    t = table("docs/results/ordinary.csv")
    return SimpleNamespace(**locals())


@cache
def kills():
    """By: python tools/kill_trials.py."""
    t = table("docs/results/kills.csv")
    differ = t["that differ"].str.extract(r"(?P<count>\d+)(?: \((?P<why>.*)\))?")
    number = differ["count"].astype(int)
    alive = number[differ.why.str.contains("alive", na=False)].sum()
    folder = number[differ.why.str.contains("folder", na=False)].sum()
    return SimpleNamespace(**locals())


@cache
def stops():
    """By: python tools/kill_trials.py --stop N."""
    t = table("docs/results/stops.csv")
    seconds = t["seconds until it ended"]
    faults = t.fault.notna().sum()
    return SimpleNamespace(**locals())


@cache
def usual():
    """By: tools/studies/usual.py of commit ec25f611."""
    t = table("docs/results/usual.csv")
    means = t.groupby("method").misallocated_percent.mean()
    return SimpleNamespace(**locals())


@cache
def halvings():
    """By: tools/studies/halvings.py of commit ec25f611."""
    t = table("docs/results/halvings.csv", where="seeds == 1")
    wide = t.pivot(index="federation", columns="way", values="misallocated_percent")
    thirty = wide[wide["alone and one halving, by first updates"].isna()]
    means = thirty.mean()
    return SimpleNamespace(**locals())


@cache
def at_once():
    """By: tools/studies/at_once.py of commit d50b1a2e."""
    thirty = table("docs/results/at_once.csv", where="seeds == 3")
    means = {
        name: thirty[f"{name}_other_seeds_percent"].mean() for name in ("default", "exact", "alone")
    }
    return SimpleNamespace(**locals())


@cache
def examples():
    """By: tools/studies/usual.py of commit ec25f611."""
    t = table("docs/results/examples.csv")
    paid = t.set_index("example").percent
    return SimpleNamespace(**locals())


@cache
def benchmark():
    """By: python tools/bench.py --federations fresh --seeds 4."""
    t = table("docs/results/benchmark.csv", where="set == 'fresh'", by="metric")
    percent = 100 * t.misallocated
    every = 'ShadowShapley(coalitions="all",every=1000)'
    return SimpleNamespace(**locals())


@cache
def federations():
    """By: the files of the benchmark."""
    t = read_yaml("tools/benchmark/federations")
    sets = [federation.get("set", "held_out") for federation in t]
    return SimpleNamespace(**locals())


@cache
def rounds():
    """By: python tools/costs.py round/lenet round/mlp in-run --repeats 5."""
    t = table("docs/results/round.csv")
    lenet = {key[1:]: value for key, value in t.items() if key[0] == "A round: lenet"}
    mlp = {key[1:]: value for key, value in t.items() if key[0] == "A round: mlp (784-200-200-10)"}
    alone = "Lightning's Trainer alone"
    shown = [
        "plain PyTorch",
        alone,
        "FederatedLoop",
        "+ CSSV, TensorBoard, CSV",
        "+ progress bar, checkpoints",
    ]
    spread = [
        (lenet[row, "max"] - lenet[row, "min"]) / lenet[row, "median s/round"] for row in shown
    ]
    added = {
        n: [numbers(value)[0] for key, value in t.items() if key[2] == f"`every={n}`"]
        for n in (1, 8)
    }
    return SimpleNamespace(**locals())


@cache
def ranks():
    """By: python tools/costs.py round/lenet round/resnet18 --only "plain PyTorch" FederatedLoop "two ranks"."""
    t = table("docs/results/ranks.csv")
    lenet = {
        key[1]: value
        for key, value in t.items()
        if key[0].startswith("LeNet5") and key[2] == "wall ratio"
    }
    resnet = {
        key[1]: value
        for key, value in t.items()
        if key[0].startswith("ResNet-18") and key[2] == "wall ratio"
    }
    return SimpleNamespace(**locals())


@cache
def engines():
    """By: python tools/costs.py round/softmax100 round/mlp50 --only "plain PyTorch" FederatedLoop vmap."""
    t = table("docs/results/engines.csv")
    ratio = {key[1]: value for key, value in t.items() if key[2] == "CPU ratio"}
    million = t["Very many clients in one process", "1,000,000 (3 rounds)", "CPU s a round"]
    return SimpleNamespace(**locals())


@cache
def many_clients():
    """By: python tools/costs.py clients --repeats 1."""
    t = table("docs/results/many_clients.csv", by=["clients"])
    ratio = t / t.iloc[0]
    return SimpleNamespace(**locals())


@cache
def tests():
    """By: pytest -n 2 --dist loadfile --durations=40, and make slow."""
    t = table("docs/results/tests.csv")
    all_tests = t.set_index("what").loc["pytest -n 2 --dist loadfile"]
    slow_tests = t.set_index("what").loc["pytest -n 3 --dist loadfile -m slow"]
    quickstart = t.seconds.iloc[:2].mean()
    return SimpleNamespace(**locals())


@cache
def networks():
    """By: python tools/costs.py networks --repeats 1."""
    t = table("docs/results/networks.csv")
    seconds = t.pivot(index="sites", columns="network", values="seconds a round")
    return SimpleNamespace(**locals())


@cache
def size():
    """By: tools/bench_size.py of commit 49d7ccac."""
    t = table("docs/results/size.csv")
    models = {key[1]: value for key, value in t.items() if key[2] == "models"}
    many = {key[2]: value for key, value in t.items() if key[1].startswith("100,000")}
    return SimpleNamespace(**locals())


@cache
def retrain():
    """By: tools/run_table.py retrain of commit 49d7ccac."""
    t = table("docs/results/retrain.csv", where='table == "designs, fresh (14 federations)"')
    fresh = {key[1:]: value for key, value in t.items()}
    return SimpleNamespace(**locals())


@cache
def seeds():
    """By: the program of docs/results/retrain.md of commit 9973349d."""
    t = table("docs/results/seeds.csv")
    return SimpleNamespace(**locals())


@cache
def client_evaluation():
    """By: tools/judges.py of commit e0a2168d."""
    t = table("docs/results/client_evaluation.csv", where='federation.str.startswith("drawn")')
    rank = t.groupby("by")["rank"].mean()
    return SimpleNamespace(**locals())


@cache
def projects():
    """By: tools/studies/public_projects.py of commit 9973349d."""
    t = table("docs/results/public_projects.csv")
    counted = [
        value
        for key, value in t.items()
        if key[2] == "coalitions" and (not value.startswith("not counted"))
    ]
    valued = sum(not value.startswith("refused") for value in counted)
    return SimpleNamespace(**locals())


def sentences_of_readme():
    source = quickstart()
    yield f"From {source.start:.1f} to {source.end:.1f} % accuracy"

    source = predicted()
    yield f"[{source.t.federation.nunique()} held-out federations](docs/results/predicted.md):"

    source = predicted()
    rows = {
        "equal pay | 0": "equal pay",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.means.misallocated_percent[key]:.1f} % | |"

    source = predicted()
    rows = {
        "numbers of samples | 0": "counted samples",
        "`ShadowShapley()` on tables and small networks: every group | 2, or half a minute": "exact",
        "`ShadowShapley()` else: each client alone | 1": "alone, predicted",
        "`flsv retrain` on tables and small networks: every group, three seeds | up to 3 n": "exact, 3 seeds",
        "`flsv retrain` else: each client alone and all without it, three seeds | 3 n": "alone and all but one, predicted, 3 seeds",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.means.misallocated_percent[key]:.1f} % | {source.means['rank'][key]:.2f} |"

    source = at_once()
    yield f"On [{len(source.thirty)} federations as people train them]"
    yield f"misallocates {source.means['default']:.1f} %, as every group does, and each client alone {source.means['alone']:.1f} %"

    # not measured: the level of the intervals
    yield "90 % intervals"

    # not measured: the sizes of torch's wheels
    yield "first saves 2 GB"

    # not measured: the license's version
    yield "Apache-2.0"


def sentences_of_tutorials_hospitals():
    source = hospitals()
    rows = {
        "Boston": "Boston",
        "Lyon": "Lyon",
        "Osaka": "Osaka",
        "Quito": "Quito",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.shares[key]:.1f} % |"

    source = hospitals()
    yield f"right for {source.negatives:.0f} % of patients"

    # not measured: what flsv retrain prints, which tests/docs/test_walkthroughs.py compares
    yield "37.2 % | 0.132 [0.091, 0.172]"
    yield "37.2 % | 0.132 [0.095, 0.167]"
    yield "25.6 % | 0.091 [0.067, 0.115]"
    yield "0.0 % | -0.005 [-0.019, 0.009]"

    # not measured: the level of the intervals
    yield "with 90 % interval"


def sentences_of_index():
    source = quickstart()
    yield f"From {source.start:.1f} to {source.end:.1f} % accuracy"

    # not measured: the sizes of torch's wheels
    yield "first saves 2 GB"


def sentences_of_trust():
    source = examples()
    yield f"Each is paid {source.paid['a client and its copy']:.1f} % of a payment, and {source.paid['the client without its copy']:.1f} % where the other is away"
    yield f"{source.paid['random labels, exact']:.1f} % by all coalitions, and {source.paid['random labels, alone']:.1f} % by each client alone"

    # not measured: a client's random labels
    yield "80 % random labels"

    # not measured: bits of a number with three digits, and with an exponent
    yield "up to 16 from a loss"

    # not measured: names
    yield "SHAKE-256"

    # not measured: rows read from keyed hashes, and seconds, on 28 November 2026 with 650,000 hashes a second
    yield "in 0.01 s"
    yield "43 % of three columns"

    # not measured: rows found in one update by gradient inversion, and numbers of rules
    yield "43 of 60 rows in one"
    yield "counts from 1,000 on"
    yield "0 for fewer than five"


def sentences_of_reliability():
    source = kills()
    runs = source.t.trials.sum()
    yield f"{runs} runs were killed {source.t.kills.sum()} times"
    yield f"{runs - source.number.sum()} of them ended like a run that was never killed"
    yield f"Of the others {source.folder}, of coalitions on two ranks, left a folder"
    yield f"{source.alive}, a `flsv repeat`, was still alive"

    source = stops()
    assert source.faults == 0
    yield f"{len(source.t)} further commands"
    yield f"after at most {source.seconds.max():.1f} seconds"

    # not measured: a limit of the trials
    yield "after 30 seconds"

    # not measured: what is read, and statuses
    yield "whole numbers from 0"
    yield "8-bit nor"
    yield "status 130 or 143"


def sentences_of_benchmark():
    source = federations()
    yield f"All coalitions of {len(source.t)} federations"
    yield f"{source.sets.count('tuning')} federations for tuning, {source.sets.count('held_out')} held out, {source.sets.count('fresh')} *fresh* ones"

    source = benchmark()
    yield f"has a rank correlation of {source.t.rank_correlation[source.every]:.3f} on the fresh federations, and misallocates {source.percent[source.every]:.0f} % of a payment"
    yield f"has {source.t.rank_correlation['blended']:.3f} and misallocates {source.percent['blended']:.0f} %"
    yield f"`CosineGradientShapley` has {source.t.rank_correlation['cgsv']:.3f}, `ClassSpecificShapley` {source.t.rank_correlation['cssv']:.3f}"
    yield f"Counting samples has {source.t.rank_correlation['size']:.3f}"

    source = predicted()
    yield f"misallocates {source.means.misallocated_percent['alone, predicted']:.1f} % on [{source.t.federation.nunique()} other federations]"
    yield f"where all coalitions misallocate {source.means.misallocated_percent['exact']:.1f} %"

    source = benchmark()
    rows = {
        "`BlendedContribution()`": "blended",
        "`OneRoundShapley()`": "one_round",
        "`DecayedShapley(decay=0.8, normalize=False)`": "decayed_sum",
        "`GradientAgreement()`": "gradient_agreement",
        '`CumulativeShapley(weighting="samples")`': "fedsv_samples",
        "`CosineGradientShapley()`": "cgsv",
        "counting samples": "size",
        '`ShadowShapley(coalitions="all")`': 'ShadowShapley(coalitions="all",every=1000)',
        '`ShadowShapley(coalitions="singles")`': "shadow",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.t.rank_correlation[key]:.3f} ± {source.t.interval[key]:.3f} | {source.t.worst[key]:.2f} | {source.percent[key]:.1f} |"

    rows = {
        "`ClassSpecificShapley()`": "cssv",
        "`InRunShapley()`": "in_run",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.t.rank_correlation[key]:.3f} ± {source.t.interval[key]:.3f} ({source.t.federations[key]} of {source.t.federations[source.every]}) | {source.t.worst[key]:.2f} | {source.percent[key]:.1f} |"

    # not measured: the level of the intervals
    yield "90 % interval"

    # not measured: dates of the history
    yield "28 November 2026"
    yield "22 November at 11:00"
    yield "23 November"


def sentences_of_results_performance():
    source = tests()
    yield f"takes {source.all_tests.quickstarts:.1f} quickstarts ({source.all_tests.seconds:.0f} s, with a quickstart of {source.quickstart:.0f} s"
    yield f"`make slow` takes {source.slow_tests.quickstarts:.0f} ({source.slow_tests.seconds:,.0f} s)"

    source = ordinary()
    yield f"[{source.t.times.min():.2f} to {source.t.times.max():.2f} times](retrain.md#what-it-costs)"

    # not measured: the hardware and the day
    yield "two cores without other work, 30 November 2026"

    source = rounds()
    yield f"**LeNet5 takes {source.lenet['FederatedLoop', 'ratio']:.3f} times a plain loop's time**, Lightning's Trainer alone {source.lenet[source.alone, 'ratio']:.3f}"
    yield f"spread by {100 * min(source.spread):.0f} to {100 * max(source.spread):.0f} % of their median"
    yield f"takes {source.lenet['FederatedLoop', 'median s/round'] / source.lenet[source.alone, 'median s/round']:.2f} times as long as Lightning's Trainer, {source.lenet['+ CSSV, TensorBoard, CSV', 'median s/round'] / source.lenet[source.alone, 'median s/round']:.2f} times with CSSV"
    yield f"the loop takes {source.mlp['FederatedLoop', 'ratio']:.3f} times as long as plain PyTorch, Lightning alone {source.mlp[source.alone, 'ratio']:.3f}"
    yield f"adds {min(source.added[1]):.0f} to {max(source.added[1]):.0f} % at `every=1` and {min(source.added[8]):.0f} to {max(source.added[8]):.0f} % at `every=8`"

    source = rounds()
    rows = {
        "plain PyTorch": "plain PyTorch",
        "Lightning's Trainer alone": "Lightning's Trainer alone",
        "`FederatedLoop`": "FederatedLoop",
        "+ CSSV, TensorBoard, CSV": "+ CSSV, TensorBoard, CSV",
        "+ progress bar, checkpoints": "+ progress bar, checkpoints",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.lenet[key, 'median s/round']:.4f} | {source.lenet[key, 'ratio']:.3f} |"

    source = ranks()
    yield f"**Two ranks take {source.lenet['two ranks']:.2f} of the time**"
    yield f"| LeNet5, 10 clients | two ranks | {source.lenet['two ranks']:.2f} |"
    yield f"| LeNet5, 10 clients | two plain loops side by side | {source.lenet['two plain half-loops']:.2f} |"
    yield f"| ResNet-18, 4 clients of two batches | two ranks | {source.resnet['two ranks']:.2f} |"

    source = engines()
    yield f"""| 100 softmax regressions | `sequential` | {source.ratio['softmax (7,850), 100 clients | engine="sequential"']:.2f} |"""
    yield f"""| 100 softmax regressions | `vmap` | {source.ratio['softmax (7,850), 100 clients | engine="vmap", 100 at once']:.2f} |"""
    yield f"""| 50 MLPs | `sequential` | {source.ratio['mlp (50,890), 50 clients | engine="sequential"']:.2f} |"""
    yield f"""| 50 MLPs | `vmap` | {source.ratio['mlp (50,890), 50 clients | engine="vmap", 50 at once']:.2f} |"""
    yield f"A round of 10 of 1,000,000 clients takes {source.million:.1f} CPU seconds"

    source = many_clients()
    rows = {
        "10": 10,
        "100": 100,
        "1,000": 1000,
        "10,000": 10000,
    }
    for row, key in rows.items():
        yield f"| {row} | {source.t['before the rounds (s)'][key]:.3g} ({source.ratio['before the rounds (s)'][key]:.3g}) | {source.t['a round (s)'][key]:.3g} ({source.ratio['a round (s)'][key]:.3g}) | {source.t['after the last round (s)'][key]:.3g} ({source.ratio['after the last round (s)'][key]:.3g}) | {source.t['memory (GiB)'][key]:.3g} ({source.ratio['memory (GiB)'][key]:.3g}) | {source.t['folder (MiB)'][key]:.3g} ({source.ratio['folder (MiB)'][key]:.3g}) |"

    source = networks()
    rows = {
        "2": 2,
        "3": 3,
        "5": 5,
        "10": 10,
    }
    for row, key in rows.items():
        yield f"| {row} | {source.seconds['one process'][key]:.2f} | {source.seconds['flower'][key]:.2f} | {source.seconds['nvflare'][key]:.2f} |"

    source = networks()
    yield f"The server's process takes about {source.t['server, GB'].max():.0f} GB"

    source = size()
    rows = {
        "`FedAvg` | 10": "FedAvg | 10",
        "`FedAvg` | 30": "FedAvg | 30",
        "`FedAdam` | 10": "FedAdam | 10",
    }
    for row, key in rows.items():
        yield f"| {row} | {source.models[key + ' | in memory']:.2f} | {source.models[key + ' | in a file']:.2f} |"

    rows = {
        "`ClassSpecificShapley` | 30": "ClassSpecificShapley | 30",
        "`SCAFFOLD` | 10": "SCAFFOLD | 10",
    }
    for row, key in rows.items():
        yield f"| {row} | | {source.models[key + ' | in a file']:.2f} |"

    yield f"the first round starts after {source.many['before the first round']:.0f} seconds and a round takes {source.many['at last']:.2f} seconds"

    # not measured: versions and dates
    yield "torch 2.15.0"
    yield "lightning 2.6.6"
    yield "20 to 25 November 2026"
    yield "Commit 49d7ccac's"

    # not measured: what the commands run by default
    yield "600 Fashion-MNIST images each, in batches of 32"
    yield "100 softmax regressions"
    yield "50 MLPs"
    yield "LeNet5, 10 clients"
    yield "ResNet-18, 4 clients"
    yield "10 of 1,000,000 clients"
    yield "25 million parameters (100 MB)"
    yield "100,000 clients, 100 a round"

    # not measured: advice
    yield "Take 8 for values of clients and classes, and 1 for values of samples"


def sentences_of_explanation_metrics():
    # not measured: numbers of fits and of evaluations, for n clients of which k are in a cohort
    yield "2^k evaluations"
    yield "k + 1"
    yield "2^n evaluations"

    # not measured: bounds and units of values
    yield "[-1, 1]"
    yield "share, sums to 1 |"
    yield "[0, 1]"
    yield "0 means"


def sentences_of_results_readme():
    source = usual()
    yield f"As people train, {source.means['alone, predicted']:.1f} % and {source.means['exact']:.1f} % on {source.t.federation.nunique()} federations"

    source = benchmark()
    yield f"the best has {100 * source.t.of_ceiling.drop(['shadow', source.every]).max():.0f} % of the ceiling"
    yield f"| [the benchmark](../benchmark.md) | {100 * source.t.of_ceiling[source.every]:.0f} % of the ceiling |"

    source = predicted()
    yield f"nearly: {source.means.misallocated_percent['alone, predicted']:.1f} % misallocated, {source.means.misallocated_percent['exact']:.1f} % by all coalitions, on {source.t.federation.nunique()} held-out federations"

    source = halvings()
    yield f"no: {source.means['alone and one halving'] - source.means['exact']:.1f} points behind on {len(source.thirty)}"

    source = retrain()
    yield f"(retrain.md) | nearly: {100 * source.fresh['each alone, all but one', 'the fit: share error']:.1f} % misallocated, {100 * source.fresh['all 2^n', 'the fit: share error']:.1f} % by all coalitions"

    source = federations()
    yield f"on {source.sets.count('fresh')} fresh federations"

    source = seeds()
    yield f"{100 * source.t.misallocated.mean():.1f} % misallocated by three other seeds of all coalitions"

    source = client_evaluation()
    yield f"{source.rank['clients']:.2f} for {source.rank['server']:.2f}, of clients"

    source = rounds()
    yield f"A round takes {source.lenet['FederatedLoop', 'ratio']:.2f} times as long as a plain loop"
    yield f"an MLP's takes {source.mlp['FederatedLoop', 'ratio']:.2f}"

    source = projects()
    yield f"{source.valued} of {len(source.counted)}, the others refused before training"

    # not measured: numbers of trainings, for n clients
    yield "as all 2^n coalitions would"

    # not measured: years of publications, and names and levels of intervals
    yield "CIFAR-10"
    yield "KDD 2023"
    yield "IEEE TMC 2024"
    yield "IJCAI 2024"
    yield "Sensors 2024"
    yield "CVPR 2024"
    yield "95 % interval"
    yield "excludes 0"

    # not measured: a size that was tried
    yield "yes, 100,000 clients"

    # not measured: pairs of runs of natural federations, which that page counts
    yield "in 52 of 55 pairs"


#: The sentences of each page.
PAGES = {
    "README.md": sentences_of_readme,
    "docs/tutorials/hospitals.md": sentences_of_tutorials_hospitals,
    "docs/index.md": sentences_of_index,
    "docs/trust.md": sentences_of_trust,
    "docs/reliability.md": sentences_of_reliability,
    "docs/benchmark.md": sentences_of_benchmark,
    "docs/results/performance.md": sentences_of_results_performance,
    "docs/explanation/metrics.md": sentences_of_explanation_metrics,
    "docs/results/README.md": sentences_of_results_readme,
}
