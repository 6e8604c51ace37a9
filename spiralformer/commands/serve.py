"""`spiralformer serve MODEL`"""

from __future__ import annotations

import argparse
import os
import shlex

from spiralformer.commands.generate import DTYPES
from spiralformer.errors import UserError
from spiralformer.model_folder import find_model

KEY = "SPIRALFORMER_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="the folder of a model or of a run")
    engine = "vllm: vLLM's server; own: the server of this package; auto: vLLM where it is there"
    add("--engine", choices=("auto", "vllm", "own"), default="auto", help=engine)
    host = "address to listen on; 0.0.0.0 opens it to the network (%(default)s)"
    add("--host", default="127.0.0.1", help=host)
    add("--port", type=int, default=8000, help="0: any that is free (%(default)s)")
    add("--name", help="of the model in the API (default: the folder's)")
    key = f"that requests must bring; better set as {KEY}, which other users cannot see"
    add("--api-key", metavar="KEY", default=os.environ.get(KEY), help=key)
    origin = "of pages elsewhere that may use the API, such as https://example.org; may be repeated"
    add("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    own = parser.add_argument_group("the server of this package")
    add = own.add_argument
    add("--max-rows", type=int, default=32, help="answers made at once (%(default)s)")
    add("--max-waiting", type=int, default=256, help="more are refused (%(default)s)")
    add("--max-prompt", type=int, metavar="TOKENS", help="default: the model's longest sequence")
    add("--timeout", type=float, default=300, help="seconds for a request (%(default)s)")
    add("--dtype", choices=DTYPES, help="default: the one it was saved in")
    add("--device", default="cpu")
    add("--runner", choices=("auto", "eager", "native"), default="auto")
    more = "further arguments of vLLM's server, as one string"
    parser.add_argument("--vllm-args", default="", metavar="ARGS", help=more)


def run(args: argparse.Namespace) -> int:
    from spiralformer.serve.launch import become_vllm, bind, choose_engine

    folder = find_model(args.model).resolve()
    name = args.name or (folder.parent.name if folder.name == "model" else folder.name)
    for option in ("max_rows", "max_waiting", "max_prompt", "timeout"):
        if (value := getattr(args, option)) is not None and not 0 < value < 1e9:
            raise UserError(f"--{option.replace('_', '-')} {value}: must be above 0")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port}: a port is 0…65535")
    if choose_engine(args.engine) == "vllm":
        become_vllm(
            folder,
            name=name,
            host=args.host,
            port=args.port,
            api_key=args.api_key,
            origins=args.allow_origin,
            extra=shlex.split(args.vllm_args),
        )
    with bind(args.host, args.port) as bound:
        from spiralformer.model_folder import load_config
        from spiralformer.serve.app import Settings
        from spiralformer.serve.run import open_service
        from spiralformer.serve.run import run as run_server

        settings = Settings(
            name=name,
            seconds=args.timeout,
            max_prompt=args.max_prompt or load_config(folder).max_length,
            host=args.host,
            api_key=args.api_key,
            origins=args.allow_origin,
        )
        service = open_service(
            folder,
            settings,
            device=args.device,
            dtype=args.dtype,
            runner=args.runner,
            max_rows=args.max_rows,
            max_waiting=args.max_waiting,
        )
        run_server(service, bound)
    return 0
