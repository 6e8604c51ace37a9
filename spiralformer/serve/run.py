"""A model folder behind a port, until a signal comes."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import torch
import uvicorn

from spiralformer.console import say
from spiralformer.data.tokenizer import load_tokenizer
from spiralformer.decode import runner_for
from spiralformer.decode.runner import RunnerName
from spiralformer.errors import UserError
from spiralformer.model_folder import load_model, tokenizer_files
from spiralformer.serve.app import LOOPBACK, Service, Settings
from spiralformer.serve.chat import ChatTemplate
from spiralformer.serve.engine import Engine

GRACE = 5  # seconds that running requests have when the server is told to stop
HEADER_BYTES = 16 << 10


class Server(uvicorn.Server):
    """Uvicorn's, with an engine that stops with it."""

    def __init__(self, service: Service) -> None:
        self.engine = service.engine
        connections = self.engine.max_rows + self.engine.max_waiting + 64
        super().__init__(
            uvicorn.Config(
                service.app(),
                http="h11",
                ws="none",
                lifespan="off",
                log_level="critical",  # nothing of a request is logged; `say_failure` tells of bugs
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=connections,
                h11_max_incomplete_event_size=HEADER_BYTES,
                timeout_graceful_shutdown=GRACE + 2,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.close(GRACE)
        await super().shutdown(sockets)
        self.engine.close()
        self.engine.thread.join(GRACE)


def open_service(
    folder: Path,
    settings: Settings,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    runner: RunnerName = "auto",
    max_rows: int = 32,
    max_waiting: int = 256,
) -> Service:
    """The model of a folder, loaded and at work."""
    tokenizer_files(folder)  # says so if there is none
    tokenizer = load_tokenizer(folder)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from None
    model = load_model(folder, device=device, dtype=getattr(torch, dtype) if dtype else None)
    model.requires_grad_(False)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.vocab_size} tokens, its model knows "
            f"{model.config.vocab_size}; put the tokenizer it was trained with there"
        )
    longest = model.config.max_length
    chosen = runner_for(model, runner, rows=max_rows, tokens=longest, capacity=longest)
    engine = Engine(model, chosen, max_rows=max_rows, max_waiting=max_waiting)
    return Service(model, tokenizer, engine, settings, ChatTemplate.of(folder))


def run(service: Service, bound: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM."""
    host, port = bound.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    runner = service.engine.runner.name
    say(f"{service.settings.name}, {runner} runner: http://{name}:{port} (page), /v1 (API)")
    if service.settings.host not in LOOPBACK:
        everyone = "with the key" if service.settings.api_key else "without a key: set --api-key"
        say(f"open to the network on {host}, to everyone {everyone}")
    # Uvicorn raises a signal again after it has stopped: that is no error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    Server(service).run(sockets=[bound])
    say("stopped")
