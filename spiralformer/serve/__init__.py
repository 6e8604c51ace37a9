"""An OpenAI-compatible server over our own decoder: one machine, one model, one command."""
