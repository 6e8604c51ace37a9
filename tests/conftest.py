import random
import signal

import pytest
import torch
from hypothesis import settings

from spiralformer.cli import main

# A shell's background, or nohup, has these ignored, and so would every process of the tests.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

torch.set_num_threads(1)
settings.register_profile("same", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("fresh", deadline=None, max_examples=60, database=None)
settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    """The slow suite draws other random models each time; the everyday suite always the same."""
    if "random" in config.option.markexpr:
        settings.load_profile("fresh")
        if config.option.hypothesis_seed is None:
            config.option.hypothesis_seed = str(random.randrange(2**32))


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if "random" in config.option.markexpr:
        seed = config.option.hypothesis_seed
        terminalreporter.write_line(f"the same random models again: --hypothesis-seed={seed}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("random")


@pytest.fixture
def run_command(capsys):
    """Runs a command in this process; gives its status, output and errors."""

    def run(*arguments) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([*map(str, arguments)])
        except SystemExit as stop:  # argparse's own refusals
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return run
