"""Predict, then prove: what a step will take on a network, and which recipe is worth it."""
