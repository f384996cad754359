"""Messages between two ranks: the transports of gossip, between processes and between threads."""

from .gloo import GlooTransport, peers_at
from .local import LocalTransport
from .transport import PeerGoneError, PeerTransport

__all__ = ["GlooTransport", "LocalTransport", "PeerGoneError", "PeerTransport", "peers_at"]
