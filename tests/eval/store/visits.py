"""Visits made by hand."""

from typing import Any

from eval.store.record import Answer, Failure, Visit

NOTHING: Any = {}  # no changes
FAILED = Failure(error="out of memory", traceback="...")


def answer(**changes: Any) -> Answer:
    """Make an answer of two tokens that computed 75 % of 100 prompt tokens, with some fields
    changed."""
    usual = {
        "text": "an answer", "token_ids": [3, 4], "score": 0.5, "ttft_s": 0.2, "scoring_s": 0.0,
        "decode_step_s": [0.1], "scoring_tokens": 0, "group_layers": [2, 2],
        "computed": [[100, 40], [100, 50]], "revived_tokens": 0.0, "kv_bytes": 640, "aux_bytes": 32,
        "peak_memory_bytes": None, "prefill_flops": 100, "prefill_mfu": None,
    }  # fmt: skip
    return Answer(**usual | changes)


def visit(
    number: Any = 0,
    dataset: str = "hotpotqa",
    baseline: dict[str, Any] | None = NOTHING,
    **changes: Any,
) -> Visit:
    """Make a visit of row `number`, answered by `baseline` and `lazy`.

    baseline: changes of its answer, which scores 1 with a TTFT of 0.4 s; None for none. changes: of
    fields of the visit, and of the other answer; `arms` replaces both answers.
    """
    fields = {name: changes.pop(name) for name in Visit.model_fields.keys() & changes.keys()}
    usual = {"text": "base", "score": 1.0, "ttft_s": 0.4, "prefill_flops": 300}
    arms = {} if baseline is None else {"baseline": answer(**usual | baseline)}
    arms |= {"lazy": answer(**changes)}
    about = {"id": f"row-{number}", "gold": ["because", "so"], "prompt_sha256": "abc"}
    about |= {
        "prompt_tokens": 100,
        "uncut_tokens": 120,
        "prompt_end": "...\nwhy?",
        "arms": arms,
    } | fields
    return Visit(dataset=dataset, order=[*about["arms"]], **about)


def only(made: Visit, *arms: str) -> Visit:
    """Leave the answers of these arms in a visit."""
    return made.model_copy(update={"arms": {name: made.arms[name] for name in arms}})
