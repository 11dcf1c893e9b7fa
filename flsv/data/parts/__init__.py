"""A user's own data: of one client, of all of them, or to validate and test with, in whatever form they lie."""
