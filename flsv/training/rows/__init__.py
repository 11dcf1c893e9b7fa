"""Training of many clients' models at once, as rows of one batched model, for ``engine="vmap"``."""
