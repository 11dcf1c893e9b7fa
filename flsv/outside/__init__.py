"""Contributions to rounds that other frameworks, or loops of your own, run; nothing may live here that runs a round."""
