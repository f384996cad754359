"""Decentralised training: every rank has its own model and exchanges messages with its neighbours."""

from ..comm.peers import peers_at
from .optimizer import ALGORITHMS, Decentralized, decentralize

__all__ = ["ALGORITHMS", "Decentralized", "decentralize", "peers_at"]
