"""Conversations as the prompts that a model was trained on, where its tokenizer says how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spiralformer.errors import first_line
from spiralformer.files import read_json
from spiralformer.serve.schema import ApiError, Message


class ChatTemplate:
    """The chat template of a tokenizer folder, run by `transformers` in Jinja's sandbox."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        config = folder / "tokenizer_config.json"
        named = config.is_file() and read_json(config).get("chat_template")
        return cls(folder) if named or (folder / "chat_template.jinja").is_file() else None

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        told = [{"role": message.role, "content": message.text} for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                told, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template raises what it likes
            message = f"messages: the chat template refuses them: {first_line(error)}"
            raise ApiError(message, param="messages") from None
        assert isinstance(text, str)
        return self.tokenizer.encode(text, add_special_tokens=False)
