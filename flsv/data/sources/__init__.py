"""Sources of samples: a name, files, arrays, tables, or another data module.

All are converted to ``SourceData``, which other modules partition among clients.
"""
