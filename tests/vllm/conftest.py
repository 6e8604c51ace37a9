"""These tests need vLLM, which lives in an environment of its own: `make test-vllm`."""

import importlib.util
import os

collect_ignore_glob = []
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob.append("test_*.py")
else:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: breaks can be planted
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
