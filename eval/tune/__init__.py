"""Pruning schedules by search: `lazyllm-bench tune`."""
