"""Stock exllamav3 and our engine on the same weights, prompts and limits: `python -m bench.peers.run`."""
