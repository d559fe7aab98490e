"""Error feedback (design: codecs below 16 bits): what quantisation withheld is given later.

The residual of a fragment is what its merged contributions still owe. A contribution encodes
pseudo-gradient + residual; the error of that is *pending* until a publication tells whether the
contribution was merged. Merged: the error is the new residual. Not merged: nothing was given, the
residual stays, and the error is forgotten, since the next contribution measures the pseudo-gradient
anew. Adoption overwrites the parameters but not the residual: it belongs to merged work.

So at any time   sum of merged decoded contributions + residual = sum of their pseudo-gradients,
to the rounding of one addition per value and round. A new incarnation begins with a residual of
zero: the old one dies with its process.
"""

from dataclasses import dataclass, field
from typing import Any

Array = Any  # fp32 of shape (F,), of numpy or on a device

# Pending contributions per fragment. Two rounds of a fragment are H steps apart, so a third is
# pending only while publications are skipped or late by more than a whole turn; the oldest then
# counts as not merged. Each costs 8 bytes per value on the device.
PENDING_MAX = 2


@dataclass(frozen=True, slots=True)
class Pending:
    """An undecided contribution: the residual that went into it, and the error it left."""

    given: Array
    error: Array


@dataclass(slots=True)
class Feedback:
    """Residual of one fragment, and the errors that may replace it."""

    residual: Array
    pending: dict[int, Pending] = field(default_factory=dict)  # by round

    def sent(self, round_: int, error: Array) -> None:
        """A contribution to that round went out; a later term's to the same round replaces it."""
        self.pending[round_] = Pending(self.residual, error)
        if len(self.pending) > PENDING_MAX:
            del self.pending[min(self.pending)]

    def decided(self, round_: int, merged: bool) -> None:
        """A publication told what became of the contribution to that round."""
        was = self.pending.pop(round_, None)
        if was is None or not merged:
            return
        if was.given is self.residual:
            self.residual = was.error
        else:
            # An earlier contribution was merged meanwhile: what went in is not owed twice.
            self.residual = self.residual - was.given + was.error
