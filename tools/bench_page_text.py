# ruff: noqa: E501 (lines of the page are as long as the page has them)
"""What docs/benchmark.md says around the tables of ``flsv bench``: its numbers are the values', and so is what it claims.

Where the values have changed so that a sentence is not true any more, ``so`` raises and names it: write another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from flsv.benchmark.scores import Results
from flsv.benchmark.summary import GOAL, Cost, Coverage, Known, Summary

NEW = ("in_run", "in_run_2", "fedce", "everybody_else", "everybody_else_loss", "beta_16_1", "beta_1_4", "lower_bound")
MANY = "many clients"
SAMPLED = ("permutation_24", "leverage_24", "adjusted_24", "surrogate_24")
#: Minutes of one core by process time: of one metric, and of all of them, added up from one run of every federation with
#: all metrics (147 s in the fits) and with one (15 s), of 21 federations, times 26 / 21; of a whole --quick, as it says.
MINUTES = (4, 33, 30.5)

#: What fresh_page.py writes, and this page keeps: a section and a row.
MONEY, SHADOW = "Rank and money", "clients can train more than their own model"


def so(holds: bool, sentence: str) -> str:
    """The sentence, if it is true."""
    if not holds:
        raise ValueError(f"the values do not say so any more: {sentence!r}")
    return sentence


def page(summaries: Mapping[str, Summary], known: Known, costs: Mapping[str, Cost], results: Results, old: str) -> str:
    """All that stands before the tables; ``old`` is the page as it was, of which is kept what ``bench_many_page.py`` and
    ``fresh_page.py`` write."""
    return "\n".join(
        part.strip() + "\n"
        for part in (
            _opening(summaries, known, costs),
            _which(summaries, known, costs, {each: kept_row(old, each) for each in (SHADOW, MANY)}),
            kept_section(old, MONEY),
            _others(summaries),
            _intervals(summaries),
            _measured(known),
            _rests_on(summaries, known, results),
        )
    )


def _two(value: float) -> str:
    return f"{value:.2f}"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _opening(s: Mapping[str, Summary], known: Known, costs: Mapping[str, Cost]) -> str:
    tuning = sum(each.set == "tuning" for each, _ in known.values())
    best, images = s["gradient_agreement"], _pictures(s["gradient_agreement"], known)
    game = s["gradient_agreement_game"]
    worst = min(value for name, value in game.spearman.items() if known[name][0].set == "held_out")
    told = [each.intervals for each in s.values() if each.intervals is not None]
    enough = [each for each in told if each.truth >= GOAL]
    return f"""
# The benchmark of contribution metrics

Which contribution metric comes near retrained Shapley values, where, and at what cost? {
        len(known)
    } federations of four to
six clients (images, tables, text), {tuning} for tuning and {len(known) - tuning} held out; every coalition of each was
trained, three to five times. Rank correlation with those values, mean over federations and seeds.

- **Where clients can train more than their own model: `ShadowShapley`**, nearly what all retrainings come to, also
  [where nothing was chosen by looking](results/fresh.md).
