"""Coverage-guided fuzzing of the lane's parser, on what wire_target.py demands.

    python tests/fuzz/fuzz_nats_wire.py FOLDER -max_total_time=600

`FOLDER` keeps inputs that reach something new, for the next time; libFuzzer's flags follow. An
input that breaks a demand is written to corpus/, and test_fuzz_nats_wire.py tries it again.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from wire_target import one

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
# Longer inputs say nothing new: staging buffers that overflow have tests of their own.
BYTES_MAX = 1024


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    name, folder, *flags = sys.argv
    Path(folder).mkdir(parents=True, exist_ok=True)
    ours = [f"-artifact_prefix={CORPUS}/", f"-dict={HERE / 'nats_wire.dict'}"]
    # New inputs go to the first folder; a flag that is given twice counts as given last.
    atheris.Setup([name, folder, str(CORPUS), *ours, f"-max_len={BYTES_MAX}", *flags], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
