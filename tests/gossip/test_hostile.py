"""Hostile and foreign messages: bad bytes cost their sender the edge, never the receiver its run."""

from __future__ import annotations

import gc
import math
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from support.gossip_forgery import Receiver, forged, signed
from support.gossip_threads import Quadratic, decentralized, train
from thinwire.codecs import fp32, min_max, top_k
from thinwire.comm.peers import GlooTransport, LocalTransport, PeerGoneError
from thinwire.errors import ExchangeError, MessageError, release
from thinwire.gossip.edge import MOST_EARLY, MOST_UNUSED
from thinwire.gossip.membership import Membership
from thinwire.gossip.message import GossipMessage, Kind, MemberStatus, RefusedMessageError
from thinwire.gossip.validate import ROUNDS_AHEAD, MessageLimits

NUMEL = 96
CODEC = min_max(4, block=64)
GOOD = bytes(CODEC.encode(torch.zeros(NUMEL)).numpy())
BUFFERS = struct.pack("<3f", 1.0, 1.0, 1.0)
NAN = struct.pack("<f", math.nan)


def _payload(value: float, codec: Any = CODEC, numel: int = NUMEL) -> bytes:
    return bytes(codec.encode(torch.full((numel,), value)).numpy())


def _honest(number: int, **fields: Any) -> Tensor:
    given: dict[str, Any] = {"flags": 8, "parts": (GOOD, BUFFERS, b"", b"")} | fields
    return forged(round=number, **given)


