"""The arguments that a federation has before it starts, and the identity of a fit."""
