"""Objects with columns, as small as they can be."""

import pandas


class Frame:
    """As a DataFrame of polars or a table of Arrow: ``columns``, a length, ``to_pandas``."""

    def __init__(self, **columns):
        self.columns = list(columns)
        self._values = columns

    def __len__(self):
        return len(self._values[self.columns[0]])

    def __getitem__(self, name):
        return self._values[name]

    def to_pandas(self):
        return pandas.DataFrame(self._values)


class HuggingFace:
    """As a data set of the library ``datasets``: rows by number, columns by name."""

    def __init__(self, columns, **features):
        self.column_names = list(columns)
        self.features = {name: features.get(name) for name in columns}
        self._frame = Frame(**columns)
        self.to_pandas = self._frame.to_pandas

    def __len__(self):
        return len(self._frame)

    def __getitem__(self, key):
        return (
            self._frame[key] if isinstance(key, str) else {name: self._frame[name][key] for name in self.column_names}
        )
