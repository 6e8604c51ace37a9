"""`python -m tests.vllm.references CASE.json`: what our own decoder says, in a process of its own,
because vLLM changes classes of Hugging Face in the one it lives in."""

import json
import sys
from pathlib import Path

import torch

from spiralformer import SpiralConfig
from spiralformer.decode import generate
from spiralformer.hf.export import export
from spiralformer.model_folder import save_model
from tests.strategies import build


def answer(case: dict) -> dict:
    """Writes the model folder; gives new tokens and their log-probabilities, turn by turn. The next
    turn's prompt is all that was said before, and something new."""
    model = build(SpiralConfig.from_dict(case["config"]), dtype=torch.float32)
    folder = Path(case["folder"])
    save_model(model, folder / "model")
    if case["export"]:
        export(folder / "model", folder / "exported")
    turns, prompts = [], case["prompts"]
    for asks in [*case["asks"], None]:
        new = generate(model, prompts, max_new_tokens=case["new"], runner="eager")
        logprobs = []
        for prompt, tokens in zip(prompts, new, strict=True):
            text = torch.tensor([prompt + tokens])
            with torch.no_grad():
                said = model(text)[0].log_softmax(-1)[len(prompt) - 1 : -1]
            logprobs.append(said.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist())
        turns.append({"prompts": prompts, "tokens": new, "logprobs": logprobs})
        if asks is not None:
            prompts = [p + t + asks for p, t in zip(prompts, new, strict=True)]
    return {"turns": turns}


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    path.with_suffix(".answer").write_text(json.dumps(answer(json.loads(path.read_text()))))
