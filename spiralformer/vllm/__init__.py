"""SpiralFormer in vLLM: a plugin (entry point `vllm.general_plugins`).

With this package installed beside vLLM, `LLM("a model folder of ours")` and vLLM's server know the
whole family. docs/vllm.md says how to start it and what is refused.
"""

import logging

VLLM = "0.32"  # of whose internals `layers` speaks


def register() -> None:
    """Makes the family known to vLLM. Every vLLM process calls this, whatever it serves, so it
    never raises: what cannot be served is refused when one of our models is asked for."""
    try:
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.transformers_utils.config import _CONFIG_REGISTRY

        from spiralformer.model_folder import ARCHITECTURE, MODEL_TYPE
        from spiralformer.vllm.config import ServedConfig, StartUp

        _CONFIG_REGISTRY[MODEL_TYPE] = ServedConfig
        MODELS_CONFIG_MAP[ARCHITECTURE] = StartUp
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")
    except Exception as error:
        logging.getLogger("vllm.spiralformer").warning(
            "SpiralFormer models cannot be served: %s: %s", type(error).__name__, error
        )
