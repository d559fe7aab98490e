"""What the train thread hands out, carried to the bus: contributions, inner state, results."""

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog

from diloco_learner.context import RunContext
from diloco_learner.data.leasing_io import Leases
from diloco_learner.events import (
    Checkpoint,
    Contribute,
    GiveState,
    KeepPart,
    Leave,
    Merged,
    PartSettled,
    Tell,
)
from diloco_learner.exchange.encoding import Encoded
from diloco_learner.hosts.carrying_io import SharedUpload
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.recovery.checkpoint_io import OwnCheckpoints, Storing, sequence_of, write_part
from diloco_learner.recovery.moments import Handed
from diloco_learner.training.train import ToSend
from diloco_shared import ambient
from diloco_shared.bus.blobs import announcement_subject, manifest_subject, put_blob
from diloco_shared.bus.port import Bus, BusError, StreamFull, TransferProgress, Unavailable
from diloco_shared.bus.repeating import PROMPT, until_done
from diloco_shared.bus.stored_records import event_now, event_subject
from diloco_shared.process.crash_points import passing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import Payload
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    Donate,
    InitManifest,
    Message,
    StateManifest,
    TensorSpec,
)
from diloco_shared.protocol.pace import silence_s
from diloco_shared.protocol.wire import WireError, encode
from diloco_shared.spec.run import config_hash

log = structlog.get_logger()

# A newcomer has asked for another donor when nothing of a state has moved for this many seconds.
STATE_SILENCE_S = 2 * silence_s()
# A manifest, whose blob is stored, is worth this many seconds of trying.
MANIFEST_S = 60.0
# An event is worth this many seconds of trying: a restart of the server takes less.
EVENT_S = 15.0


