"""The site's half of the link's self-check: prints one JSON object.

python -m wan.check HOST PORT rates MEGABYTES
python -m wan.check HOST PORT loss
"""

import json
import statistics
import sys

from wan.raw import Connections, datagrams_lost, round_trip_s

# Enough to tell 0.1 % from nothing: 60 of 60,000, give or take 8.
DATAGRAMS, DATAGRAMS_PER_S = 60_000, 12_000
PINGS = 15
CONNECTIONS = 4


def rates(host: str, port: int, megabytes: int) -> dict[str, float]:
    """Bytes per second of plain TCP each way."""
    connections = Connections(host, port, CONNECTIONS)
    size = megabytes * 1_000_000
    found = {}
    for way in ("put", "get"):
        connections.move(way, size // 2)  # leaves slow start behind
        found[way] = size / connections.move(way, size)
    connections.close()
    return found


def main() -> None:
    """Everything is given by wan.py."""
    host, port, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if what == "rates":
        print(json.dumps(rates(host, port, int(sys.argv[4]))))
        return
    # The round trip first, while the link is idle.
    pings = round_trip_s(host, port, PINGS)
    lost = datagrams_lost(host, port, DATAGRAMS, DATAGRAMS_PER_S)
    print(json.dumps({"round_trip_s": statistics.median(pings), "datagrams_lost": lost}))


if __name__ == "__main__":
    main()
