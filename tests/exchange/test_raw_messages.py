"""Inside a collective messages are raw: what travels is the body that the codec wrote, and no header."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.ranks import noise
from thinwire import LocalGroup, parse
from thinwire.codecs import Codec
from thinwire.codecs.frames import HEADER_BYTES
from thinwire.comm.local import LocalNetwork, Meeting, on_all_ranks
from thinwire.comm.network import Wait
from thinwire.exchange import all_gather, two_shot
from thinwire.exchange.first_shot import pieces
from thinwire.exchange.request import Part, Request
from thinwire.recipe.registry import STAGES
from thinwire.rng import Draw

WORDS = [word for name, stage in STAGES.items() if issubclass(stage, Codec) for word in stage.examples or (name,)]
SHAPE = (31, 43)  # neither a multiple of blocks nor of four bytes
NUMEL = 31 * 43


def sent_by_each(text: str, world_size: int) -> list[int]:
    """Bytes of every rank in one step."""
    group = LocalGroup(parse(text), world_size)
    before = [network.traffic.bytes for network in group.networks]
    group.mean([noise(rank, numel=NUMEL).view(SHAPE) for rank in range(world_size)], 0)
    return [network.traffic.bytes - old for network, old in zip(group.networks, before, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("word", WORDS)
def test_all_gather_sends_messages_without_a_header(word: str, world_size: int) -> None:
    codec = parse(f"{word}|all_gather").codec
    message = codec.message_bytes(NUMEL, shape=SHAPE)
    assert message == codec.wire_bytes(NUMEL, shape=SHAPE) - HEADER_BYTES
    assert message - codec.body_bytes(NUMEL, shape=SHAPE) in (0, 1, 2, 3)
    assert sent_by_each(f"{word}|all_gather", world_size) == [(world_size - 1) * message] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("word", [word for word in WORDS if two_shot().accepts(parse(f"{word}|local").codec) is None])
def test_two_shots_send_a_message_to_every_rank_and_one_back(word: str, world_size: int) -> None:
    codec = parse(f"{word}|two_shot").codec
    message = codec.message_bytes(max(piece.stop - piece.start for piece in pieces(NUMEL, world_size)))
    assert sent_by_each(f"{word}|two_shot", world_size) == [2 * (world_size - 1) * message] * world_size


class Watched(LocalNetwork):
    """Keeps what was gathered."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.gathered: list[Tensor] = []

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Wait:
        self.gathered.append(tensor.clone())
        return super()._all_gather(out, tensor)


@pytest.mark.parametrize("word", WORDS)
def test_what_travels_is_the_body_and_zeros_up_to_four_bytes(word: str) -> None:
    codec, meeting = parse(f"{word}|all_gather").codec, Meeting(2)
    networks = [Watched(rank, meeting) for rank in range(2)]

    def work(network: Watched) -> Tensor:
        x, parts = noise(network.rank, numel=NUMEL), [Part("w", SHAPE, 0, NUMEL)]
        draw = Draw(seed=3, step=1, stream="w", rank=network.rank)
        return all_gather().mean(codec, Request(x, x[:0], parts, draw, {**codec.new_state()}), network).mean

    on_all_ranks(networks, work)
    for network in networks:
        (sent,) = network.gathered
        body = torch.empty(codec.body_bytes(NUMEL, shape=SHAPE), dtype=torch.uint8)
        key = codec.own_draw(Draw(seed=3, step=1, stream="w", rank=network.rank)).key()
        codec.write(noise(network.rank, numel=NUMEL).view(SHAPE), body, key, codec.new_state())
        assert torch.equal(sent[: body.numel()], body)
        assert not sent[body.numel() :].any()
        assert sent.numel() == codec.message_bytes(NUMEL, shape=SHAPE)