- **Else, with validation data at the server: `GradientAgreementGame`**, {
        so(max(s, key=lambda name: s[name].mean) == "gradient_agreement_game", "the best of all")
    }: {_two(game.mean)} ({_two(game.sets["held_out"])} held out, less on [federations of
  other kinds](#rank-and-money)), {1000 * costs["gradient_agreement_game"].seconds:.0f} ms a round.
- **Ten times as fast where classes are of about equal size: `GradientAgreement`**, {_two(_mean(images))} over {
        len(images)
    } held-out federations of images, {1000 * costs["gradient_agreement"].seconds:.1f} ms a round; {
        _two(best.mean)
    } over all.
- **Without validation data: `ClassSpecificShapley` or `CosineGradientShapley`**, {_two(s["cssv"].mean)} and {
        _two(s["cgsv"].mean)
    }. Counting samples has {_two(s["size"].mean)}.
- **Not reached**: the goal of 0.88 held out with no federation below 0.5 (the least has {_two(worst)});
  [what was tried](lab/benchmark.md). Intervals of {len(told) - len(enough)} of {
        len(told)
    } metrics do not hold the truth as often as they say.
- **Not measured**: large models and long runs. With 20 clients: [a page of its own](benchmark_many.md).

![Cost against rank correlation](images/benchmark.png)
"""


def _measured(known: Known) -> str:
    tuning = sum(each.set == "tuning" for each, _ in known.values())
    return f"""
## How it is measured

```
flsv bench --metric my_package.MyMetric          # minutes; 'my_package.MyMetric(momentum=0.5)' with arguments
flsv bench --metric cgsv --federations held_out
flsv bench --quick                               # few clients, in less time
flsv bench                                       # everything; goes on where it was stopped; torchrun shares it out
flsv bench --federations my_federation.yaml      # a federation of your own (reference/federations.md)
flsv bench --truth --federations digits_sizes --out truths     # makes the shipped tables anew
python tools/bench_page.py --runs runs/benchmark               # this page, from what flsv bench has kept
```

On a CPU, in minutes of one core by process time (which other processes do not change much): about {MINUTES[0]} for one metric in
all federations, with three runs of each and all conditions, and about {MINUTES[1]} for all metrics, added up from one run of every
federation; training and evaluation are most of it, and CIFAR-10 is an eighth. A whole `--quick`, which is two runs of
each, absence, dropout and noise, took {MINUTES[2]} (2026-11-21, as the command says in its last line; 28 by the clock, beside other work).
These are without the federations of 20 clients, which have [a page of their own](benchmark_many.md) and which `--quick` leaves
out: there all metrics take about as many minutes again (two runs of all metrics are 7).

**The truth** is the Shapley value of the game in which every coalition of a federation's clients was really trained, from
the same initial weights, with three to five training seeds each (see the last table). The tables of utilities are part of the package
(`flsv/benchmark/truths`), so a metric is scored without training them again. All coalitions are trained as rows of one
batched model, equal to `RetrainedUtility` to rounding (`tests/benchmark/test_lattice.py`). Seeds of metrics' runs are
others than those of the truth.

**{len(known)} federations** of four to six clients, {tuning} of them for tuning and {len(known) - tuning} held out: no
metric was chosen or changed by looking at the latter. What federations are like (noise levels, rounds, learning rates) was
settled by their ceilings, before any metric was run on them.
The digits need no download; the others read `$FLSV_DATA_ROOT` and are left out with a line where their data are not there.

What is measured, mean over federations and seeds: rank correlation (Spearman) with the truth, ± half the 90 % interval
over the seeds of the runs; Pearson's; the error of shares, half the sum of their differences (0 to 1, values below 0 are
paid nothing); *seeds* and *aggregators*, the rank correlation of a metric with itself under another seed, and under equal
weights or the geometric median in place of FedAvg; *interval covers*, in how many cases the metric's own 90 % interval
holds the client's true share; time of the processor and models evaluated, a round; in how many federations it can be
used (means are over these); what the metric
needs. Below, how well bad clients are found (AUROC), and what the rank correlation changes by when two clients of a round's
are absent, when the best client leaves after half of the rounds, and when updates are clipped to length 1 and get noise of
0.01 an entry (far too little for a useful epsilon: with what that takes, see `results/privacy_contributions.md`).

Metrics that ask clients for scores (`fedce`, `everybody_else`) run in the same federations with a fifth of every client's
samples held back for that; clients train on the other four fifths, while the truth is of all. Samples that are held back
have the right labels and no noise, also at a client whose training samples have not. For `in_run` clients report what
their samples do to the validation loss; their training is the same, to the bit.

The *ceiling* is the mean rank correlation of one training seed's true values with the mean of the others': what a metric
that sees one run can be expected to reach. A metric that gives all clients the same has 0, also with itself.
"""


def _pictures(summary: Summary, known: Known) -> list[float]:
    """Held-out federations of digits, MNIST, Fashion-MNIST and CIFAR-10: their truth is of the accuracy."""
    return [
        v
        for name, v in summary.spearman.items()
        if known[name][0].set == "held_out" and known[name][0].performance == "accuracy"
    ]


def _which(
    s: Mapping[str, Summary], known: Known, costs: Mapping[str, Cost], kept: Mapping[str, tuple[str, str]]
) -> str:
    best, images = s["gradient_agreement"], _pictures(s["gradient_agreement"], known)
    game = s["gradient_agreement_game"]
    free = {name: each.auroc["free_rider"] for name, each in s.items()}
    noisy = max(abs(s[m].private) for m in ("gradient_agreement", "cgsv", "cssv", "decayed_sum"))

    def change(name: str) -> str:
        return f"{s[name].partial:+.2f} and {s[name].dropout:+.2f}"

    def of(name: str, kind: str) -> str:
        return _two(s[name].auroc[kind])

    rows = {
        SHADOW: kept[SHADOW],
        "the server has validation data": (
            "`GradientAgreementGame` with the `performance` that you pay for",
            so(
                max(s, key=lambda name: s[name].mean) == "gradient_agreement_game",
                "the highest rank correlation of all",
            )
            + f", {_two(game.mean)} ({_two(game.sets['held_out'])} held out, least {_two(min(game.spearman.values()))}); "
            f"{1000 * costs['gradient_agreement_game'].seconds:.0f} ms a round and "
            f"{costs['gradient_agreement_game'].evaluations:.0f} models evaluated with six clients, AUROC of bad clients "
            f"at least {_two(min(game.auroc.values()))} of every kind",
        ),
        "the same, classes are of about equal size, and rounds have to be cheap": (
            "`GradientAgreement`",
            f"{_two(_mean(images))} over the {len(images)} held-out federations of digits, MNIST, Fashion-MNIST and "
            f"CIFAR-10 (least {_two(min(images))}), {1000 * costs['gradient_agreement'].seconds:.1f} ms a round, AUROC "
            f"at least {_two(min(best.auroc.values()))}; {_two(best.mean)} over all federations, as it looks at the mean "
            "loss: not where classes are rare, nor for regressions",
        ),
        "the same, and you ask which class or sample it comes from": (
            "`InRunShapley` with `client_algorithm=InRunValues()`",
            f"{_two(s['in_run'].mean)} over {len(s['in_run'].spearman)} federations, AUROC "
            f"at least {_two(min(s['in_run'].auroc.values()))} of every kind; not with Adam, noise for privacy or "
            "regressions",
        ),
        "validation data, and you pay for balanced accuracy, F1 or another measure": (
            "`GradientAgreementGame` or `DecayedShapley(normalize=False)` with that `performance`",
            "games measure what you say: on Reuters, judged by balanced accuracy, the first has "
            f"{_two(game.spearman['reuters'])}, the second {_two(s['decayed_sum'].spearman['reuters'])}, and gradient "
            f"agreement, which looks at the mean loss, {_two(best.spearman['reuters'])}; on HAM10000 "
            f"{_two(game.spearman['ham10000_clinics'])}, {_two(s['decayed_sum'].spearman['ham10000_clinics'])} and "
            f"{_two(best.spearman['ham10000_clinics'])}",
        ),
        "no validation data": (
            "`ClassSpecificShapley` (a classifier with a linear head), else `CosineGradientShapley`",
            f"{_two(s['cssv'].mean)} and {_two(s['cgsv'].mean)}; AUROC of wrong labels {of('cssv', 'label_noise')} and "
            f"{of('cgsv', 'label_noise')}, of noisy inputs {of('cssv', 'feature_noise')} and "
            f"{of('cgsv', 'feature_noise')}; with three classes a client of Fashion-MNIST "
            f"{_two(s['cssv'].spearman['fashion_three_labels'])} and "
            f"{_two(s['cgsv'].spearman['fashion_three_labels'])}",
        ),
        "updates must stay secret (secure aggregation)": (
            '`EverybodyElse(performance="negative_loss")`, to see who is bad',
            f"AUROC of wrong labels {of('everybody_else_loss', 'label_noise')}, noisy inputs "
            f"{of('everybody_else_loss', 'feature_noise')}, free riders {of('everybody_else_loss', 'free_rider')}, "
            f"copies {of('everybody_else_loss', 'duplicates')}; rank correlation "
            f"{_two(s['everybody_else_loss'].mean)}, by the federation's own performance "
            f"{_two(s['everybody_else'].mean)}. Values lie near each other: do not pay by them",
        ),
        MANY: kept[MANY],
        "free riders expected": (
            "any of the three before",
            f"AUROC {_two(free['gradient_agreement'])}, {_two(free['cssv'])}, {_two(free['cgsv'])}; not min-max values "
            f"({_two(free['ssv'])}), shares of rounds ({_two(free['decayed'])}), FedCE ({_two(free['fedce'])}) or "
            f"anything that looks at data or at the last rounds only (FedBary {_two(free['fedbary'])}, S-FedAvg "
            f"{_two(free['s_fedavg'])})",
        ),
        "samples may lie in one place before training": (
            "KNN-Shapley",
            f"{_two(s['knn_shapley'].mean)} without a model, blind to what clients send ({_two(free['knn_shapley'])})",
        ),
        "absence, dropouts": (
            "`GradientAgreement`",
            f"{change('gradient_agreement')}, CSSV {change('cssv')}, CGSV {change('cgsv')}, FedSV {change('fedsv')}",
        ),
        "private updates": (
            "as without",
            f"at noise as small as here none of these four changes by more than {_two(noisy)} (gradient agreement, "
            "CSSV, CGSV, decayed values); with noise for an epsilon of use, no metric of single updates says much",
        ),
    }
    table = "\n".join(f"| {situation} | {take} | {because} |" for situation, (take, because) in rows.items())
    poor = ("decayed", "multi_round", "s_fedavg", "ssv")
    behind = all(s[name].mean < s["fedsv_samples"].mean - 0.1 for name in poor)
    return f"""
## Which one to take

| situation | take | because |
|---|---|---|
{table}

To pay by any of these, read [what cheating brings](results/stress.md): under `GradientAgreementGame` a client that copies its samples
gains 20 points of the payment, and with all safeguards the best cheat 7 ± 10 (six trials).

*Counting samples* has {_two(s["size"].mean)}: the least that a metric has to beat. {
        so(
            behind,
            "Shares divided by a round's gain "
            f"(`decayed` {_two(s['decayed'].mean)}, `multi_round` {_two(s['multi_round'].mean)}) and values of the last "
            f"rounds (`s_fedavg` {_two(s['s_fedavg'].mean)}, `ssv` {_two(s['ssv'].mean)}) are behind sums of the same "
            f"games ({_two(s['fedsv_samples'].mean)}).",
        )
    } {
        so(
            max(abs(s[name].mean) for name in ("cssv_weights", "ot_gradient")) < 0.2,
            "Weights of heads (`cssv_weights`) and the share of samples not flagged (`ot_gradient`) say next to nothing "
            "of a client's worth here.",
        )
    }
"""


def _others(s: Mapping[str, Summary]) -> str:
    full, sampled = s["fedsv_samples"], {name: s[name] for name in SAMPLED}
    means = {name: _two(each.mean) for name, each in sampled.items()}
    return f"""
## What single metrics do

- **In-run data Shapley** (`in_run`) is the first-order gradient Shapley value with fixed weights, and by class: {
        _two(s["in_run"].mean)
    }, the second order {_two(s["in_run_2"].mean)}; `gradient_1`, with a moving average, {_two(s["gradient_1"].mean)}.
- **FedCE** (`fedce`) weighs clients by how different they are: {
        so(
            s["fedce"].mean < 0.1 and s["fedce"].auroc["free_rider"] < 0.3 and s["fedce"].auroc["label_noise"] < 0.5,
            f"rank correlation {_two(s['fedce'].mean)}, and AUROC {_two(s['fedce'].auroc['free_rider'])} of free riders "
            f"and {_two(s['fedce'].auroc['label_noise'])} of wrong labels, where 0.5 is chance: free riders come out on top.",
        )
    }
  These are weights for averaging where clients are honest, and no payment.
- **EverybodyElse** sees sums only: {_two(s["everybody_else"].mean)} by the federation's performance, {
        _two(s["everybody_else_loss"].mean)
    } by the loss.
