"""A hub with a folder of identities, whose own authority certifies its message server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from live.hubs import Hub, encrypted, prepare, serving

from diloco_shared.bus.nats.access import TlsFiles
from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.hub import folder as hub_folder


class TlsHub(Hub):
    """Every connection trusts the hub's authority; `mutual`: and presents its certificate."""

    @property
    def authority(self) -> Path:
        return self.folder / hub_folder.AUTHORITY

    def tls(self, name: str) -> TlsFiles:
        certificate = hub_folder.certificate_of(self.folder, name)
        return TlsFiles(self.authority, certificate if certificate.exists() else None)

    @asynccontextmanager
    async def bus(self, name: str, file: Path | None = None) -> AsyncIterator[NatsBus]:
        bus = await NatsBus.connect(
            self.url, name=name, credentials=file or self.file(name), tls=self.tls(name)
        )
        try:
            yield bus
        finally:
            await bus.close()

    def environment(self, name: str) -> dict[str, str]:
        """Of a process with this identity."""
        certificate = hub_folder.certificate_of(self.folder, name)
        return {
            "DILOCO_NATS_URL": self.url,
            "DILOCO_NATS_CREDENTIALS": str(self.file(name)),
            "DILOCO_NATS_CA": str(self.authority),
            "DILOCO_NATS_CLIENT_CERT": str(certificate) if certificate.exists() else "",
        }


@asynccontextmanager
async def a_tls_hub(folder: Path, *learners: str, mutual: bool = False) -> AsyncIterator[TlsHub]:
    """One that runs, with the streams of the run `r` and all buckets."""
    hub_folder.create(
        folder,
        listen="127.0.0.1:-1",
        store=folder / "store",
        hosts=("127.0.0.1", "localhost"),
        mutual_tls=mutual,
    )
    for learner in learners:
        hub_folder.add(folder, learner, "learner")
    async with serving(folder) as (pid, url):
        hub = TlsHub(folder, pid, encrypted(url))
        async with hub.bus("coordinator") as bus:
            await prepare(bus)
        yield hub
