"""Fuzzing with mutated messages: the parser is total, and a receiving rank survives whatever arrives.

Every input derives from its number, so a failure can be repeated. `make test` tries 10,000 inputs, `make test-all` a
million.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from support.gossip_forgery import Mutator, Receiver, forged
from thinwire.errors import MessageError
from thinwire.gossip.absolute import gossip_codec
from thinwire.gossip.edge import MOST_EARLY
from thinwire.gossip.membership import Membership
from thinwire.gossip.message import Flag, GossipMessage, Kind, MemberStatus, RefusedMessageError
from thinwire.gossip.validate import RATIO, MessageLimits

NUMEL, BUFFERS = 96, 3
CODECS = [
    "min_max:4,block=64", "fp32", "fp16", "sign:64", "natural", "rotated:3", "abs_max:2", "absolute:8,step=0.05",
    "top_k:0.1,indices=int32", "top_k:0.1,indices=packed", "top_k:0.1,indices=elias_fano", "top_k:0.4,indices=bitmap",
    "threshold_k:0.1", "random_k:0.1",
]  # fmt: skip
FEW, MANY = 10_000, 1_000_000


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # a warning for every input would fill the memory


def _valid(codec: str, number: int) -> list[Tensor]:
    """Messages as ranks send them: of a round, with a snapshot, of an average, with updates."""
    model = torch.linspace(-1, 1, NUMEL)
    payload = gossip_codec(codec).encode(model * 0.01)
    whole = {"payload": payload, "buffers": torch.ones(BUFFERS), "degree": 1}
    statuses = {1: MemberStatus(1), 0: MemberStatus(2, alive=False)}
    messages = [
        GossipMessage(number, flags=Flag.USED_LAST, **whole),  # type: ignore[arg-type]
        GossipMessage(number, flags=Flag.NEEDS_SNAPSHOT, snapshot=model, updates=statuses, **whole),  # type: ignore[arg-type]
        GossipMessage(number, flags=Flag.HAS_CHECKSUM | Flag.SWITCHED, scale=0.3, **whole),  # type: ignore[arg-type]
        GossipMessage(number, Kind.MEMBERSHIP, tag=1 << 32, updates=statuses),
        GossipMessage(number, Kind.UP, snapshot=torch.ones(NUMEL + BUFFERS + 1)),
    ]
    return [message.pack() for message in messages]


def _fuzz_parser(inputs: int, *, seed: int) -> dict[str, int]:
    """Parse and check that many mutated messages; how many had which outcome."""
    mutator, seen = Mutator(seed), {"accepted": 0, "refused": 0, "damaged": 0}
    known, own = Membership(2, rank=0), torch.linspace(-1, 1, NUMEL)
    sources = [
        (MessageLimits(codec=gossip_codec(codec), numel=NUMEL, buffers=BUFFERS, ranks=2), _valid(codec, 5))
        for codec in CODECS
    ]
    for number in range(inputs):
        limits, messages = sources[number % len(sources)]
        made = mutator.mutate(mutator.random.choice(messages))
        try:
            message = GossipMessage.unpack(made)
            parts = (message.payload, message.buffers, message.snapshot)
            assert sum(part.numel() * part.element_size() for part in parts) + 12 * len(message.updates) <= made.numel()
            limits.check(message, after=4, known=known, own=own)
            seen["accepted"] += 1
        except RefusedMessageError:
            seen["refused"] += 1
        except MessageError:
            seen["damaged"] += 1
    return seen


def _fuzz_receiver(inputs: int, *, seed: int) -> dict[str, int]:
    """Mutated messages arrive at a rank that trains; how many edges they cost, and in how many rounds it averaged."""
    mutator, seen = Mutator(seed), {"inputs": 0, "refused": 0, "damaged": 0, "averaged": 0}
    while seen["inputs"] < inputs:
        for codec in CODECS:
            sources = _valid(codec, 1)
            receiver = Receiver(gossip_codec(codec), numel=NUMEL, buffers=BUFFERS, tracks=mutator.random.random() < 0.7)
            for _ in range(min(200, inputs // len(CODECS) + 1)):
                receiver.meet(mutator.mutate(_for_round(mutator.random.choice(sources), receiver.rounds.round + 1)))
                seen["inputs"] += 1
                seen["averaged"] += bool(receiver.rounds.coefficients)
                assert receiver.waiting <= MOST_EARLY
                assert bool(receiver.node.x.isfinite().all())
                assert bool(receiver.buffers.isfinite().all())
                assert 0 in receiver.rounds.membership.alive()
                if 1 in receiver.rounds.edges:
                    largest = float(receiver.node.own.abs().max())
                    assert float(receiver.node.views.of(1).abs().max()) <= 2 * RATIO * max(1.0, largest)
                edge = receiver.rounds.edges.get(1)
                if edge is None or edge.early or not edge.valid or float(receiver.node.x.abs().max()) > 2.0:
                    receiver.restore()
            seen["refused"] += receiver.rounds.counts.refused
            seen["damaged"] += receiver.rounds.counts.damaged
    return seen


def _for_round(message: Tensor, number: int) -> Tensor:
    """The same message for another round."""
    parsed = GossipMessage.unpack(message)
    parsed.round = number
    return parsed.pack()


def test_the_parser_returns_a_message_or_raises_message_error() -> None:
    seen = _fuzz_parser(FEW * 8 // 10, seed=1)
    assert min(seen.values()) > FEW // 50, seen  # every outcome is exercised


def test_a_receiving_rank_survives_mutated_messages() -> None:
    seen = _fuzz_receiver(FEW * 2 // 10, seed=2)
    assert min(seen.values()) > FEW // 200, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_the_parser_is_total_for_a_million_inputs(seed: int) -> None:
    seen = _fuzz_parser(MANY // 5, seed=100 + seed)
    assert min(seen.values()) > MANY // 50, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_receiving_rank_survives_its_part_of_a_million_inputs(seed: int) -> None:
    seen = _fuzz_receiver(MANY // 20, seed=200 + seed)
    assert min(seen.values()) > MANY // 2000, seen


@pytest.mark.parametrize("size", [0, 1, 79, 80, 81, 84, 4096])
def test_random_bytes_are_no_message(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        with pytest.raises(MessageError):
            GossipMessage.unpack(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator))


@pytest.mark.parametrize("part", ["payload", "buffers", "snapshot", "updates"])
def test_a_size_that_no_memory_holds_allocates_nothing(part: str) -> None:
    for size in (1, 3, 4, 1 << 31, 1 << 62, (1 << 64) - 1):
        with pytest.raises(MessageError):
            GossipMessage.unpack(forged(parts=(b"", b"", b"", b""), **{part: size}))
