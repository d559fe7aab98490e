"""The page that lists the attacks: `cd tests && python -m live.attacks.page` writes it anew."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from live.attacks import bus, files, rest, shared_places
from live.attacks.cases import ATTACKS

PAGE = Path(__file__).parents[3] / "docs" / "results" / "attacks.md"
KINDS = (
    ("bus", "On the message server", (bus, shared_places)),
    ("rest", "On the REST interface", rest),
    ("files", "On a learner's machine", files),
)
# A line of the page may be longer than one of the program.
HEAD = [
    "# Would an attack succeed?",
    "**The question.** Somebody steals the credentials of a site, or a token of the REST "
    "interface, or has neither and reaches the hub's ports. What can they do to the runs "
    "of others?",
    f"**The answer.** None of these {len(ATTACKS)} attacks changes anything. Each is refused. The "
    "list says how, and where that is logged with whom; of some refusals nothing is logged. What "
    "is not protected stands in the [threat model](../explanation/threat-model.md): whoever has a "
    "site's credentials can still lie about that site's own learners.",
    "An **actor** is the name of a token, or the public key of an identity of the message server. "
    "`diloco audit` shows the audit log of the coordinator. `diloco site list --json` tells whose "
    "a key is.",
]
TAIL = [
    "## How it was measured",
    "One test plays all of it against a hub with TLS, a coordinator, two syncers, and a site whose "
    "learners train meanwhile. The credentials of another site are stolen. After each attack the "
    "test compares what the buckets hold: runs, assignments, members, lives, leases and tokens. It "
    "compares the tape and where the run stands, too. None may differ, and the tape may only have "
    "grown. At the end the run goes on.",
    "```text\npytest tests/live/test_attacks.py\n"
    "cd tests && python -m live.attacks.page   # writes this page anew from the test\n```",
    "## What to keep in mind",
    "- Somebody had to think of each attack. The list shows that these are refused, and not that "
    "there are no others.\n"
    "- Every attack is played once, on one machine, with one hub and two sites. Nothing is said "
    "about floods from many machines.\n"
    "- The attackers speak to the product's own ports. Operating systems, containers, NATS itself "
    "and libraries are taken to be sound.\n"
    "- Where every process shares one secret, as in a cluster of one machine, most of the list "
    "does not hold: it needs credentials for each site.",
]


def page() -> str:
    """The whole page."""
    parts = [f"{paragraph}\n" for paragraph in HEAD]
    parts.append(table(("answer", "what happens", "where it is logged"), answers()))
    number = count(1)
    for kind, title, _ in KINDS:
        rows = sorted((a for a in ATTACKS if a.kind == kind), key=lambda a: a.by)
        cells = [(str(next(number)), a.by, a.name, a.how.word) for a in rows]
        parts += [f"## {title}\n", table(("", "who", "tries what", "answer"), cells)]
    parts += [f"{paragraph}\n" for paragraph in TAIL]
    return "\n".join(parts)


def answers() -> list[tuple[str, str, str]]:
    """What the words of the last column mean, in the order in which they come."""
    hows = dict.fromkeys(attack.how for attack in ATTACKS)
    return [(how.word, how.refused, how.logged) for how in hows]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
