"""Speed and memory beside peers: whole runs, taking turns; measured, not judged."""
