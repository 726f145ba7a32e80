"""No prefill or step needs a number from the device, except for one question per boundary.

The model and all tensors are on "meta", a device without numbers that every machine has: any
request for a number fails, even by a call that no test counts. Operations that would wait on an
accelerator but need no number here (a mask as an index to write at, a transfer) are refused.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lazyllm.engine import kernels
from lazyllm.engine.architecture import check_surroundings
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.inputs import Prompt
from tests.helpers import slow
from tests.lazyllm.methods.method_matrix import KEEPING, ROWS, Row
from tests.reference import random_model

META, HOST = torch.device("meta"), torch.device("cpu")
PROMPT = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0))
STEPS = 4


class OnDevice(TorchDispatchMode):
    """Answers what a boundary may ask, which tokens are missing and their ranks, and records every
    tensor on the host.

    revived: number of tokens in the answer. questions: how many were asked. host: other tensors on
        the host.
    """

    def __init__(self, revived: int) -> None:
        super().__init__()
        self.revived = revived
        self.questions = 0
        self.host: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "nonzero":
            self.questions += 1
            return args[0].new_empty((self.revived, args[0].ndim), dtype=torch.long)
        if (
            name in ("to", "_to_copy")
            and args[0].shape == (self.revived,)
            and kwargs.get("device") == HOST
        ):
            self.questions += 1
            return torch.arange(1, 1 + self.revived)
        target = args[1].device if name == "copy_" else (kwargs or {}).get("device")
        if name in ("copy_", "_to_copy") and target not in (None, args[0].device):
            raise AssertionError("a transfer between the host and the device")
        if name.startswith("index_put") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise AssertionError("a mask as an index")
        out = func(*args, **(kwargs or {}))
        if name.startswith("resolve_"):  # a part of Tensor.numpy, of the answer
            return out
        leaves = tree_leaves((args, kwargs, out))
        self.host += [name for leaf in leaves if torch.is_tensor(leaf) and leaf.device != META]
        return out


CASES = [
    # methods that score choose on the host; adaptive methods ask
    *(
        pytest.param(row, id=name)
        for name, row in ROWS.items()
        if not (row.scores or row.pruning.adaptive)
    ),
    *(
        pytest.param(Row(method), id=f"keeping, {name}", marks=pytest.mark.slow)
        for name, method in KEEPING.items()
    ),
]


@pytest.mark.parametrize(("attention", "revived"), [("sdpa", 3), *slow(("eager", 0))])
@pytest.mark.parametrize("row", CASES)
def test_only_boundaries_ask_the_device(
    row: Row, revived: int, attention: str, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "SORTED", 0)
    asks = row.asks * (2 if revived else 1)  # the second is for the ranks of many tokens
    twin: Any = random_model("llama", 2, num_layers=4)
    twin.config._attn_implementation = attention
    check_surroundings(twin)  # compares numbers
    model = twin.to(META)
    with torch.inference_mode(), open_decoder(model) as decoder:
        session = row.pruning.start(decoder, Prompt(PROMPT), STEPS + 1)
        prompt = PROMPT.to(META)
        with OnDevice(revived) as prefill:
            session.prefill(prompt)
        assert (prefill.questions, prefill.host) == (0, [])
        for token_id in range(STEPS):
            with OnDevice(revived) as step:
                logits = session.step(torch.full((1,), token_id, device=META))
            assert step.questions == asks
            assert (step.host, logits.shape) == ([], (97,))


def test_watch_notices_transfers() -> None:
    device = torch.ones(3, device=META)
    with pytest.raises(RuntimeError), OnDevice(0):
        device.sum().item()
    with pytest.raises(AssertionError, match="a transfer"), OnDevice(0):
        device.to("cpu")
    with pytest.raises(AssertionError, match="a mask"), OnDevice(0):
        device[device > 0] = 2.0
    with OnDevice(0) as watch:
        torch.zeros(2)
    assert watch.host == ["zeros"]
