"""Peak memory of a training step, and what a decode state holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from spiralformer.accounting import fixed_bytes, kv_bytes
from spiralformer.bench.peers import PEER, build, family
from spiralformer.bench.results import Bar, Results
from spiralformer.bench.timing import table
from spiralformer.bench.train import NAMES
from spiralformer.decode import prefill
from spiralformer.model.precision import CPU_HAS_BFLOAT16

PEAKS = Path("/proc/self/clear_refs")


def peak_memory(name: str, scale: str, length: int, precision: str) -> int:
    """Peak resident bytes of a process that makes two steps, above what imports take."""
    code = (
        "import json, re, sys, torch\n"
        "from spiralformer.allocator import keep_freed_memory\n"
        "from spiralformer.bench.train import make_step\n"
        "name, scale, length, precision = json.loads(sys.argv[1])\n"
        "keep_freed_memory()  # as every command does\n"
        "make_step(name, 'nano', 64, precision)()  # imports what a first step imports\n"
        "status = lambda: open('/proc/self/status').read()\n"
        "held = lambda kind: int(re.search(kind + r':\\s+(\\d+)', status())[1])\n"
        f"open('{PEAKS}', 'w').write('5')  # the peak so far is forgotten\n"
        "before = held('VmRSS')\n"
        "step = make_step(name, scale, length, precision)\n"
        "step(); step()\n"
        "print((held('VmHWM') - before) * 1024)\n"
    )
    arguments = json.dumps([name, scale, length, precision])
    out = subprocess.run(
        [sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True
    )
    return int(out.stdout.split()[0])


@torch.no_grad()
def run(scale: str, length: int, precisions: tuple[str, ...]) -> Results:
    results = Results("memory", {"scale": scale, "length": length})
    if not PEAKS.exists():
        print("\nno peaks of memory: they are read from Linux's /proc")
    for precision in precisions if PEAKS.exists() else ():
        # where bfloat16 is emulated, the peer would take many minutes
        peers = [PEER] * (precision == "float32" or CPU_HAS_BFLOAT16)
        peaks = {name: peak_memory(name, scale, length, precision) for name in (*peers, *NAMES)}
        base = peaks["baseline"]
        rows = [[n, f"{v / 2**20:.0f}", f"{v / base:.3f}"] for n, v in peaks.items()]
        for name, peak in peaks.items():
            results.measurements.append({"precision": precision, "case": name, "peak_bytes": peak})
        print(f"\npeak memory of a training step, {scale} shapes, {precision}, 1 × {length} tokens")
        print(table(rows, ["", "MiB", "÷ base"]), flush=True)
        ratio = peaks["spiral-b"] / base
        results.bars.append(
            Bar(f"{precision}: spiral-b's peak of a step ÷ baseline's", ratio, 0.95, False)
        )
    rows, worst = [], 0.0
    configs = family(scale)
    for name in NAMES:
        config = configs[name]
        _, state = prefill(build(config, torch.float32), torch.zeros(1, 256, dtype=torch.long))
        state.resize(256)
        said = kv_bytes(config, 256, 4).total + fixed_bytes(config, 4).total
        worst = max(worst, abs(state.nbytes / said - 1))
        per_token = kv_bytes(config, 4096, 4).total / 4096
        rows.append([name, f"{state.nbytes}", f"{said}", f"{per_token / 1024:.1f}"])
    print("\ndecode state after 256 tokens, float32")
    print(table(rows, ["", "bytes held", "bytes counted", "KiB a token"]))
    results.bars.append(Bar("decode state: |bytes held ÷ bytes counted - 1|", worst, 0.0, False))
    return results
