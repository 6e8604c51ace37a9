"""What may be asked of the server: OpenAI's fields, checked, and what becomes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from spiralformer.decode import Sampling

# Fields of OpenAI's that change nothing when they have one of these values, and are refused else.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tools": (None, []),
}
MOST_ANSWERS = 128  # of one request
SEEDS = 2**62

Text = Annotated[str, StringConstraints(strict=True)]
Token = Annotated[int, Field(strict=True, ge=0)]
Stop = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]


class ApiError(Exception):
    """A request that is refused, in OpenAI's shape."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds share. `top_k`, `min_p` and `repetition_penalty` are vLLM's names."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)  # -1 and 0 keep all
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-SEEDS, le=SEEDS)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    iterations: bool = False  # of ours: which loop iterations ran for each token

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self, seed: int) -> Sampling:
        """Row b of a request draws from `seed` + b, as in `generate`."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return Sampling(seed=seed, **{k: v for k, v in given.items() if v is not None})  # type: ignore[arg-type]


class CompletionRequest(Request):
    prompt: (
        Text
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[Text | Annotated[list[Token], Field(min_length=1)]], Field(min_length=1)]
    ) = ""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Texts and lists of tokens."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Request):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


Kind = TypeVar("Kind", bound=Request)


def parse(kind: type[Kind], body: bytes) -> Kind:
    """The request that a body holds."""
    try:
        fields = json.loads(body.decode(), parse_constant=_refuse_constant)
        # A lone half of a surrogate pair is no text.
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # UnicodeError is a ValueError
        raise ApiError("the body is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise ApiError("the body is not a JSON object")
    for name, values in NEUTRAL.items():
        if name in fields and fields.pop(name) not in values:
            raise ApiError(f"{name} is not supported; leave it out", param=name)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        wrong = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
        raise ApiError(f"{name}: {wrong}", param=name or None) from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
