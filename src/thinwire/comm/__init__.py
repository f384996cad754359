"""Collectives between ranks: over torch.distributed, between threads of one process, between two peers."""

from .communicator import Communicator, joined
from .network import Network, Pending, Traffic

__all__ = ["Communicator", "Network", "Pending", "Traffic", "joined"]
