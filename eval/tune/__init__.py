"""Pruning schedules by search: `python -m eval.tune`."""
