"""A shared secret: members of a run understand each other, and nobody else is heard."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.gossip_forgery import forged
from support.gossip_threads import FaultyTransport, goals, on_threads, train, trainer
from thinwire.comm.peers import LocalTransport, PeerTransport
from thinwire.errors import MessageError, OptionError
from thinwire.gossip import decentralize
from thinwire.gossip.message import GossipMessage, RefusedMessageError
from thinwire.gossip.secret import SecretTransport
from thinwire.gossip.topology import ring

SECRET = "correct horse battery staple"
NUMEL = 128


def _pair(mine: str | None = SECRET, theirs: str | None = SECRET) -> tuple[PeerTransport, PeerTransport]:
    plain = LocalTransport.of(2)
    one, two = (
        end if secret is None else SecretTransport(end, secret)
        for end, secret in zip(plain, (mine, theirs), strict=True)
    )
    return one, two


def _received(receiver: PeerTransport, sender: int) -> GossipMessage:
    found = receiver.receive(sender, until=time.monotonic() + 1)
    assert found is not None
    return GossipMessage.unpack(found)


def test_a_message_arrives_as_it_was_sent_and_costs_sixteen_bytes() -> None:
    a, b = _pair()
    packed = GossipMessage(3, payload=torch.arange(5, dtype=torch.uint8)).pack()
    a.send(1, packed)
    assert a.sent_bytes == packed.numel() + 16
    assert _received(b, 0).payload.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("mine", "theirs"), [(SECRET, None), (None, SECRET), (SECRET, SECRET + "!")])
def test_ranks_that_do_not_share_a_secret_refuse_each_other(mine: str | None, theirs: str | None) -> None:
    a, b = _pair(mine, theirs)
    for sender, receiver in ((a, b), (b, a)):
        sender.send(receiver.rank, GossipMessage(3).pack())
        with pytest.raises(RefusedMessageError, match="secret"):
            _received(receiver, sender.rank)


def _raw(end: PeerTransport) -> LocalTransport:
    assert isinstance(end, SecretTransport)
    assert isinstance(end._transport, LocalTransport)
    return end._transport


def _sealed(end: PeerTransport, peer: int, message: GossipMessage) -> Tensor:
    end.send(peer, message.pack())
    return _raw(end)._queues[peer][end.rank].get()  # type: ignore[return-value]


def test_every_bit_counts() -> None:
    a, b = _pair()
    sealed = _sealed(a, 1, GossipMessage(3, payload=torch.arange(5, dtype=torch.uint8)))
    for place in range(sealed.numel()):
        broken = sealed.clone()
        broken[place] ^= 1 << (place % 8)
        _raw(a).send(1, broken)
        with pytest.raises(MessageError):
            _received(b, 0)
    for size in range(sealed.numel()):
        _raw(a).send(1, sealed[:size])
        with pytest.raises(MessageError):
            _received(b, 0)


def test_a_message_cannot_be_sent_back_or_in_the_name_of_another_rank() -> None:
    ends = [SecretTransport(end, SECRET) for end in LocalTransport.of(3)]
    sealed = _sealed(ends[0], 1, GossipMessage(3))
    ends[1]._transport.send(0, sealed)  # reflected
    ends[2]._transport.send(1, sealed)  # rank 2 claims to have written it
    ends[0]._transport.send(2, sealed)  # to another receiver
    for receiver, sender in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(RefusedMessageError):
            ends[receiver].receive(sender, until=time.monotonic() + 1)


def test_damage_in_transit_is_no_reason_to_remove_a_neighbour() -> None:
    a, b = _pair()
    sealed = _sealed(a, 1, GossipMessage(3))
    for place in (40, -3):  # in the header, in the code
        a.send(1, GossipMessage(2).pack())
        assert _received(b, 0).round == 2
        broken = sealed.clone()
        broken[place] ^= 4
        _raw(a).send(1, broken)
        with pytest.raises(MessageError) as failure:
            _received(b, 0)
        assert not isinstance(failure.value, RefusedMessageError)
    _raw(a).send(1, broken)
    with pytest.raises(RefusedMessageError):  # the second one in a row is no damage
        _received(b, 0)


@pytest.mark.parametrize(("algorithm", "codec"), [("dcd", "min_max:4,block=64"), ("dpsgd", "fp32")])
def test_training_with_a_secret_has_the_same_bits(algorithm: str, codec: str) -> None:
    targets = goals(3, NUMEL)

    def run(**options: Any) -> list[Tensor]:
        def one(transport: LocalTransport) -> Tensor:
            model, optimizer = trainer(
                transport, targets[transport.rank], algorithm=algorithm, codec=codec, topology=ring(), **options
            )
            train(model, optimizer, 12)
            with optimizer.averaged():
                return model.value()

        return on_threads(LocalTransport.of(3), one)

    plain, authenticated = run(), run(secret=SECRET)
    assert all(torch.equal(a, b) for a, b in zip(plain, authenticated, strict=True))


def test_training_with_a_secret_survives_damaged_messages() -> None:
    targets = goals(3, NUMEL)

    def one(transport: FaultyTransport) -> Any:
        model, optimizer = trainer(
            transport, targets[transport.rank], algorithm="dcd", codec="min_max:4,block=64", topology=ring(),
            deadline=2.0, secret=SECRET,
        )  # fmt: skip
        transport.active = True
        train(model, optimizer, 40)
        transport.active = False
        train(model, optimizer, 6)
        optimizer.finish()
        return optimizer

    optimizers = on_threads(FaultyTransport.group(3, seed=5, damage=0.05), one)
    assert sum(optimizer.stats()["gossip/damaged"] for optimizer in optimizers) > 2
    assert sum(optimizer.stats()["gossip/refused"] for optimizer in optimizers) == 0
    assert all(edge.valid for optimizer in optimizers for edge in optimizer._rounds.edges.values())


class NoBroadcast(LocalTransport):
    same_start = True


def test_a_sender_without_the_secret_loses_its_edge_and_training_goes_on() -> None:
    plain = LocalTransport.of(2)
    me, other = (NoBroadcast(end.rank, end._queues) for end in plain)
    for number in range(1, 6):
        other.send(0, forged(round=number))
    model, optimizer = trainer(
        me, goals(1, NUMEL)[0], algorithm="dcd", codec="min_max:4,block=64", deadline=0.5, secret=SECRET, min_ranks=1
    )
    train(model, optimizer, 4)
    assert optimizer.neighbours == ()
    assert optimizer.stats()["gossip/refused"] == 1


@pytest.mark.parametrize("secret", ["", "short", b"15 bytes, short", 12345678901234567890])
def test_a_weak_secret_is_refused(secret: Any) -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(OptionError, match="at least 16 bytes"):
        decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), transport=LocalTransport.of(1)[0], secret=secret)


def test_collectives_carry_no_secret() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(OptionError, match="leave secret out"):
        decentralize(net, torch.optim.SGD(net.parameters(), lr=0.1), algorithm="allreduce", secret=SECRET)


def test_everything_else_is_left_to_the_transport() -> None:
    """A method that the base class gains would otherwise be answered by its default."""
    methods = {name for name, _ in inspect.getmembers(PeerTransport, inspect.isfunction) if not name.startswith("_")}
    assert methods <= set(vars(SecretTransport))
