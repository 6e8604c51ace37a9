"""Models as the harness sees them: folders of ours, and of any Hugging Face causal model."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spiralformer.console import Progress
from spiralformer.data.tokenizer import EOT, TextTokenizer, load_tokenizer
from spiralformer.decode import Sampling, extend, generate, prefill
from spiralformer.decode.generate import TextStream
from spiralformer.errors import UserError, first_line
from spiralformer.evaluate.perplexity import windows
from spiralformer.evaluate.tasks import quiet
from spiralformer.files import read_json
from spiralformer.model import SpiralFormer
from spiralformer.model.loss import CHUNK
from spiralformer.model_folder import (
    MODEL_TYPE,
    load_model,
    require_finite,
    tokenizer_of,
    usable_device,
)

DEFAULT_NEW_TOKENS = 256  # where a task does not say how long an answer may be, as in the harness
BATCHES = 32  # so many are sorted by length together; what they answer is kept when they are done
LOGITS = 1 << 27  # most logits of a Hugging Face model that exist at once, unless one row has more

Request = tuple[Any, list[int], list[int]]  # texts, tokens of the context, of the continuation


# ---------------------------------------------------------------------------- loading


def load_lm(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    batch_size: int = 8,
    trust_remote_code: bool = False,
) -> SpiralLM | HuggingFaceLM:
    """The model of a folder with its tokenizer; dtype `auto` is the one it was saved in. On the
    device `meta` everything is checked and no weights stay in memory."""
    folder = Path(folder)
    if read_json(folder / "config.json").get("model_type") != MODEL_TYPE:
        return _load_foreign(folder, device, dtype, batch_size, trust_remote_code)
    if tokenizer_of(folder) is None:
        raise UserError(f"{folder}: no tokenizer.json in it; put the one it was trained with")
    tokenizer = load_tokenizer(folder)
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    model = load_model(folder, dtype=wanted, device=device).requires_grad_(False)
    _require_fit(folder, tokenizer.vocab_size, model.config.vocab_size)
    return SpiralLM(model, tokenizer, batch_size)


def _load_foreign(
    folder: Path, device: str, dtype: str, batch_size: int, trusted: bool
) -> HuggingFaceLM:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, device_map=device, dtype=dtype, trust_remote_code=trusted
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        except Exception as error:  # transformers and the folder's own code raise anything
            reason = f"transformers cannot open it: {first_line(error)}"
            if "trust_remote_code" in str(error):
                reason = "brings code of its own; --trust-remote-code runs it"
            raise UserError(f"{folder}: {reason}") from None
        require_finite(dict(model.named_parameters()), folder)
        vocabulary = tokenizer.get_vocab()
        if tokenizer.eos_token is None and EOT in vocabulary:  # a bare tokenizer.json names none
            tokenizer.eos_token = EOT
        if tokenizer.bos_token is None and tokenizer.eos_token is None:
            raise UserError(f"{folder}: its tokenizer has no token to begin a text with")
        size = model.config.get_text_config().vocab_size
        _require_fit(folder, max(vocabulary.values()) + 1, size)
        return HuggingFaceLM(
            pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32"
        )


def _require_fit(folder: Path, ids: int, vocab_size: int) -> None:
    if ids > vocab_size:
        raise UserError(
            f"{folder}: the tokenizer does not fit the model: its largest id is {ids - 1}, the "
            f"model's vocabulary has {vocab_size}; put the tokenizer it was trained with there"
        )


def choose_device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(usable_device(asked))


# ---------------------------------------------------------------------------- models


class FolderLM(TemplateLM):
    """What our two kinds of model share: texts are scored in the windows that `perplexity`
    describes, and progress is shown."""

    max_length: int
    batch_size: int
    context: int | None = None  # tokens of a window; None: the longest sequence
    stride: int | None = None  # tokens between the ends of two windows; None: the context
    label = ""  # of the progress bar
    screen: TextIO | None = None  # where it is drawn; None: nowhere
    progress = Progress("", shown=False)
    truncated = 0  # prompts that lost their beginning to the longest sequence

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        with self._progress(len(requests), "answers"):
            return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        cuts = [list(self._windows(request.args[0])) for request in requests]
        totals = []
        with self._progress(sum(map(len, cuts)), "windows"):
            for numbers in self._groups(range(len(requests))):
                parts = [part for n in numbers for part in cuts[n]]
                answers = iter(self._loglikelihood_tokens(parts))
                for n in numbers:
                    likelihoods = (answer[0] for answer in itertools.islice(answers, len(cuts[n])))
                    totals.append(sum(likelihoods, 0.0))
                    self.cache_hook.add_partial(
                        "loglikelihood_rolling", requests[n].args, totals[n]
                    )
        return totals

    def _windows(self, text: str) -> Iterator[Request]:
        """Each window of a text as a context and what is scored after it."""
        context = self.context or self.max_length
        tokens = [self.prefix_token_id, *self.tok_encode(text)]
        cuts = windows(len(tokens) - 1, context, self.stride or context)
        for start, scored_from, end in cuts:
            yield None, tokens[start : scored_from + 1], tokens[scored_from + 1 : end + 1]

    def _groups(self, items: Any) -> Iterator[Any]:
        size = BATCHES * self.batch_size
        return (items[first : first + size] for first in range(0, len(items), size))

    def _check_lengths(self, requests: list[Request]) -> None:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a continuation of {longest} tokens is longer than the model's longest "
                f"sequence, {self.max_length}"
            )
        self.truncated += sum(len(c) + len(t) > self.max_length + 1 for _, c, t in requests)

    @contextlib.contextmanager
    def _progress(self, total: int, unit: str) -> Iterator[None]:
        """Seen also where the libraries around are kept quiet."""
        shown = self.screen is not None
        with (
            contextlib.redirect_stderr(self.screen or sys.stderr),
            Progress(self.label, total, unit, shown=shown) as self.progress,
        ):
            yield


class SpiralLM(FolderLM):
    """A model of ours. Truncates and scores as the harness's own HFLM does, but the answers to one
    question share a context, and it is read once for all of them."""

    def __init__(self, model: SpiralFormer, tokenizer: TextTokenizer, batch_size: int) -> None:
        super().__init__()
        self.model, self.text_tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length = model.config.max_length
        self._device = model.embedding.weight.device

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eot_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.text_tokenizer.encode(string)

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        self._check_lengths(requests)
        answers = [(0.0, True)] * len(requests)  # of a continuation without tokens
        sharing: dict[tuple[int, ...], list[int]] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if continuation:  # its last token is no input
                room = self.max_length + 1 - len(continuation)
                sharing.setdefault(tuple(context[-room:]), []).append(i)
        longest = lambda group: max(len(requests[i][2]) for i in group[1])
        # The longest first: what would not fit in memory fails at once.
        groups = sorted(sharing.items(), key=lambda group: -len(group[0]) - longest(group))
        while groups:
            rows = itertools.accumulate(len(numbers) for _, numbers in groups)
            count = max(1, sum(1 for _ in itertools.takewhile(self.batch_size.__ge__, rows)))
            batch, groups = groups[:count], groups[count:]
            numbers = [i for _, members in batch for i in members]
            continuations = [[requests[i][2] for i in members] for _, members in batch]
            scores = self._score([list(context) for context, _ in batch], continuations)
            for i, answer in zip(numbers, scores, strict=True):
                answers[i] = answer
                if requests[i][0] is not None:  # a window of a text is no request
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
            self.progress.advance(len(numbers))
        return answers

    def _score(
        self, contexts: list[list[int]], continuations: list[list[list[int]]]
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of each context's continuations, one after the other, and whether each
        token of it is the likeliest."""
        states = self._states(contexts, continuations)
        rows = [continuation for some in continuations for continuation in some]
        targets = torch.tensor([token for row in rows for token in row], device=states.device)
        losses, hits = [], []
        for h, target in zip(states.split(CHUNK), targets.split(CHUNK), strict=True):
            logits = self.model.head(h)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses.append(F.cross_entropy(logits, target, reduction="none"))
            hits.append(logits.argmax(-1) == target)
        lengths = [len(row) for row in rows]
        by_row = zip(torch.cat(losses).split(lengths), torch.cat(hits).split(lengths), strict=True)
        return [(-float(loss.double().sum()), bool(hit.all())) for loss, hit in by_row]

    def _states(self, contexts: list[list[int]], continuations: list[list[list[int]]]) -> Tensor:
        """The output states (N, D) that predict each token of each continuation, one continuation
        after the other. Continuations of one context go on from one state that has read it."""
        rows = [row for some in continuations for row in some]
        lengths = [len(context) for context in contexts]
        if len(rows) == len(contexts):  # nothing is shared: one pass over both together
            texts = [context + row[:-1] for context, row in zip(contexts, rows, strict=True)]
            # The model is causal, so right padding needs no mask.
            out = self.model.hidden(self.model.embed(self._padded(texts)))
            scored = [slice(n - 1, len(text)) for n, text in zip(lengths, texts, strict=True)]
            return torch.cat([h[part] for h, part in zip(out, scored, strict=True)])
        owners = [i for i, some in enumerate(continuations) for _ in some]
        longest = max(lengths[i] + len(row) for i, row in zip(owners, rows, strict=True))
        out, state = prefill(self.model, self._padded(contexts), lengths, capacity=longest - 1)
        first = out[owners, [lengths[i] - 1 for i in owners]][:, None]  # R 1 D
        state.reorder(owners)
        inputs = [row[:-1] for row in rows]
        more = extend(self.model, state, self._padded(inputs), [len(row) for row in inputs])
        out = torch.cat((first, more), 1)
        return torch.cat([h[: len(row)] for h, row in zip(out, rows, strict=True)])

    def _padded(self, rows: list[list[int]]) -> Tensor:
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        return pad_sequence(tensors, batch_first=True).to(self.device)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """One by one: an answer never depends on its neighbours, and settings differ."""
        answers = []
        with self._progress(len(requests), "answers"):
            for request in requests:
                context, settings = request.args
                until = settings.get("until") or []
                room = int(settings.get("max_gen_toks", DEFAULT_NEW_TOKENS))
                room = min(room, self.max_length - 1)
                stops = [until] if isinstance(until, str) else list(until)
                text = TextStream(self.text_tokenizer.decode, stops)
                prompt = self.tok_encode(context) or [self.prefix_token_id]
                is_sampled = settings.get("do_sample", False)
                (new,) = generate(
                    self.model,
                    [prompt[-(self.max_length - room) :]],
                    max_new_tokens=room,
                    sampling=Sampling(settings.get("temperature", 1.0) if is_sampled else 0),
                    stop_ids=[self.eot_token_id],
                    stop=text.stopped,
                )
                answers.append(text.text(new))
                self.cache_hook.add_partial("generate_until", request.args, answers[-1])
                self.progress.advance()
        return answers


class HuggingFaceLM(FolderLM, HFLM):
    """Any other folder, as the harness scores it."""

    batch_size_per_gpu: int

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        self._check_lengths(requests)
        asked, answers = self.batch_size_per_gpu, []
        for some in self._groups(requests):
            longest = max(len(c) + len(t) for _, c, t in some)
            row = min(longest, self.max_length) * self.config.get_text_config().vocab_size
            self.batch_size_per_gpu = max(1, min(asked, LOGITS // row))
            answers += HFLM._loglikelihood_tokens(self, some, disable_tqdm=True)
            self.batch_size_per_gpu = asked
            self.progress.advance(len(some))
        return answers

    def get_model_info(self) -> dict[str, Any]:
        return {}  # the harness would ask the hub for it
