"""The harness: datasets and prompts, metrics, the run loop and its store, tables."""
