"""Client processes that carry out one command after the other, and measure themselves."""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol.messages import Blob

STREAM = "BENCH"
# A round of ten fragments, or one of 1 GiB, and room to spare.
STREAM_BYTES = 8 << 30
BLOCK = 512 * 1024
# A transfer on a busy machine takes seconds.
PATIENCE_S = 300.0

Row = dict[str, Any]


class Worker:
    """A process running `body(pipe, *args)`."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=body, args=(far, *args), daemon=True)
        self.process.start()

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.result()

    def begin(self, *command: Any) -> None:
        self.pipe.send(command)

    def result(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.pipe.send(("end",))
        self.process.join(20)


class Stopwatch:
    """Wall and CPU seconds of a block, and its peak memory above `held` bytes (Linux)."""

    def __init__(self, held: int = 0) -> None:
        self.held = held

    def __enter__(self) -> "Stopwatch":
        reset_peak(os.getpid())
        self.wall_s, self.cpu_s = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()
        self.peak = peak(os.getpid()) - self.held

    @property
    def row(self) -> Row:
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s, "peak_bytes": max(0, self.peak)}


def peak(pid: int) -> int:
    """Most bytes of memory the process held since `reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Server:
    """CPU and memory of the nats-server process."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def peak(self) -> int:
        return peak(self.process.pid)

    def reset_peak(self) -> None:
        reset_peak(self.process.pid)


# --- over the bus ---------------------------------------------------------------------------------


def client(pipe: Connection, url: str, name: str, options: Row) -> None:
    """A learner or a syncer: puts and gets whole fragments."""
    asyncio.run(_Client(pipe).run(url, name, options))


class _Client:
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.payloads: dict[int, bytes] = {}
        self.held = 0
        self.bus: NatsBus

    async def run(self, url: str, name: str, options: Row) -> None:
        self.bus = await NatsBus.connect(url, name=name, **options)
        # As the streams of contributions and publications are: only the tape is synced.
        spec = StreamSpec(STREAM, ("bench.>",), STREAM_BYTES, synced=False)
        await self.bus.ensure_stream(spec)
        while True:
            command, *args = await asyncio.to_thread(self.pipe.recv)
            if command == "end":
                break
            try:
                self.pipe.send(await getattr(self, command)(*args))
            except Exception as error:
                self.pipe.send(error)
        await self.bus.close()

    async def hold(self, size: int) -> None:
        """Make the payload to put, before anything is measured; memory counts from here."""
        self.payloads = {size: os.urandom(size)}
        self.held = psutil.Process().memory_info().rss

    async def keep(self, payload: bytes) -> None:
        """Put this from now on."""
        self.payloads = {len(payload): payload}

    async def put(self, subject: str, size: int) -> Row:
        if size not in self.payloads:
            self.payloads[size] = os.urandom(size)
        with Stopwatch(self.held) as watch:
            blob = await put_blob(self.bus, subject, self.payloads[size])
        return watch.row | {"blob": blob.model_dump()}

    async def get(self, blobs: list[Row]) -> Row:
        """All at once, as a syncer does."""
        with Stopwatch(self.held) as watch:
            received = await asyncio.gather(
                *(
                    get_blob(self.bus, STREAM, Blob.model_validate(blob), timeout_s=PATIENCE_S)
                    for blob in blobs
                )
            )
        assert [len(payload) for payload in received] == [blob["bytes"] for blob in blobs]
        return watch.row

    async def forget(self) -> int:
        return await self.bus.purge(STREAM, "bench.>")


# --- bare asyncio streams -------------------------------------------------------------------------


def stream_reader(pipe: Connection, tuned: bool) -> None:
    """Receives, and throws away, what `stream_writer` sends.

    As it is, luck decides how quick this is: where the C library puts the buffers of a process,
    and so whether it gives their pages back to the kernel and has them cleared again with every
    read. `tuned`: it never does, and the reader's buffer is larger.
    """
    if tuned:
        keep_freed_memory()
    asyncio.run(_stream_reader(pipe, tuned))


def keep_freed_memory() -> None:
    """glibc: no mapping of its own for large blocks, and no giving back."""
    library = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3
    library.mallopt(mmap_threshold, 1 << 30)
    library.mallopt(trim_threshold, 1 << 30)


async def _stream_reader(pipe: Connection, tuned: bool) -> None:
    done: asyncio.Queue[Row] = asyncio.Queue(1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(8):
            left = int.from_bytes(head, "big")
            with Stopwatch() as watch:
                while left:
                    left -= len(await reader.read(min(left, BLOCK)))
            writer.write(b"+")
            await done.put(watch.row)
        writer.close()

    limit = {"limit": BLOCK} if tuned else {}
    server = await asyncio.start_server(accept, "127.0.0.1", 0, **limit)
    pipe.send(server.sockets[0].getsockname()[1])
    while (await asyncio.to_thread(pipe.recv))[0] != "end":
        pipe.send(await done.get())
    server.close()


def stream_writer(pipe: Connection, port: int) -> None:
    asyncio.run(_stream_writer(pipe, port))


async def _stream_writer(pipe: Connection, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payloads: dict[int, memoryview] = {}
    while True:
        command, *args = await asyncio.to_thread(pipe.recv)
        if command == "end":
            break
        size = args[0]
        payload = payloads.setdefault(size, memoryview(os.urandom(size)))
        with Stopwatch() as watch:
            writer.write(size.to_bytes(8, "big"))
            for start in range(0, size, BLOCK):
                writer.write(payload[start : start + BLOCK])
                await writer.drain()
            await reader.readexactly(1)
        pipe.send(watch.row)
    writer.close()
