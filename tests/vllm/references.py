"""`python -m tests.vllm.references`: what our own decoder says, case by case as they come on the
standard input, in a process of its own, because vLLM changes classes of Hugging Face in its."""

import json
import sys
from pathlib import Path

import torch

from spiralformer import SpiralConfig
from spiralformer.decode import generate
from spiralformer.model_folder import save_model
from tests.strategies import build


def answer(case: dict) -> list[dict]:
    """Writes the model folder; gives new tokens and their log-probabilities, turn by turn. The next
    turn's prompt is all that was said before, and something new."""
    model = build(SpiralConfig.from_dict(case["config"]), dtype=torch.float32)
    folder = Path(case["folder"])
    save_model(model, folder / "model")
    if case["export"]:
        from spiralformer.hf.export import export

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
    return turns


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
