"""BuiltInData: what is merged, thinned out and scaled, and what is refused."""

from sklearn.datasets import load_digits

from benchmark.built_in import BuiltInData


def test_built_in_digits_merge_and_thin_out_classes_in_training_and_validation():
    shares = {
        6: 0.5,
        7: 0.5,
        8: 0.5,
        9: 0.25,
    }
    data = BuiltInData(
        "digits",
        merge=6,
        keep=[1.0, *shares.values()],
        val_fraction=0.4,
    )
    _, train_labels = data.train_set.tensors
    _, val_labels = data.val_set.tensors
    train_counts = train_labels.bincount(minlength=5)
    val_counts = val_labels.bincount(minlength=5)
    target = load_digits().target
    merged = target < 6
    expected = [int(merged.sum())]
    for digit, share in shares.items():
        is_digit = target == digit
        count = is_digit.sum()
        expected.append(round(share * count))
    counts = train_counts + val_counts
    assert counts.tolist() == expected

    val_share = val_counts / counts
    deviations = (val_share - 0.4).abs()
    assert deviations.max() < 0.02
