"""Evaluation: the rows of the paper's Tables 1 and 3 for any checkpoint.

`tasks` says what is evaluated and reads local files, `models` opens model folders, `perplexity`
scores texts, `harness` and `lm` are the two sides of EleutherAI's lm-evaluation-harness, `run`
plans and caches, `report` prints.
"""
