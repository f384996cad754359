"""Groups whose backend was not named: what torch.distributed chose is found out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from thinwire.comm import Communicator


@pytest.fixture(params=[None, "gloo", "cpu:gloo"])
def default_group(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
def test_small_messages_of_few_ranks_go_directly_over_gloo_whatever_it_is_called() -> None:
    """As plan and auto price them."""
    communicator = Communicator()
    twin = communicator.twin()
    assert "gloo" in communicator.backend
    assert communicator._sends_directly
    assert twin._sends_directly
    twin.close()
