"""torchft's DiLoCo over gloo, one worker per replica group; recovery from a living peer.

python bench/racing/run_torchft.py --job FOLDER --worker N
python bench/racing/run_torchft.py --job FOLDER --worker -1     # the lighthouse
"""

import signal
import sys
from datetime import timedelta
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from worker import Worker


def main() -> None:
    """Be the lighthouse, or step through the job."""
    worker = Worker("steps; exchanges every H steps")
    if worker.number < 0:
        lighthouse(worker)
    s = worker.settings
    # A replica group wants a store, which torchrun would start; this one is a group of one.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": worker.model.state_dict(), "inner": worker.inner.state_dict()}

    def load(told: dict[str, Any]) -> None:
        worker.model.load_state_dict(told["model"])
        worker.inner.load_state_dict(told["inner"])

    patience = timedelta(seconds=s.patience_s)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,  # DiLoCo asks for it
        timeout=patience,
        quorum_timeout=6 * patience,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{s.port}",
        hostname="127.0.0.1",
        replica_id=f"worker-{worker.number}",
    )
    worker.diary.tell("joined")
    outer = worker.outer(worker.parameters)
    with DiLoCo(manager, [worker.model], worker.inner, outer, sync_every=s.sync_every):
        while (rounds := manager.current_step()) < worker.job.steps // s.sync_every:
            for n in range(s.sync_every):
                worker.step(rounds * s.sync_every + n)
            # The last inner step ended with the exchange, as a hook of its optimizer. Who was
            # behind took a peer's parameters first, and what it gave was that peer's work.
            steps = manager.current_step() - rounds
            kind = {0: "failed", 1: "exchange"}.get(steps, "healed")
            worker.diary.tell(kind, workers=manager.num_participants(), round=rounds + steps)
    worker.finish()
    manager.shutdown(wait=False)


def lighthouse(worker: Worker) -> None:
    """Until killed."""
    s = worker.settings
    server = LighthouseServer(
        bind=f"127.0.0.1:{s.port}",
        min_replicas=1,
        join_timeout_ms=round(s.lease_s * 1000),
        heartbeat_timeout_ms=round(s.lease_s * 1000),
    )
    worker.diary.tell("listens", at_address=server.address())
    signal.pause()
    sys.exit()


if __name__ == "__main__":
    main()
