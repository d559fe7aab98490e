"""Publications of one fragment that wait for the one before them."""

import asyncio
from collections import deque

from diloco_shared.protocol.messages import PublicationManifest

# Beyond, whoever adds waits: several keyframe periods of manifests of at most some kilobytes.
WAITING_MAX = 256


class Backlog:
    """In order of arrival; a keyframe makes those before it needless.

    Without that, one who reads what was purged meanwhile finds out one by one, and may never
    catch up with a run that publishes faster than it does.
    """

    def __init__(self) -> None:
        self._waiting: deque[PublicationManifest] = deque()
        self._changed = asyncio.Condition()

    async def put(self, manifest: PublicationManifest) -> None:
        async with self._changed:
            if manifest.prev_version < 0:
                place = (manifest.epoch, manifest.version)
                newer = [m for m in self._waiting if (m.epoch, m.version) > place]
                self._waiting = deque(newer)
            await self._changed.wait_for(lambda: len(self._waiting) < WAITING_MAX)
            self._waiting.append(manifest)
            self._changed.notify_all()

    async def get(self) -> PublicationManifest:
        """The oldest that is worth fetching, once there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._waiting))
            manifest = self._waiting.popleft()
            self._changed.notify_all()
            return manifest
