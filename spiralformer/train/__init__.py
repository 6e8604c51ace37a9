"""Training: text to token shards (`corpus`, `tokenizer`, `shards`, `prepare`), shards to batches
(`data`), and the loop with its optimiser and checkpoints."""