- **Beta Shapley** of the rounds' games, weighed by samples: Beta(16, 1), small coalitions first, {
        _two(s["beta_16_1"].mean)
    }; Shapley {_two(full.mean)}; Banzhaf {_two(s["banzhaf"].mean)}; Beta(1, 4), large coalitions first, {
        _two(s["beta_1_4"].mean)
    }; leave-one-out {_two(s["loo"].mean)} (with equal weights).
- **The lower confidence bound** of a round's Shapley value: {_two(s["lower_bound"].mean)}.
- **Sampled games**, at most 24 of six clients' 64 coalitions a round, beside all 64 ({_two(full.mean)}): permutations {
        means["permutation_24"]
    }, Leverage SHAP {means["leverage_24"]}, regression-adjusted {means["adjusted_24"]}, the surrogate {
        means["surrogate_24"]
    }. {
        so(
            max(abs(each.mean - full.mean) for each in sampled.values()) < 0.1,
            "What sampling adds is less than what the game of a round itself is off by.",
        )
    }
"""


def _intervals(s: Mapping[str, Summary]) -> str:
    found: dict[str, Coverage] = {name: each.intervals for name, each in s.items() if each.intervals is not None}
    told = {name: each for name, each in found.items() if each.truth == each.truth}
    enough = sorted((name for name in told if told[name].truth >= GOAL), key=lambda name: -told[name].truth)
    said = ", ".join(f"`{name}` ({_two(told[name].truth)}, half width {told[name].width:.2f})" for name in enough)
    other = [each.seeds for each in found.values() if each.seeds == each.seeds]
    better = sum(each.repeated <= 2 / 3 for each in found.values())
    return f"""
