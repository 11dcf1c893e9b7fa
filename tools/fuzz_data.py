"""Inputs of ``fuzz_inputs.py``: CSV files, DataFrames, arrays, npz files and folders of images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from fuzz_cases import Make, add, digest
from PIL import Image

from flsv import FederatedDataModule
from flsv.data import Files, IIDPartitioner, Splits

HEAD = "clinic,age,smoker,pressure,outcome"
BODY = [
    f"{'Boston' if i % 2 else 'Lyon'},{30 + 7 * i % 41},{'yes' if i % 3 else 'no'},{110 + 13 * i % 47},"
    f"{'ill' if i % 5 < 2 else 'well'}"
    for i in range(40)
]
TABLE = "\n".join([HEAD, *BODY]) + "\n"


def dealt(data: FederatedDataModule) -> str:
    """What the clients hold, and what they are called."""
    data.setup("fit")
    batches = [part for client in range(data.num_clients) for batch in data.client_loader(client) for part in batch]
    return digest(data.client_names, data.class_names, *batches)


def csv(content: bytes | str, label: str = "outcome") -> Make:
    def run(folder: Path) -> str:
        (folder / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
        return dealt(FederatedDataModule("t.csv", labels=label, groups="clinic", files=Files(root=str(folder))))

    return run


def cells(column: int, change: Callable[[int, str], str]) -> Make:
    """The table with a column changed."""
    rows = [row.split(",") for row in BODY]
    changed = [[change(i, cell) if j == column else cell for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    return csv("\n".join([HEAD, *map(",".join, changed)]) + "\n")


def one(value: str) -> Callable[[int, str], str]:
    """Another value in the eighth row."""
    return lambda i, cell: value if i == 7 else cell


add("csv", "ordinary", csv(TABLE), "same")
add("csv", "CRLF", csv(TABLE.replace("\n", "\r\n")), "same")
add("csv", "byte order mark", csv(b"\xef\xbb\xbf" + TABLE.encode()), "same")
add("csv", "no last line end", csv(TABLE.rstrip("\n")), "same")
add("csv", "blank lines behind", csv(TABLE + "\n\n"), "either")
add("csv", "all in quotes", csv("\n".join(",".join(f'"{c}"' for c in r.split(",")) for r in [HEAD, *BODY])), "same")
add("csv", "numbers with a decimal point", cells(1, lambda i, cell: f"{cell}.0"), "same")
add("csv", "numbers with exponents", cells(1, lambda i, cell: f"{float(cell):e}"), "same")
add("csv", "a blank around numbers", cells(1, lambda i, cell: f" {cell} "), "either")
add("csv", "a blank behind a class", cells(4, one("well ")), "either")
add("csv", "a blank behind a client", cells(0, lambda i, cell: cell + " " * (i == 7)), "either")
for name, content in {
    "empty": "",
    "head only": HEAD + "\n",
    "semicolons": TABLE.replace(",", ";"),
    "binary": bytes(range(256)) * 9,
    "UTF-16": TABLE.encode("utf-16"),
    "zeros inside": TABLE.encode()[:200] + b"\0\0" + TABLE.encode()[200:],
    "a short row": TABLE + "Boston,40\n",
    "a long row": TABLE + "Boston,40,yes,120,ill,5\n",
    "two columns of one name": TABLE.replace("pressure", "age", 1),
    "a column without a name": TABLE.replace("pressure", "", 1),
    "no column of labels": TABLE.replace("outcome", "result", 1),
    "an open quote": TABLE.replace("Boston,37", '"Boston,37', 1) + '"',
    "one client of one row": "\n".join([HEAD, BODY[0].replace("Lyon", "Oslo"), *BODY[1:]]),
}.items():
    add("csv", name, csv(content), {"semicolons": "either", "one client of one row": "taken"}.get(name, "refused"))
for name, column, change, expected in (
    ("nan among labels", 4, one("nan"), "warned"),
    ("no label", 4, one(""), "warned"),
    ("one class", 4, lambda i, cell: "ill", "refused"),
    ("labels 0, 00, 1, 1.0", 4, lambda i, cell: ("0", "00", "1", "1.0")[i % 4], "refused"),
    ("labels True, true", 4, lambda i, cell: ("True", "true", "False")[i % 3], "refused"),
    ("a class of its own each", 4, lambda i, cell: f"c{i}", "refused"),
    ("infinite", 1, one("inf"), "refused"),
    ("1e300", 1, one("1e300"), "refused"),
    ("1e400", 1, one("1e400"), "refused"),
    ("a word among numbers", 1, one("old"), "refused"),
    ("a decimal comma", 1, one('"40,5"'), "refused"),
    ("a date each", 1, lambda i, cell: f"2024-01-{i % 28 + 1:02}", "refused"),
    ("a text each", 2, lambda i, cell: f"text {i}", "warned"),
    ("a row of nobody", 0, one(""), "refused"),
    ("a client named by a formula", 0, one('"=HYPERLINK(""x"")"'), "taken"),
    ("a client named ..", 0, one(".."), "taken"),
    ("a client of 3,000 letters", 0, one("x" * 3000), "taken"),
    ("a client named with a line end", 0, one('"a\nb"'), "taken"),
):
    add("csv", name, cells(column, change), expected)


def table(change: Callable[[pandas.DataFrame], Any], **more: Any) -> Make:
    def run(folder: Path) -> str:
        rows = [row.split(",") for row in BODY]
        frame = pandas.DataFrame(rows, columns=HEAD.split(",")).astype({"age": int, "pressure": int})
        frame = change(frame)
        return dealt(FederatedDataModule(frame, **{"labels": "outcome", "groups": "clinic", **more}))

    return run


def put(frame: pandas.DataFrame, name: str, values: Any) -> pandas.DataFrame:
    frame[name] = values
    return frame


add("DataFrame", "ordinary", table(lambda f: f), "same")
add("DataFrame", "rows of other names", table(lambda f: f.set_index(pandas.Index(range(100, 140)))), "same")
add("DataFrame", "rows all of one name", table(lambda f: f.set_index(pandas.Index([5] * 40))), "same")
add("DataFrame", "numbers as float32", table(lambda f: f.astype({"age": "float32"})), "same")
add("DataFrame", "pandas' own integers", table(lambda f: f.astype({"age": "Int64"})), "same")
add("DataFrame", "pandas' own strings", table(lambda f: f.astype({"smoker": "string"})), "same")
add("DataFrame", "categories", table(lambda f: f.astype({"smoker": "category", "outcome": "category"})), "same")
add("DataFrame", "category with one more level", table(
    lambda f: f.assign(smoker=pandas.Categorical(f["smoker"], ["no", "never", "yes"]))), "either")  # fmt: skip
add("DataFrame", "no label in a row", table(lambda f: put(f, "outcome", [None, *f["outcome"][1:]])), "warned")
for name, change in {
    "no rows": lambda f: f.iloc[:0],
    "no such label": lambda f: f.rename(columns={"outcome": "result"}),
    "whole numbers for columns": lambda f: f.set_axis([0, 1, 2, 3, 4], axis=1),
    "two columns of one name": lambda f: f.rename(columns={"pressure": "age"}),
    "columns of two levels": lambda f: f.set_axis(pandas.MultiIndex.from_product([["a"], f.columns]), axis=1),
    "lists in cells": lambda f: put(f, "age", [[1]] * 40),
    "complex numbers": lambda f: put(f, "age", [1j] * 40),
    "infinite": lambda f: put(f, "age", [float("inf")] + [1.0] * 39),
    "1e300": lambda f: put(f, "age", [1e300] + [1.0] * 39),
    "labels with gaps in floats": lambda f: put(f, "outcome", [float("nan"), *[1.0] * 39]),
    "labels that are lists": lambda f: put(f, "outcome", [[1]] * 40),
    "a client missing": lambda f: put(f, "clinic", [None, *f["clinic"][1:]]),
    "times": lambda f: put(f, "age", pandas.date_range("2024", periods=40)),
    "differences of times": lambda f: put(f, "age", pandas.to_timedelta(range(40), unit="s")),
    "objects": lambda f: put(f, "age", [object() for _ in range(40)]),
}.items():
    add("DataFrame", name, table(change), "either" if name in ("times", "differences of times") else "refused")

IMAGES = np.random.default_rng(0).integers(0, 256, (40, 6, 6), dtype=np.uint8)
LABELS = np.arange(40) % 3


def arrays(x: Any = IMAGES / 255, y: Any = LABELS) -> Make:
    return lambda folder: dealt(
        FederatedDataModule((np.asarray(x, dtype=getattr(x, "dtype", None)), y), splits=Splits(seed=0))
    )


def scaled(kind: Any = np.float32) -> np.ndarray:
    return (IMAGES / 255).astype(kind)


add("NumPy", "ordinary", arrays(scaled()), "same")
add("NumPy", "Fortran's order", arrays(np.asfortranarray(scaled())), "same")
add("NumPy", "big-endian", arrays(scaled(">f4")), "same")
add("NumPy", "nothing to be predicted", arrays(scaled(), None), "taken")
add("NumPy", "every second of twice as many", arrays(np.repeat(scaled(), 2, 0)[::2]), "same")
add("NumPy", "labels of 8 bits", arrays(scaled(), LABELS.astype(np.uint8)), "same")
add("NumPy", "labels as a list", arrays(scaled(), LABELS.tolist()), "same")
add("NumPy", "labels as whole floats are numbers", arrays(scaled(), LABELS.astype(float)), "taken")
add("NumPy", "labels in two columns are two numbers", arrays(scaled(), np.stack([LABELS, LABELS], 1)), "taken")
for name, run in {
    "fewer labels": arrays(scaled(), LABELS[:-1]),
    "no samples": arrays(scaled()[:0], LABELS[:0]),
    "one number": arrays(np.float32(3), LABELS),
    "words": arrays(np.array([["a"]] * 40)),
    "objects": arrays(np.array([{}] * 40, dtype=object)),
    "labels nan": arrays(scaled(), np.full(40, np.nan)),
    "labels of objects": arrays(scaled(), np.array([{}] * 40, dtype=object)),
    "labels complex": arrays(scaled(), LABELS * 1j),
}.items():
    add("NumPy", name, run)


def npz(**change: Any) -> Make:
    def run(folder: Path) -> str:
        whole = {f"{s}_{w}": v for s in ("train", "test") for w, v in (("images", IMAGES), ("labels", LABELS))}
        kept = {name: value for name, value in {**whole, **change}.items() if value is not None}
        np.savez(folder / "d.npz", **kept)
        return dealt(FederatedDataModule("d.npz", files=Files(root=str(folder)), splits=Splits(seed=0)))

    return run


def npz_bytes(change: Callable[[bytes], bytes]) -> Make:
    def run(folder: Path) -> str:
        npz()(folder)
        path = folder / "d.npz"
        path.write_bytes(change(path.read_bytes()))
        return dealt(FederatedDataModule("d.npz", files=Files(root=str(folder)), splits=Splits(seed=0)))

    return run


add("npz", "ordinary", npz(), "same")
add("npz", "labels [N, 1]", npz(train_labels=LABELS[:, None], test_labels=LABELS[:, None]), "same")
add("npz", "images [N, H, W, 1]", npz(train_images=IMAGES[..., None], test_images=IMAGES[..., None]), "same")
add("npz", "an array more", npz(notes=np.array(["mine"])), "same")
for name, run in {
    "no labels": npz(train_labels=None),
    "images of other sizes": npz(test_images=IMAGES[:, :4]),
    "pickled objects": npz(train_images=np.array([object()] * 40, dtype=object)),
    "labels as floats": npz(train_labels=LABELS + 0.5),
    "labels below 0": npz(train_labels=LABELS - 1, test_labels=LABELS - 1),
    "fewer labels": npz(train_labels=LABELS[:-1]),
    "flat images": npz(train_images=IMAGES.reshape(40, -1), test_images=IMAGES.reshape(40, -1)),
    "five channels": npz(train_images=np.zeros((40, 6, 6, 5), np.uint8), test_images=np.zeros((40, 6, 6, 5), np.uint8)),
    "no images": npz(train_images=IMAGES[:0], train_labels=LABELS[:0]),
    "cut": npz_bytes(lambda b: b[: len(b) // 2]),
    "a bit flipped": npz_bytes(lambda b: b[:400] + bytes([b[400] ^ 64]) + b[401:]),
    "empty": npz_bytes(lambda b: b""),
    "a text": npz_bytes(lambda b: b"images"),
}.items():
    add("npz", name, run, "either" if name == "labels below 0" else "refused")


def folder_of_images(change: Callable[[Path], None]) -> Make:
    def run(folder: Path) -> str:
        root = folder / "pictures"
        for split in ("train", "test"):
            for label in ("ill", "well"):
                (root / split / label).mkdir(parents=True)
                for i in range(6):
                    Image.fromarray(IMAGES[i]).save(root / split / label / f"{i}.png")
        change(root)
        return dealt(
            FederatedDataModule(
                "pictures", IIDPartitioner(num_clients=2), files=Files(root=str(folder)), splits=Splits(seed=0)
            )
        )

    return run


def broken(content: bytes, name: str = "0.png") -> Callable[[Path], None]:
    return lambda root: (root / "train" / "ill" / name).write_bytes(content) and None


add("images", "ordinary", folder_of_images(lambda root: None), "same")
add("images", "hidden files", folder_of_images(broken(b"x", ".DS_Store")), "same")
add("images", "a text beside", folder_of_images(broken(b"x", "notes.txt")), "either")
for name, change in {
    "a text as png": broken(b"not a picture"),
    "an empty png": broken(b""),
    "a cut png": lambda root: broken((root / "train/ill/1.png").read_bytes()[:60])(root),
    "a class of no pictures": lambda root: shutil.rmtree(root / "train/ill"),
    "no pictures": lambda root: shutil.rmtree(root / "train"),
    "a link to nothing": lambda root: (root / "train/ill/9.png").symlink_to("nowhere"),
    "a folder called png": lambda root: (root / "train/ill/9.png").mkdir(),
    "another size": lambda root: Image.fromarray(IMAGES[0, :3]).save(root / "train/ill/0.png"),
}.items():
    expected = {"a folder called png": "either", "another size": "taken"}  # pictures are brought to one size
    add("images", name, folder_of_images(change), expected.get(name, "refused"))
