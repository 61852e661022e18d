"""Loads an exported folder as a stranger would, in a process of its own: `python -m shardwise.export.smoke FOLDER`.

Exits 1 with a sentence unless transformers gives the logits and the greedy tokens of `reference.json`."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-4  # relative, of float32 logits


def logits_checksum(logits: torch.Tensor) -> list[float]:
    """Returns numbers that change with any logit: its norm, and its products with two waves."""
    flat = logits.double().flatten()
    place = torch.arange(len(flat), dtype=torch.float64)
    return [float(flat.norm()), float(flat @ torch.cos(place)), float(flat @ torch.sin(0.7 * place))]


def greedy_tokens(next_logits: Any, prompt: list[int], count: int) -> list[int]:
    """Returns the most likely next tokens; `next_logits` gives those after some rows (1, S)."""
    row = list(prompt)
    for _ in range(count):
        row.append(int(next_logits(torch.tensor([row])).argmax()))
    return row[len(prompt) :]


def smoke_test(folder: Path) -> str:
    """Returns what is wrong; empty if nothing is."""
    import transformers

    reference = json.loads((folder / "reference.json").read_bytes())
    name = json.loads((folder / "config.json").read_bytes())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        found = logits_checksum(model(input_ids=torch.tensor([reference["prompt_ids"]])).logits)
        expected, scale = reference["logits_checksum"], max(reference["logits_checksum"][0], 1e-30)
        if not math.dist(found, expected) <= TOLERANCE * scale:
            return f"the logits of {name} differ: their checksum is {found} instead of {expected}."
        prompt, text = reference["prompt_ids"], reference["greedy_ids"]
        greedy = greedy_tokens(lambda rows: model(input_ids=rows).logits[0, -1], prompt, len(text))
    return "" if greedy == text else f"{name} continues with {greedy}, not {text}."


if __name__ == "__main__":
    sys.exit(smoke_test(Path(sys.argv[1])) or print("Logits and greedy text are those of reference.json."))
