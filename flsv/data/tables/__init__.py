"""Tables, which are read by a data dictionary: draft one, merge several, read by it, compare a table with it."""