REFUSED: dict[str, Callable[[int], Tensor]] = {
    "unknown kind": lambda n: _honest(n, kind=7),
    "unknown flag": lambda n: _honest(n, flags=0x8000),
    "13 bytes of updates": lambda n: _honest(n, parts=(GOOD, BUFFERS, b"", b"x" * 13)),
    "an update about a rank that does not exist": lambda n: _honest(
        n, parts=(GOOD, BUFFERS, b"", struct.pack("<IIB3x", 2, 1, 0))
    ),
    "an update repeated": lambda n: _honest(n, parts=(GOOD, BUFFERS, b"", struct.pack("<IIB3x", 1, 1, 0) * 2)),
    "an update of incarnation 2**32 - 1": lambda n: _honest(
        n, parts=(GOOD, BUFFERS, b"", struct.pack("<IIB3x", 1, 2**32 - 1, 0))
    ),
    "5 bytes of buffers": lambda n: _honest(n, parts=(GOOD, b"x" * 5, b"", b"")),
    "no buffers": lambda n: _honest(n, parts=(GOOD, b"", b"", b"")),
    "too few buffers": lambda n: _honest(n, parts=(GOOD, BUFFERS[:4], b"", b"")),
    "buffers that are not finite": lambda n: _honest(n, parts=(GOOD, NAN * 3, b"", b"")),
    "5 bytes of snapshot": lambda n: _honest(n, parts=(GOOD, BUFFERS, b"x" * 5, b"")),
    "a snapshot of 1 number": lambda n: _honest(n, parts=(GOOD, BUFFERS, b"\0" * 4, b"")),
    "a snapshot that is not finite": lambda n: _honest(n, parts=(GOOD, BUFFERS, NAN * NUMEL, b"")),
    "a snapshot of 1e30": lambda n: _honest(n, parts=(GOOD, BUFFERS, struct.pack("<f", 1e30) * NUMEL, b"")),
    "no payload": lambda n: _honest(n, parts=(b"", BUFFERS, b"", b"")),
    "another codec": lambda n: _honest(n, parts=(_payload(0.0, min_max(8, block=64)), BUFFERS, b"", b"")),
    "another model": lambda n: _honest(n, parts=(_payload(0.0, numel=NUMEL + 1), BUFFERS, b"", b"")),
    "a payload of 1e30": lambda n: _honest(n, parts=(_payload(1e30), BUFFERS, b"", b"")),
    "a payload that is not finite": lambda n: _honest(n, parts=(_payload(math.nan), BUFFERS, b"", b"")),
    "scale -1e30": lambda n: _honest(n, scale=-1e30),
    "scale nan": lambda n: _honest(n, scale=math.nan),
    "scale inf": lambda n: _honest(n, scale=math.inf),
    "degree 2**32 - 1": lambda n: _honest(n, degree=2**32 - 1),
    "incarnation 0": lambda n: _honest(n, incarnation=0),
    "round 2**62": lambda n: _honest(2**62 + n),
    "round 2**64 - 1": lambda n: _honest(2**64 - 1),
    "round 0": lambda n: _honest(0),
    "an average in round 2**62": lambda n: _honest(2**62, kind=Kind.UP),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_message_costs_its_sender_the_edge_and_the_receiver_goes_on(what: str) -> None:
    receiver = Receiver(CODEC)
    receiver.meet(_honest(1))
    assert receiver.rounds.coefficients == {1: 0.5}
    before = receiver.node.x.clone()
    receiver.meet(REFUSED[what](2), _honest(2))
    for _ in range(3):
        receiver.meet()
    assert receiver.rounds.edges == {}
    assert receiver.rounds.counts.refused == 1
    assert receiver.rounds.membership.alive() == frozenset({0})
    assert receiver.rounds.coefficients == {}
    assert bool(receiver.node.x.isfinite().all())
    assert torch.allclose(receiver.node.x, before, atol=0.2)
    assert torch.equal(receiver.buffers, torch.ones(3))


@pytest.mark.parametrize("tracks", [True, False], ids=["changes", "models"])
def test_honest_messages_pass(tracks: bool) -> None:
    codec = CODEC if tracks else fp32()
    receiver = Receiver(codec, tracks=tracks)
    payload = bytes(codec.encode(torch.zeros(NUMEL)).numpy())
    for number in range(1, 20):
        receiver.meet(_honest(number, parts=(payload, BUFFERS, b"", b"")))
    assert receiver.rounds.counts.refused == receiver.rounds.counts.damaged == 0
    assert receiver.rounds.coefficients == {1: 0.5}


def test_a_payload_whose_values_overflow_step_by_step_is_refused_in_time() -> None:
    """Every single payload is below the limit; their sum in the view is not."""
    receiver = Receiver(CODEC)
    for number in range(1, 40):
        receiver.meet(_honest(number, parts=(_payload(9e5), BUFFERS, b"", b"")))
    assert bool(receiver.node.x.isfinite().all())
    assert float(receiver.node.x.abs().max()) < 1e13


def test_bad_positions_of_a_sparse_payload_are_refused_after_an_intact_frame() -> None:
    codec = top_k(0.1)
    body = codec.encode(torch.arange(float(NUMEL)))
    body[36:60] = 255  # positions beyond the end
    receiver = Receiver(codec)
    receiver.meet(_honest(1, parts=(bytes(signed(body, 24).numpy()), BUFFERS, b"", b"")))
    assert receiver.rounds.edges == {}
    assert receiver.rounds.counts.refused == 1
    assert bool(receiver.node.x.isfinite().all())


def test_a_damaged_message_costs_its_round_and_not_the_edge() -> None:
    receiver = Receiver(CODEC)
    broken = _honest(1)
    broken[90] ^= 1
    receiver.meet(broken)
    assert (receiver.rounds.counts.damaged, receiver.rounds.counts.refused) == (1, 0)
    assert list(receiver.rounds.edges) == [1]


def test_a_message_some_rounds_ahead_waits_and_one_far_ahead_is_refused() -> None:
    receiver = Receiver(CODEC)
    receiver.meet(_honest(3))
    assert receiver.waiting == 1
    receiver.meet()
    receiver.meet()
    assert receiver.waiting == 0
    assert list(receiver.rounds.edges) == [1]
    receiver.meet(_honest(4 + ROUNDS_AHEAD))
    assert receiver.waiting == 1
    receiver.restore()
    receiver.meet(_honest(6 + ROUNDS_AHEAD))
    assert receiver.rounds.edges == {}


def test_a_flood_of_useless_messages_ends() -> None:
    receiver = Receiver(CODEC)
    receiver.meet(_honest(1))
    receiver.meet(*[_honest(1)] * (MOST_UNUSED + 10))
    assert receiver.rounds.edges == {}
    assert receiver.rounds.counts.refused == 1


def test_early_messages_of_one_neighbour_have_a_bound() -> None:
    receiver = Receiver(CODEC)
    edge = receiver.rounds.edges[1]
    edge.early = [GossipMessage.unpack(_honest(9))] * (MOST_EARLY + 1)
    assert receiver.rounds.next_message(edge, math.inf) is None
    assert receiver.rounds.edges == {}


def test_without_a_deadline_bad_bytes_end_training_with_a_sentence() -> None:
    """One running sum cannot leave out a neighbour: the error says what to give."""
    me, other = LocalTransport.of(2)
    me.same_start = True  # type: ignore[misc]
    model = Quadratic(NUMEL, torch.ones(NUMEL))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = decentralized(model, base, algorithm="dcd", codec=CODEC, transport=me, deadline=None)
    other.send(0, forged(round=1, parts=(_payload(math.nan), b"", b"", b"")))
    with pytest.raises(ExchangeError, match="give a deadline"):
        train(model, optimizer, 3)


@pytest.mark.parametrize("what", ["an update of incarnation 2**32 - 1", "scale -1e30"])
def test_a_restarted_rank_refuses_bad_messages_too(what: str) -> None:
    limits = MessageLimits(codec=CODEC, numel=NUMEL, buffers=3, ranks=2)
    message = GossipMessage.unpack(REFUSED[what](7))
    with pytest.raises(RefusedMessageError):
        limits.check(message, after=None, known=Membership(2, rank=0), own=torch.zeros(NUMEL))
    honest = GossipMessage.unpack(_honest(10**9))
    limits.check(honest, after=None, known=Membership(2, rank=0), own=torch.zeros(NUMEL))  # it knows no round yet


def test_the_largest_honest_message_is_within_the_limit() -> None:
    limits = MessageLimits(codec=CODEC, numel=NUMEL, buffers=3, ranks=5)
    payload = CODEC.encode(torch.zeros(NUMEL))
    statuses = {rank: MemberStatus(2) for rank in range(5)}
    snapshot = GossipMessage(1, payload=payload, buffers=torch.ones(3), snapshot=torch.zeros(NUMEL), updates=statuses)
    mean = GossipMessage(1, Kind.UP, snapshot=torch.zeros(NUMEL + 3 + 1), updates=statuses)
    assert snapshot.pack().numel() <= limits.most_bytes
    assert mean.pack().numel() <= limits.most_bytes


def test_an_update_never_marks_the_receiver_itself_or_a_stranger() -> None:
    members = Membership(3, rank=0)
    members.merge({0: MemberStatus(9, alive=False), 7: MemberStatus(2, alive=False)})
    assert members.alive() == frozenset({0, 1, 2})


@pytest.mark.parametrize("data", [torch.zeros(80), torch.zeros((2, 80), dtype=torch.uint8)], ids=["floats", "a matrix"])
def test_tensors_that_are_not_flat_bytes_are_no_message(data: Tensor) -> None:
    with pytest.raises(MessageError):
        GossipMessage.unpack(data)


def test_bytes_at_any_address_and_stride_are_read() -> None:
    packed = _honest(5)
    for shift in range(1, 5):
        moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), packed])[shift:]
        assert GossipMessage.unpack(moved).round == 5
    strided = torch.stack([packed, packed], dim=1)[:, 0]
    assert GossipMessage.unpack(strided).round == 5


