"""Decentralised training: every rank has a model of its own and talks to its neighbours."""

from .optimizer import ALGORITHMS, Decentralized, decentralize

__all__ = ["ALGORITHMS", "Decentralized", "decentralize"]
