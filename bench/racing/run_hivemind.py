"""DiLoCo of hivemind's parts: its averager over pseudo-gradients, its DHT, its state download.

    python bench/racing/run_hivemind.py --job FOLDER --worker N

hivemind has no outer optimizer: everybody applies the same one to the same average. Who is there
stands in the DHT, as long as it says so; a worker that is alone does not look for a group. Whoever
finds that the group is further than itself downloads parameters and momentum from a peer.
"""

import logging
import threading
import time
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression
from hivemind.utils import get_dht_time
from job import Diary
from worker import Worker

# Looking for a group takes at least so long unless everybody is there; requests take less.
MATCHMAKING_S, REQUEST_S = 3.0, 1.5
ADDRESS, PRESENT = "hivemind-address", "peers_present"


class Shared:
    """Global parameters and outer momentum, which newcomers download."""

    def __init__(self, worker: Worker) -> None:
        self.values = [p.detach().clone() for p in worker.parameters]
        self.outer = worker.outer(self.values)
        self.round = 0
        for value in self.values:  # momentum exists from the start, so that it can be given
            value.grad = torch.zeros_like(value)
            self.outer.state[value]["momentum_buffer"] = torch.zeros_like(value)

    @property
    def momenta(self) -> list[torch.Tensor]:
        return [self.outer.state[value]["momentum_buffer"] for value in self.values]

    def step(self, mean: list[torch.Tensor]) -> None:
        for value, gradient in zip(self.values, mean, strict=True):
            value.grad = gradient.clone()
        self.outer.step()
        self.round += 1

    def take(self, metadata: dict[str, int], tensors: list[torch.Tensor]) -> None:
        """What a peer gave."""
        for mine, theirs in zip([*self.values, *self.momenta], tensors, strict=True):
            mine.copy_(theirs)
        self.round = metadata["round"]


class Averager(DecentralizedAverager):
    """Averages pseudo-gradients; gives the shared state to newcomers."""

    shared: Shared

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], None]:
        shared = self.shared
        tensors = [t.clone() for t in (*shared.values, *shared.momenta)]
        return {"round": shared.round}, tensors, None


def main() -> None:
    """Step through the job."""
    worker = Worker("steps; exchanges every H steps")
    s, shared = worker.settings, Shared(worker)
    dht = joined(worker)
    averager = Averager(
        [torch.zeros_like(p) for p in worker.parameters],
        dht,
        start=False,
        prefix="peers",
        target_group_size=s.workers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=REQUEST_S,
        allreduce_timeout=s.patience_s,
        next_chunk_timeout=s.lease_s,
        compression=Float16Compression(),
        daemon=True,
    )
    averager.shared = shared
    averager.run_in_background(await_ready=True)
    worker.diary.tell("joined")
    if worker.number:
        catch_up(worker, averager)
    threading.Thread(target=be_present, args=(worker, dht), daemon=True).start()
    while shared.round < worker.job.steps // s.sync_every:
        begun = shared.round
        for n in range(s.sync_every):
            worker.step(begun * s.sync_every + n)
        exchange(worker, averager, others(dht))
    worker.finish()
    time.sleep(2 * REQUEST_S)  # whoever is a moment behind still averages with us
    averager.shutdown()
    dht.shutdown()


def joined(worker: Worker) -> hivemind.DHT:
    """The first worker is where the others enter."""
    address = worker.job.folder / ADDRESS
    local = ["/ip4/127.0.0.1/tcp/0"]
    if worker.number == 0:
        dht = hivemind.DHT(host_maddrs=local, start=True)
        address.with_suffix(".new").write_text(str(dht.get_visible_maddrs()[0]))
        address.with_suffix(".new").rename(address)
        return dht
    while not address.exists():
        time.sleep(0.1)
    return hivemind.DHT(initial_peers=[address.read_text()], host_maddrs=local, start=True)


def be_present(worker: Worker, dht: hivemind.DHT) -> None:
    """Say so for as long as this process lives; what it said holds for one lease."""
    while True:
        until = get_dht_time() + worker.settings.lease_s
        dht.store(PRESENT, subkey=str(worker.number), value=True, expiration_time=until)
        time.sleep(worker.settings.lease_s / 5)


def others(dht: hivemind.DHT) -> bool:
    """Whether anybody else is there."""
    found = dht.get(PRESENT, latest=True)
    return found is not None and len(found.value) > 1


def exchange(worker: Worker, averager: Averager, together: bool) -> None:
    """Average with whoever is there; alone when nobody is; catch up when others are ahead."""
    shared, diary = averager.shared, worker.diary
    own = [
        value - parameter.detach()
        for value, parameter in zip(shared.values, worker.parameters, strict=True)
    ]
    with averager.get_tensors() as tensors:
        for tensor, values in zip(tensors, own, strict=True):
            tensor.copy_(values)
    mean, rounds = own, averaged(averager, worker.settings.patience_s, diary) if together else []
    if rounds and max(rounds) > shared.round:
        diary.tell("failed", why="others are ahead", workers=len(rounds))
        catch_up(worker, averager)
        return
    same = sum(there == shared.round for there in rounds)
    if same == len(rounds) > 1:
        with averager.get_tensors() as tensors:
            mean = [tensor.clone() for tensor in tensors]
    shared.step(mean)
    adopt(worker, shared)
    diary.tell("exchange", workers=max(same, 1), round=shared.round)


def averaged(averager: Averager, patience_s: float, diary: Diary) -> list[int]:
    """The rounds of those that averaged with us, ourselves included; empty when it failed."""
    try:
        gathered = averager.step(gather={"round": averager.shared.round}, timeout=patience_s)
    except Exception as error:  # hivemind raises what its parts raise
        diary.tell("failed", why=f"{type(error).__name__}: {str(error)[:100]}")
        return []
    return [told["round"] for told in gathered.values()]


def catch_up(worker: Worker, averager: Averager) -> None:
    """Take a peer's state, if there is one that has any."""
    loaded = averager.load_state_from_peers(timeout=worker.settings.patience_s)
    worker.diary.tell("loaded", found=loaded is not None)
    if loaded is not None:
        averager.shared.take(*loaded)
        adopt(worker, averager.shared)


def adopt(worker: Worker, shared: Shared) -> None:
    with torch.no_grad():
        for parameter, value in zip(worker.parameters, shared.values, strict=True):
            parameter.copy_(value)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