def _gloo_pair(most_bytes: int) -> tuple[GlooTransport, GlooTransport]:
    store = HashStore()
    ends = [GlooTransport(store, rank, 2) for rank in range(2)]
    ends[0].limit(most_bytes)
    threads = [
        threading.Thread(target=ends[rank].connect, args=([1 - rank],), kwargs={"seconds": 20}) for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ends[0], ends[1]


@pytest.mark.parametrize("size", [1001, 1 << 24])
def test_a_message_larger_than_the_model_needs_ends_the_connection_before_it_is_received(size: int) -> None:
    me, other = _gloo_pair(1000)
    try:
        other.send(0, torch.zeros(1000, dtype=torch.uint8))
        other.send(0, torch.zeros(size, dtype=torch.uint8))
        first = me.receive(1, until=time.monotonic() + 10)
        assert first is not None
        assert first.numel() == 1000
        with pytest.raises(PeerGoneError, match=f"announced a message of {size} bytes") as failure:
            me.receive(1, until=time.monotonic() + 10)
        release(failure.value)  # its frames keep the connection alive, and with it the thread of the other end
        del failure
    finally:
        me.close()
        gc.collect()
        other.close()


def test_messages_that_nobody_reads_take_bounded_memory_and_none_is_lost() -> None:
    me, other = _gloo_pair(1000)
    try:
        for number in range(60):
            other.send(0, torch.full((900,), number, dtype=torch.uint8))
        time.sleep(1.0)
        connection = me._connections[1]
        assert 0 < connection._held <= 16 * 1000
        found = [me.receive(1, until=time.monotonic() + 10) for _ in range(60)]
        assert [int(message[0]) for message in found if message is not None] == list(range(60))
        for number in range(60):  # after a disconnect nothing is kept at all
            other.send(0, torch.full((900,), number, dtype=torch.uint8))
        me.disconnect(1)
        time.sleep(0.5)
        assert connection._held <= 16 * 1000
    finally:
        me.close()
        other.close()


def test_a_rank_that_joins_skips_a_neighbour_with_an_unusable_snapshot() -> None:
    receiver = Receiver(top_k(0.1))
    body = top_k(0.1).encode(torch.arange(float(NUMEL)))
    body[36:60] = 255
    payload = signed(body, 24)
    message = GossipMessage(7, payload=payload, buffers=torch.ones(3), snapshot=torch.zeros(NUMEL))
    average = GossipMessage(7, Kind.DOWN, snapshot=torch.zeros(NUMEL))
    assert receiver.rounds.start_from(1, average) is None
    assert list(receiver.rounds.edges) == [1]
    assert receiver.rounds.start_from(1, message) is None
    assert receiver.rounds.edges == {}
    assert receiver.rounds.round == 0
