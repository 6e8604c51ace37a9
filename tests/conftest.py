import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("default")
