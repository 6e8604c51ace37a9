"""Evaluation: the rows of the paper's Tables 1 and 3, and any task of EleutherAI's
lm-evaluation-harness, for any checkpoint.

`tasks` says what is evaluated and with which data, `lm` is a model as the harness sees it,
`perplexity` scores texts, `run` is an evaluation from plan to results, `tables` prints.
"""
