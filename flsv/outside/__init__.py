"""Contributions to rounds that other frameworks, or loops of your own, run. No code in this package runs a round."""
