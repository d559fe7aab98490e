"""Do our checkpoints load in transformers, and compute there what they compute here?

    python tests/interop/compare.py FOLDER

FOLDER is what write_ours.py wrote. Needs transformers and torch, and nothing of ours. Exit status 1
if a logit differs by more than 1e-4 of its size, or a tensor is missing or unknown.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

NEAR = 1e-4


def compare(folder: Path) -> bool:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    strange = [f"{kind}: {sorted(names)}" for kind, names in report.items() if names]
    found = load_file(folder / "computed.safetensors")
    with torch.no_grad():
        logits = model(found["tokens"].long()).logits
    ours = found["logits"]
    off = float((logits - ours).abs().max() / ours.abs().max())
    same = not strange and off <= NEAR
    kind = type(model).__name__
    print(
        f"{folder.name:>16}  {kind:<20} largest difference {off:.1e}  {'same' if same else 'NOT'}"
    )
    for line in strange:
        print(f"{'':>18}{line}")
    return same


if __name__ == "__main__":
    folders = sorted(f for f in Path(sys.argv[1]).iterdir() if f.is_dir())
    sys.exit(0 if folders and all([compare(folder) for folder in folders]) else 1)
