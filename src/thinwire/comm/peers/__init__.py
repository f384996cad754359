"""Messages between two ranks: the transports of gossip, between processes and between threads."""

from .address import peers_at
from .gloo import GlooTransport
from .local import LocalTransport
from .transport import PeerGoneError, PeerTransport

__all__ = ["GlooTransport", "LocalTransport", "PeerGoneError", "PeerTransport", "peers_at"]
