"""What happens before a model is loaded: what can serve it here, and at which address."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from spiralformer.errors import UserError

ENGINES = ("auto", "vllm", "own")


def choose_engine(asked: str) -> str:
    """vLLM where it is installed, else ours."""
    engine = asked
    if asked == "auto":
        engine = "vllm" if find_spec("vllm") else "own"
    needed = {"vllm": ["vllm"], "own": ["starlette", "uvicorn"]}[engine]
    missing = [name for name in needed if not find_spec(name)]
    if missing:
        extra = "vllm" if engine == "vllm" else "serve"
        raise UserError(
            f"--engine {asked} needs {' and '.join(missing)}; pip install 'spiralformer[{extra}]'"
        )
    return engine


def bind(host: str, port: int) -> socket.socket:
    """A socket on which to listen later."""
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind)
    except OSError as error:
        raise UserError(f"--host {host}: not an address of this machine ({error})") from None
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(128)
    except OSError as error:
        bound.close()
        remedy = "choose another with --port" if port else "choose another --host"
        raise UserError(f"{host}:{port}: {error.strerror or error}; {remedy}") from None
    return bound


def become_vllm(
    folder: Path,
    *,
    name: str,
    host: str,
    port: int,
    api_key: str | None,
    origins: Sequence[str],
    extra: Sequence[str],
) -> None:
    """This process becomes vLLM's own server of this model. Other users of the machine see its
    arguments, so the key goes by the environment."""
    bind(host, port).close()  # says so if it is taken
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", name]
    command += ["--host", host, "--port", str(port)]
    command += ["--allowed-origins", json.dumps(list(origins))]  # vLLM's default is everyone
    command += ["--enforce-eager", *extra]
    environment = {**os.environ, **({"VLLM_API_KEY": api_key} if api_key else {})}
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
