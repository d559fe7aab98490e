"""Input that changed nothing, counted by kind and told (invariant I11)."""

from collections import Counter

from diloco_syncer.events import Effect, Tell


class Refusals(Counter[str]):
    """At the door of one leader's term; the tape counts those in rounds."""

    def tell(self, kind: str, source: str, what: str) -> list[Effect]:
        """Count one ("" for none); told at powers of two: bad input must not flood the events."""
        if not kind:
            return []
        self[kind] += 1
        count = self[kind]
        if count & (count - 1):
            return []
        return [Tell("refused", f"{source}: {kind} ({what}), {count} so far", {"kind": kind})]
