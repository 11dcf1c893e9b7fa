"""Training of many models of one structure, clients' or coalitions', as rows of one batched model."""