## Whether to believe a metric's intervals

A metric's 90 % interval (`contributions.csv`, the report) is of what other rounds of the same training would have given.
As an interval of **the true share** it ought to hold it in {100 * GOAL:.0f} % of the cases. {
        f"It does for {len(enough)} of {len(told)} metrics: {said}."
        if enough
        else f"It does for none of the {len(told)} metrics."
    } {
        so(
            len(enough) < len(told) / 2,
            "For all others it does not: the table below says how often, and in how many federations. What is missing "
            "is the method's own error, which no spread over rounds shows.",
        )
    }
As an interval of **what the metric itself says under another seed** it holds the mean of the other seeds in {
        _two(min(other))
    } to {_two(max(other))} of the cases, by metric.
The mean over seeds (`flsv repeat`) is nearer to the truth by a third for {better} of {len(found)} metrics.

**What covers** the retrained game's value: intervals of `flsv retrain` with two seeds, in the benchmark's federations ([by design](results/retrain.md)).
"""


def _rests_on(s: Mapping[str, Summary], known: Known, results: Results) -> str:
    def runs(metric: str, condition: str) -> list[int]:
        """Seeds of each federation."""
        found = [len({key[2] for key in results.values if key[:2] + key[3:] == (n, condition, metric)}) for n in known]
        return [each for each in found if each]

    conditions = ("partial", "dropout", "private", "uniform", "median")
    where = {condition: len(runs("cgsv", condition)) for condition in conditions}
    seeds, later = runs("cgsv", "base"), runs("beta_16_1", "base")
    fewer = [len(runs("beta_16_1", condition)) for condition in conditions]
    newer = ""
    if fewer != list(where.values()) or later != seeds:
        newer = (
            f"{', '.join(f'`{n}`' for n in (*NEW, *SAMPLED))} came later: {_seeds(later)}; absence in {fewer[0]}, dropout in {fewer[1]}, noise in {fewer[2]} "
            f"and other aggregators in {min(fewer[3:])}. A cell is empty where nothing has been run; `flsv bench` goes on "
            "there."
        )
    return f"""
