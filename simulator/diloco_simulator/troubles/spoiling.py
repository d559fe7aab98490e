"""Payloads that a reader cannot have whole: for a while one chunk is altered or lost for it.

Damage on the way is made good by the next read. This lasts, as where a block of the server's disk
is bad: whoever reads meets the same chunk again, and may give the payload up before it is over.
"""

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from diloco_simulator.troubles.chance import Chance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diloco_shared.bus.port import Stored
    from diloco_simulator.inside.observer import Scene

# For so long, in virtual seconds. Shorter than a standby takes to call a contribution damaged and a
# run to begin again without it (`begin_again_after_s` of a world's run is 13).
LASTS_S = (1.0, 20.0)
# Bits that a damaged byte has otherwise.
WRONG = 0x40
# What readers of a kind fetch, by the beginnings of their names.
READ = {"learner": "dn.", "syncer": "up."}


def reads(name: str, subject: str) -> bool:
    """Whether a process of that name fetches what lies there while all goes on as it should."""
    return any(name.startswith(kind) and subject.startswith(on) for kind, on in READ.items())


class Spoiling:
    """Of one world, with dice of its own. `rate`: of all payloads that somebody begins to read."""

    def __init__(self, scene: "Scene", rng: Random, rate: float) -> None:
        self.scene = scene
        self.rng = rng
        self.chance = Chance(scene, rng)
        self.rate = rate
        # By reader and subject: the sequence of the chunk, whether it is lost, and until when; None
        # for what is sound. A payload is judged once for each reader: its dice are thrown when it
        # is first read.
        self.spoilt: dict[tuple[str, str], tuple[int, bool, float] | None] = {}

    def seen(self, reader: str, subject: str, found: "Sequence[Stored]") -> list["Stored"]:
        """What that reader gets of what the stream holds."""
        if self.rate <= 0 or not found or not self.scene.faulty or not reads(reader, subject):
            return list(found)
        key = reader, subject
        if key not in self.spoilt:
            self.spoilt[key] = self._begun(found)
        if (spoilt := self.spoilt[key]) is None or self.scene.now > spoilt[2]:
            return list(found)
        seq, lost, _ = spoilt
        return [altered(m) if m.seq == seq else m for m in found if m.seq != seq or not lost]

    def _begun(self, found: "Sequence[Stored]") -> tuple[int, bool, float] | None:
        if not self.chance(self.rate, "payloads spoilt for a reader"):
            return None
        lost = self.rng.random() < 0.5
        self.scene.counts[f"chunks {'lost' if lost else 'altered'} for a reader"] += 1
        return self.rng.choice(found).seq, lost, self.scene.now + self.rng.uniform(*LASTS_S)


def altered(message: "Stored", at: int = 0) -> "Stored":
    """With a wrong byte: the first one, the same whoever reads it whenever, or that one."""
    wrong = bytearray(message.payload)
    wrong[at] ^= WRONG
    return replace(message, payload=bytes(wrong))
