"""Where the samples come from: a name, files, arrays, tables, or somebody's data module, all brought to one form."""
