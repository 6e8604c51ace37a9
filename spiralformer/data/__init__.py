"""Text to token shards, and the windows that training reads from them."""
