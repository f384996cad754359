"""Predictions of a training step: networks, collectives, devices, models and recipes as data."""