## What this rests on

Networks of one hidden layer, linear models and fastText, 44 to 1,532 samples a client, 10 to 25
rounds, full participation in the truth, accuracy (balanced accuracy, squared error) on the server's own validation set.
Runs: {min(seeds)} to {max(seeds)} seeds a federation; one seed of absence in {where["partial"]}, of dropout in {
        where["dropout"]
    }, of noise in {where["private"]} and of other aggregators in {min(where["uniform"], where["median"])} federations.
{newer}
Larger models, longer runs and other tasks may rank metrics otherwise.
"""


def _seeds(runs: list[int]) -> str:
    """In words, from the number of seeds in each federation."""
    once = runs.count(1)
    if not once:
        return f"two seeds or more in each of {len(runs)} federations"
    if once == len(runs):
        return f"one seed in each of {len(runs)} federations"
    return f"one seed in {once} of {len(runs)} federations, more in the others"


def kept_section(old: str, title: str) -> str:
    """A section of the page as it has it."""
    found = re.search(rf"^## {title}\n.*?(?=^## )", old, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no section {title!r}, which it keeps")
    return found[0]


def kept_cells(old: str) -> dict[str, tuple[str, str]]:
    """Metric to its rank correlation in held-out federations and its share error, as the page's table has them."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in kept_section(old, "Near the truth, and at what cost").splitlines()
        if line.startswith("|")
    ]
    places = [rows[0].index(name) for name in ("held out", "share error")]
    return {row[0].strip("`"): (row[places[0]], row[places[1]]) for row in rows[2:]}


def kept_row(old: str, situation: str) -> tuple[str, str]:
    """What to take in a situation, and why, as the page has it."""
    found = re.search(rf"^\| {situation} \| (.+?) \| (.+) \|$", old, flags=re.MULTILINE)
    if found is None:
        raise ValueError(f"the page has no row of {situation!r}, which it keeps")
    return found[1], found[2]
