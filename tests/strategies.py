"""Random models of the family, for laws that must hold for all of them."""

import torch
from hypothesis import strategies as st

from spiralformer import SpiralConfig, SpiralFormer, costs

VOCAB = 13


@st.composite
def configs(draw, max_iterations: int = 5, max_chunk: int = 9) -> SpiralConfig:
    """Any loop of up to T iterations with any chunk sizes, legal offsets and legal shifts."""
    chunks = draw(st.lists(st.integers(1, max_chunk), min_size=1, max_size=max_iterations))
    tied = draw(st.integers(0, 7)) > 0
    pre, core, post = (draw(st.integers(low, 1)) for low in (0, 1, 0))
    if tied:
        resolutions = ",".join("1" if g == 1 else f"1/{g}" for g in chunks)
        layout = f"{pre}+{core}x{{{resolutions}}}+{post}"
    else:
        chunks = [1] * len(chunks)
        layout = "+".join(map(str, (pre, *[core] * len(chunks), post)))
    offset = draw(
        st.sampled_from(["half", "zero"]) | st.tuples(*(st.integers(0, g - 1) for g in chunks))
    )
    shift = draw(
        st.sampled_from(["overlap", "parallel"])
        | st.tuples(*(st.integers(g - 1, 2 * g + 2) for g in chunks))
    )
    return SpiralConfig(
        layout=layout,
        hidden_size=16,
        num_heads=2,
        vocab_size=VOCAB,
        intermediate_size=24,
        max_length=64,
        rotary_fraction=0.5,
        offset=offset,
        shift=shift,
        topology=draw(st.sampled_from(list(costs.TOPOLOGY))),
        downscale=draw(st.sampled_from(list(costs.DOWNSCALE))),
        upscale=draw(st.sampled_from(list(costs.UPSCALE))),
        norm=draw(st.sampled_from(list(costs.NORM))),
        parallel_residual=draw(st.booleans()),
        scale_embeddings=draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
    )


def build(config: SpiralConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> SpiralFormer:
    """A model with weights large enough that a wrong wiring shows far above rounding."""
    torch.manual_seed(seed)
    model = SpiralFormer(config).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 and "norm" in name and name.endswith("weight"):
                p.copy_(1 + 0.2 * torch.randn_like(p))
            else:
                soft = "scorer" in name or "router" in name  # softmaxes that spread their weight
                p.copy_((0.05 if soft else 0.3) * torch.randn_like(p))
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
