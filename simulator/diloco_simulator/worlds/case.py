"""What a whole world is made of: a seed, and all that was drawn with it, however it is drawn later.

A seed decides how dice fall. What they fall for is said here: options, constants of the product,
and who else takes part.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from diloco_simulator.worlds import constants
from diloco_simulator.worlds.options import Options

# In so many worlds troubles come while the run begins; in the others, once it trains. Where looks
# are rare that may take a minute, more than the time in which anything may go wrong.
EARLY = 0.25
# How often a run that has lost its state waits to be asked.
ASK = 0.3
# How many worlds have later runs, and how many those are.
SEQUELS, IN_A_ROW = 0.3, (1, 1, 1, 2, 3)
# How many worlds have somebody who takes weights out of the run.
EXPORTS = 0.4
# Parts of a case beside the seed, the options and the constants: a calm world has none of them.
CAST = ("early", "asks", "visitors", "hardships", "sequels", "exports")

_CALM = Options.calm()


@dataclass(frozen=True, slots=True)
class Case:
    """One world."""

    seed: int
    options: Options
    constants: dict[str, float] = field(default_factory=dict)  # by path: not the product's own
    early: bool = False  # troubles come while the run begins
    asks: bool = False  # a run that lost its state waits to be asked
    visitors: bool = False
    hardships: bool = False  # full streams, stores that are away, scarce data, copies that live
    sequels: int = 0  # later runs, one after another
    exports: bool = False  # weights are taken out of the run

    @classmethod
    def drawn(cls, seed: int, options: Options | None = None) -> "Case":
        """As the seed has it, but for these options."""
        dice, options = Random(f"sequel {seed}"), options or Options.drawn(seed)
        of_islands = constants.of_islands(seed) if options.hosts else {}
        # What a backup does not know, as a run, a token or a fault that somebody asked for since,
        # is gone: nobody else asks for anything in such a world.
        alone = options.hub_restores > 0
        of_carriers = constants.of_carriers(seed) if options.carriers else {}
        of_spoilt = constants.of_spoilt(seed) if options.spoilt else {}
        return cls(
            seed,
            options,
            constants.bearable(
                constants.drawn(Random(f"constants {seed}"))
                | constants.later(seed)
                | constants.of_memory(seed)
                | of_spoilt
                | of_islands
                | of_carriers,
                options.delay_s,
            ),
            early=Random(f"early {seed}").random() < EARLY,
            asks=Random(f"begins again {seed}").random() < ASK,
            visitors=not alone,
            hardships=not alone,
            sequels=dice.choice(IN_A_ROW) if dice.random() < SEQUELS and not alone else 0,
            exports=Random(f"exports {seed}").random() < EXPORTS and not alone,
        )

    def changed(self, **changes: Any) -> "Case":
        """The same world but for these options."""
        return replace(self, options=self.options.changed(**changes))

    def of(self, seed: int) -> "Case":
        """Of the same parts, with other dice."""
        return replace(self, seed=seed)

    # --- what is not as in a calm world ----------------------------------------------------------

    @property
    def unlike(self) -> dict[str, Any]:
        """Options that differ from a calm world's."""
        values = {f.name: getattr(self.options, f.name) for f in fields(Options)}
        return {name: v for name, v in values.items() if v != getattr(_CALM, name)}

    def names(self) -> list[str]:
        """Of all that is not as in a calm world: options, constants and the cast."""
        return [*self.unlike, *self.constants, *(name for name in CAST if getattr(self, name))]

    def without(self, names: Iterable[str]) -> "Case":
        """These are as in a calm world; of constants, also those that go with them."""
        gone, cast, back = set[str](), dict[str, Any](), dict[str, Any]()
        for name in names:
            if name in CAST:
                cast[name] = type(getattr(self, name))()
            elif name in constants.KNOWN:
                gone |= constants.together(name)
            else:
                back[name] = getattr(_CALM, name)
        kept = {path: value for path, value in self.constants.items() if path not in gone}
        return replace(self.changed(**back), constants=kept, **cast)
