"""Do our checkpoints load in transformers, and compute there what they compute here?

    python tests/interop/compare.py FOLDER

FOLDER is what write_ours.py wrote. Needs transformers and torch, and nothing of ours. Exit status 1
if a logit differs by more than 1e-4 of its size, a tensor is missing or unknown, or a class has
another default than the one by which we read its config.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

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


def compare_defaults(kind: str, ours: dict[str, Any]) -> bool:
    config = CONFIG_MAPPING[kind]()
    theirs = {name: default_of(config, name) for name in ours}
    wrong = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    # What these say is none here; a class that has more to say is to be listed.
    for name in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "head_dim"):
        default = getattr(config, name, None)
        even = name == "head_dim" and default == config.hidden_size // config.num_attention_heads
        if name not in ours and default is not None and not even:
            wrong[name] = (None, default)
    print(f"{kind:>16}  {len(ours)} defaults  {wrong or 'same'}")
    return not wrong


def default_of(config: Any, name: str) -> Any:
    ropes = config.rope_parameters
    if name == "rope_theta":
        return ropes.get("full_attention", ropes)["rope_theta"]
    if name == "rope_local_base_freq":
        return ropes["sliding_attention"]["rope_theta"]
    return getattr(config, name)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    folders = sorted(f for f in root.iterdir() if f.is_dir())
    same = [compare(folder) for folder in folders]
    known = json.loads((root / "defaults.json").read_text())
    same += [compare_defaults(kind, ours) for kind, ours in known.items()]
    sys.exit(0 if folders and known and all(same) else 1)