class Uplink:
    """The sending side of one learner in one run."""

    def __init__(
        self,
        context: RunContext,
        sizes_P: tuple[int, ...],
        checkpoints: OwnCheckpoints,
        leases: Leases,
        put: Callable[[object], None],
    ) -> None:
        self.spec = spec = context.spec
        self.run = spec.name
        self.learner, self.incarnation = context.me, context.incarnation
        self.control, self.data = context.control, context.data
        self.sizes_P = sizes_P
        self.hash = config_hash(spec)
        self.checkpoints = checkpoints
        self.leases = leases
        self.put = put
        self.checkpoint_root = context.checkpoint_root
        self.checkpoint_places = context.checkpoint_places
        self.checkpoint_lock = asyncio.Lock()
        self.own_disk, self.vault = Storing(), Storing()
        self.initial_lock = asyncio.Lock()
        self.telling: set[asyncio.Task[None]] = set()
        # That send inner state to newcomers, and what each was asked for.
        self.giving: dict[asyncio.Task[Any], Donate] = {}
        # Each ends one contribution that is under way; as many as rounds may be.
        self.contributing: set[asyncio.Timeout] = set()
        self.void = False  # no merge takes what this learner contributes

    async def send(self, item: ToSend) -> None:
        """Carry out one effect; what fails is logged and told, never raised."""
        try:
            match item.effect:
                case Contribute():
                    await self._contribute(item.effect, item.handle)
                case GiveState():
                    await self._give_state(item.effect, item.handle)
                case Checkpoint():
                    await self._checkpoint(item.effect, item.handle)
                case KeepPart():
                    await self._keep_part(item.effect, item.handle)
                case Merged() if item.effect.cursor is not None:
                    self.leases.merged(item.effect.cursor)
                case Tell():
                    await self.tell(item.effect.kind, item.effect.text, item.effect.data)
                case Leave():
                    outcome, reason = item.effect.outcome, item.effect.reason
                    await self.tell("leave", f"{outcome}: {reason}", {"outcome": outcome})
        except (BusError, WireError, OSError) as error:
            what = type(item.effect).__name__
            log.warning("not done", what=what, error=str(error))
            if isinstance(item.effect, Contribute | GiveState):
                await self.tell("upload-abandoned", f"{what}: {error}"[:500], {})
        finally:
            if isinstance(item.handle, Handed):
                item.handle.let_go()

    async def tell(self, kind: str, text: str, data: dict[str, Any]) -> None:
        """Write to the event log; an event that cannot be written is only logged."""
        log.info(kind, text=text)
        event = event_now(self.run, kind, self.learner, text, data)
        try:
            subject = event_subject(self.control, event, "learner")
            await self._append(self.control, subject, event, EVENT_S, ambient.unique())
        except (BusError, WireError) as error:
            log.warning("event not written", kind=kind, error=str(error))

    def tell_soon(self, kind: str, text: str, data: dict[str, Any]) -> None:
        """`tell`, without waiting for it."""
        task = asyncio.get_running_loop().create_task(self.tell(kind, text, data))
        self.telling.add(task)
        task.add_done_callback(self.telling.discard)

    async def told(self) -> None:
        """Until everything that `tell_soon` began is written or given up. Whoever is cancelled here
        may come again: none of it ends with that."""
        await asyncio.gather(*map(asyncio.shield, self.telling))

    async def _append(
        self, bus: Bus, subject: str, message: Message, seconds: float, msg_id: str
    ) -> None:
        """Store `message` once; tries again for at most `seconds`, then raises the last trouble."""
        payload, until = encode(message), ambient.monotonic() + seconds

        async def append() -> None:
            timeout_s = min(max(until - ambient.monotonic(), 0.1), 5.0)
            await bus.append(subject, payload, msg_id=msg_id, timeout_s=timeout_s)

        trouble = (Unavailable, StreamFull)
        await until_done(append, subject, pauses=PROMPT, trouble=trouble, until=until)

    async def has_initial(self, p: int) -> bool:
        """Whether one fragment of this learner's fresh parameters is there, all of it.

        Asks until it is answered: whoever gave up would send again what it had stored so far.
        """
        name = manifest_subject(subjects.initial(self.run, self.learner, self.incarnation, p))
        last = partial(self.data.last, subjects.up_stream(self.run), name)
        doing = f"whether {name} is there"
        return await until_done(last, doing, pauses=PROMPT, trouble=Unavailable) is not None

    async def initial(
        self,
        layout: tuple[TensorSpec, ...],
        p: int,
        payload: Payload | SharedStateUpload,
        stored: TransferProgress,
    ) -> None:
        """One fragment of this learner's fresh parameters, unless it is there: until it is.

        `stored` tells meanwhile how far it got. Of several under way one at a time uses the link,
        in the order of the calls: what goes before and after its chunks holds up no other.
        """
        if await self.has_initial(p):
            return
        subject = subjects.initial(self.run, self.learner, self.incarnation, p)
        name = manifest_subject(subject)
        async with self.initial_lock:
            if isinstance(payload, SharedStateUpload):
                blob = await payload.store(self.data, subject, progress=stored)
            else:
                blob = await put_blob(self.data, subject, payload, progress=stored)
        manifest = InitManifest(
            run=self.run,
            learner=self.learner,
            incarnation=self.incarnation,
            config_hash=self.hash,
            layout=layout,
            fragment=p,
            blob=blob,
        )
        # Under an id of its own: one that the syncer took off the stream is no repeat.
        await self._append(self.data, name, manifest, math.inf, ambient.unique())

    async def _manifest(self, subject: str, manifest: Message, seconds: float) -> None:
        """Last of a blob: from now on it counts.

        Under an id of this life: what another has sent there is not taken for the first attempt.
        """
        name = manifest_subject(subject)
        await self._append(self.data, name, manifest, seconds, f"{name}/{self.incarnation}")

    async def _contribute(self, effect: Contribute, handle: Encoded | SharedUpload) -> None:
        """Until its deadline, or until it is of no use any more: see `stop_contributing`."""
        if self.void:
            return
        try:
            async with asyncio.timeout(None) as limit:
                self.contributing.add(limit)
                try:
                    await self._upload(effect, handle)
                finally:
                    self.contributing.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise

    async def _upload(self, effect: Contribute, handle: Encoded | SharedUpload) -> None:
        e = effect
        subject = subjects.contribution(
            self.run, self.learner, e.epoch, e.fragment, e.round, e.term
        )
        if isinstance(handle, SharedUpload):
            blob = await handle.put(self.data, subject, e.deadline)
        else:
            blob = await self._put(handle, subject, e.deadline)
        if blob is None:
            return  # nobody waits for it any more
        passing("contribution")
        await self._manifest(subject, self._described(e, blob), e.deadline - ambient.monotonic())

    async def _put(self, handle: Encoded, subject: str, deadline: float) -> Blob | None:
        """Its chunks; None where it comes too late."""
        payload = await asyncio.to_thread(handle.fetch)
        if (left_s := deadline - ambient.monotonic()) <= 0:
            return None
        return await put_blob(self.data, subject, payload, deadline_s=left_s)

    def _described(self, e: Contribute, blob: Blob) -> ContributionManifest:
        return ContributionManifest(
            run=self.run,
            learner=self.learner,
            incarnation=self.incarnation,
            epoch=e.epoch,
            term=e.term,
            round=e.round,
            fragment=e.fragment,
            base=e.base,
            step_from=e.step_from,
            step_to=e.step_to,
            tokens_from=e.tokens_from,
            tokens_to=e.tokens_to,
            cursor=e.cursor,
            codec=self.spec.algorithm.codec_up,
            values=self.sizes_P[e.fragment],
            config_hash=self.hash,
            checkpoint=e.checkpoint,
            blob=blob,
        )

    async def _give_state(self, effect: GiveState, handed: Handed) -> None:
        """Announced first: the newcomer fetches while this learner still sends."""
        task = asyncio.current_task()
        assert task is not None
        d, payload = effect.donate, handed.data
        self.giving[task] = d
        task.add_done_callback(self.giving.pop)
        subject = subjects.state(self.run, self.learner, d.newcomer, d.nonce)

        async def announce(blob: Blob) -> None:
            name = announcement_subject(subject)
            await self._append(self.data, name, self._state(effect, blob), MANIFEST_S, name)

        to: dict[str, Any] = {"patience_s": STATE_SILENCE_S, "announce": announce}
        if isinstance(payload, SharedStateUpload):
            blob = await payload.store(self.data, subject, **to)
        else:
            blob = await put_blob(self.data, subject, payload, **to)
        passing("donation")
        await self._manifest(subject, self._state(effect, blob), MANIFEST_S)
        await self.tell(
            "donated",
            f"{self.learner} gave its optimizer state to {d.newcomer}",
            {"newcomer": d.newcomer, "bytes": blob.bytes, "moments": blob.digest},
        )

    def _state(self, effect: GiveState, blob: Blob) -> StateManifest:
        d = effect.donate
        return StateManifest(
            run=self.run,
            donor=self.learner,
            donor_incarnation=self.incarnation,
            newcomer=d.newcomer,
            newcomer_incarnation=d.newcomer_incarnation,
            nonce=d.nonce,
            epoch=d.epoch,
            versions=effect.versions,
            donor_step=effect.step,
            config_hash=self.hash,
            blob=blob,
        )

    def asked(self, donate: Donate) -> None:
        """What its newcomer asked for before nobody waits for: megabytes less to send."""
        for task, older in self.giving.items():
            same = older.newcomer == donate.newcomer and older.nonce != donate.nonce
            # Else the request is the older one: the leader of before may repeat it.
            if same and _asked_at(donate) >= _asked_at(older):
                log.info("gives no more", newcomer=older.newcomer, nonce=older.nonce)
                task.cancel()

    def outlived(self, incarnations: Mapping[str, int]) -> None:
        """These lives are the newest: to those before them nobody gives anything any more."""
        for task, donate in self.giving.items():
            if incarnations.get(donate.newcomer, -1) > donate.newcomer_incarnation:
                log.info("gives no more", newcomer=donate.newcomer, nonce=donate.nonce)
                task.cancel()

    def stop_giving(self) -> None:
        """This learner leaves: its newcomers ask another donor, nobody waits for megabytes."""
        for task in self.giving:
            task.cancel()

    def stop_contributing(self) -> None:
        """No merge takes anything of this learner any more: what is on its way ends, and what is
        still to be sent is not begun. The next life, or run, waits for no megabytes.

        It ends within its own task, which goes on: whoever waits for it is not cancelled with it.
        """
        self.void = True
        if self.contributing:
            log.info("contributes no more", given_up=len(self.contributing))
        while self.contributing:
            self.contributing.pop().reschedule(-math.inf)

    async def _checkpoint(self, effect: Checkpoint, handle: Any) -> None:
        """One at a time; the sequence grows across incarnations. `handle`: a copy, or whatever its
        checkpoints are made of."""
        pieces = [handle.data] if isinstance(handle, Handed) else handle
        sequence = sequence_of(effect.epoch, self.incarnation, effect.step)
        async with self.checkpoint_lock:
            known, kept = self.checkpoints.room.failed, self.checkpoints
            try:
                size, beside_s = kept.room.needed, kept.beside_s
                await self.own_disk(size, kept.save, sequence, pieces, beside_s=beside_s)
            except OSError as error:  # a full disk: training goes on without it
                kept.room.failed = kept.room.failed or str(error)  # where it still hangs
                if known:
                    log.warning("checkpoint not written", step=effect.step, error=str(error))
                    return  # told when it began
                await self.tell("checkpoint-failed", f"step {effect.step}: {error}"[:500], {})
            finally:
                kept.let_go(pieces)

    @property
    def hanging(self) -> set[asyncio.Future[Any]]:
        """Threads that were given up, and hold a state, or what of it lies on a device."""
        return {place.hanging for place in (self.own_disk, self.vault) if place.hanging is not None}

    async def _keep_part(self, effect: KeepPart, handed: Handed) -> None:
        """This learner's part of a run-wide checkpoint; without it the others' are complete."""
        root, me, data = self.checkpoint_root, (self.learner, self.incarnation), handed.data
        try:
            if isinstance(data, SharedStateUpload):
                data = await data.whole()
            await self.vault(len(data), write_part, self.spec, root, *me, effect, data)
        except (OSError, BusError) as error:
            text = f"no part of {self.learner} in checkpoint {effect.number}: {error}"
            await self.tell("checkpoint-failed", text, {"number": effect.number})
        self.put(PartSettled(effect.number))


def _asked_at(donate: Donate) -> tuple[int, int]:
    """Grows with the requests for one newcomer: its life, and the epoch."""
    return donate.newcomer_incarnation, donate.epoch
