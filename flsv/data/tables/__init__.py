"""Tables and their data dictionaries: infer one, merge several sites', read a table by one, compare the two."""
