"""What the tests of the Hugging Face classes share: small models, padded batches, a tokenizer."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spiralformer import SpiralConfig, SpiralFormer
from spiralformer.hf import SpiralFormerConfig, SpiralFormerForCausalLM
from tests.strategies import build

transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()

VOCAB, PAD = 61, 0
SMALL = {"hidden_size": 16, "num_heads": 2, "vocab_size": VOCAB, "max_length": 128}
SMALL |= {"intermediate_size": 24, "rotary_fraction": 0.5}
LAYOUTS = {
    "paper": {"layout": "1+1x{1/8,1/4,1/2,1}+1"},
    "bare": {"layout": "0+1x{1/3,1}+0"},
    "coarse": {"layout": "1+1x{1/5,1/2}+1", "downscale": "mean", "upscale": "uniform"},
    "parallel": {"layout": "1+1x{1/4,1/2,1}+1", "shift": "parallel"},
    "untied": {"layout": "1+1+1+1"},
}
PAPER = SpiralConfig(**LAYOUTS["paper"], **SMALL)
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": PAD}


def wrap(model: SpiralFormer, **fields) -> SpiralFormerForCausalLM:
    wrapped = SpiralFormerForCausalLM(SpiralFormerConfig.from_spiral(model.config, **fields))
    wrapped.to(model.embedding.weight.dtype).model.load_state_dict(model.state_dict())
    return wrapped.eval()


def wrapped(config: SpiralConfig = PAPER, dtype=torch.float64, **fields) -> SpiralFormerForCausalLM:
    return wrap(build(config, dtype=dtype), **fields)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (n,), generator=rng).tolist() for n in lengths]


def padded(rows: list[list[int]], side: str = "left", extra: int = 0) -> dict[str, torch.Tensor]:
    """A batch of the rows, `extra` columns wider than it need be."""
    width = max(map(len, rows)) + extra
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for k, row in enumerate(rows):
        where = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[k, where], mask[k, where] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


RAGGED = prompts(13, 1, 8, 21)


def tiny_tokenizer(path) -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    text = ["a loop runs coarse to fine", "each chunk is one latent of the loop"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    found.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    found.save(str(path))
    return found
