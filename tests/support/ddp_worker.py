"""A worker for the tests: trains a small model with DDP, tries every collective, and prints what it found as JSON.

python ddp_worker.py RANK WORLD_SIZE ADDRESS PORT [recipe]
"""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.comm.communicator import collective
from thinwire.lab.emulate.paced import backend_here


def collectives(rank: int, size: int) -> dict[str, bool]:
    """Every collective that thinwire or DDP use, against its definition."""
    mine = torch.arange(4.0) + rank
    everyone = torch.stack([torch.arange(4.0) + other for other in range(size)])
    found = {}
    total = mine.clone()
    dist.all_reduce(total)
    found["all_reduce"] = torch.equal(total, everyone.sum(0))
    work = dist.all_reduce(total := mine.clone(), async_op=True)
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    found["future"] = torch.equal(future.wait(), everyone.sum(0) * 2)
    work.wait()
    found["completed"] = work.is_completed()
    rows = torch.empty(size * 4)
    collective("all_gather")(rows, mine)
    found["all_gather_single"] = torch.equal(rows.view(size, 4), everyone)
    parts = [torch.empty(4) for _ in range(size)]
    dist.all_gather(parts, mine)
    found["all_gather"] = torch.equal(torch.stack(parts), everyone)
    out = torch.empty(size, 4)
    dist.all_to_all_single(out, torch.stack([mine * (peer + 1) for peer in range(size)]))
    found["all_to_all"] = torch.equal(out, everyone * (rank + 1))
    same = mine.clone()
    dist.broadcast(same, src=size - 1)
    found["broadcast"] = torch.equal(same, everyone[-1])
    part = torch.empty(4)
    dist.reduce_scatter(part, [mine * (peer + 1) for peer in range(size)])
    found["reduce_scatter"] = torch.equal(part, everyone.sum(0) * (rank + 1))
    got = torch.empty(4)
    swap = [dist.P2POp(dist.irecv, got, (rank - 1) % size), dist.P2POp(dist.isend, mine, (rank + 1) % size)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    found["swap"] = torch.equal(got, everyone[rank - 1])
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = objects == [{"rank": other} for other in range(size)]
    dist.barrier()
    other = dist.new_group(backend=dist.get_backend())
    dist.all_reduce(total := mine.clone(), group=other)
    found["new_group"] = torch.equal(total, everyone.sum(0))
    return found


def train(rank: int, size: int, recipe: str | None) -> dict[str, object]:
    """A few steps; the weights must be those of one process that sees all the data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    alone = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    alone.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(model)
    if recipe is not None:
        import thinwire

        thinwire.attach(wrapped, recipe, exempt=())
    for net in (wrapped, alone):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(5):
            data = torch.randn(size * 8, 16, generator=torch.Generator().manual_seed(step))
            batch = data if net is alone else data[rank * 8 : rank * 8 + 8]
            optimizer.zero_grad()
            (net(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return {"apart": max(float((one - other).detach().abs().max()) for one, other in pairs)}


def main() -> None:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    recipe = sys.argv[5] if len(sys.argv) > 5 else None
    torch.set_num_threads(1)
    backend = backend_here()
    dist.init_process_group(backend, init_method=f"tcp://{sys.argv[3]}:{sys.argv[4]}", rank=rank, world_size=size)
    found = {"backend": backend, "collectives": collectives(rank, size), **train(rank, size, recipe)}
    big = torch.ones(500_000)  # 2 MB
    seconds = []
    for _ in range(3):
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(big)
        seconds.append(time.monotonic() - begin)
    print(json.dumps({**found, "all_reduce_seconds": min(seconds)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
