"""Download what runs need, so that they can start on a machine without a network.

    lazyllm-bench fetch model=llama2,xgen dataset=all        # once, on the login node
    HF_HUB_OFFLINE=1 python run.py -m experiment=table1 ...  # on the nodes, with the same caches

The arguments are those of a run or a sweep. It downloads checkpoints, tokenizers, the methods'
other models, and the datasets' rows and templates, unless they are in the caches.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial

from eval.config import RunConfig
from eval.run.check import choose_data, models_of, suite_of
from eval.run.job import jobs_of
from lazyllm.errors import UserError, parser_of
from lazyllm.models.checkpoint import HubError, checkpoint_folder, read_config


def main(arguments: Sequence[str]) -> int:
    """The command `fetch`; prints a line for each thing in the caches. Returns the exit code."""
    _, arguments = parser_of("fetch", __doc__).parse_known_args(arguments or ["--help"])
    say_once = cache(partial(print, flush=True))
    try:
        for config in jobs_of(arguments):
            for line in fetched(config):
                say_once(line)
    except HubError as error:
        raise UserError(
            f"{error.reason}. Fetch it where the hub answers, without HF_HUB_OFFLINE"
        ) from error
    return 0


def fetched(config: RunConfig) -> Iterator[str]:
    """Download everything that a run needs; yields a line for each thing afterwards."""
    models, (datasets, data) = models_of(config), choose_data(config)
    for spec in models:
        read_config(spec)  # what the hub refuses is reported before torch is imported
    from lazyllm.models.config import check_loading, with_dtype
    from lazyllm.models.tokenizers import load_tokenizer_of

    for spec in models:
        check_loading(spec)
        load_tokenizer_of(spec)
        yield (
            f"{spec.name}: "
            f"{'shapes only' if spec.is_dummy else checkpoint_folder(with_dtype(spec))}"
        )
    for dataset in datasets:
        rows = suite_of(datasets).load(dataset, data)
        yield f"{dataset.name}: {rows.total or len(rows.examples)} examples"
