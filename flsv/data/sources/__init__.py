"""Sources of samples: a name, files, arrays, tables, or another data module. All are converted to ``SourceData``, which
is partitioned among clients elsewhere.
"""
