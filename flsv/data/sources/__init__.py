"""Sources of samples: a name, files, arrays, tables, or another data module, all converted to ``SourceData``; nothing
that knows clients.
"""
