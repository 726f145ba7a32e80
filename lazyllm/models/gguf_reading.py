"""What transformers and the package gguf read from a GGUF file, written as a checkpoint's folder.

transformers ignores some of what a file may say. What changes numbers is read here (Llama 3.1's
RoPE, the tokens that end a turn) or refused (other scalings of RoPE, tensors that no layer takes)
by UserError.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    modeling_gguf_pytorch_utils,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from lazyllm.engine.devices import replaced
from lazyllm.errors import UserError, reason_of

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 3.0  # between lines of progress
_TRANSFORMERS = f"transformers {transformers.__version__}"
_LINK = "model.gguf"
# the end of a text, a turn, a message: llama.cpp ends an answer at each
_END_IDS = ("eos", "eot", "eom")
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_INSTEAD = "give a folder or a hub id with the checkpoint's safetensors"


def convert(file: Path, folder: Path) -> str:
    """Write config, tokenizer and end tokens of a file to a folder; return its quantisation."""
    with _opened(file, folder) as reader:
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file=_LINK)
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_LINK)
        except Exception as error:  # each architecture's own
            reason = reason_of(error)
            raise UserError(f"{file}: {_TRANSFORMERS} cannot read it ({reason})") from error
    _set_rope(config, reader, file)
    config._name_or_path = ""
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ids = [_value(reader, f"tokenizer.ggml.{name}_token_id") for name in _END_IDS]
    generation: Any = GenerationConfig.from_model_config(config)
    numbers = dict.fromkeys(int(number) for number in ids if number is not None)
    generation.eos_token_id = [*numbers] or None
    generation.save_pretrained(folder)
    return _quantisation(reader)


@contextmanager
def _opened(file: Path, folder: Path) -> Iterator[Any]:
    """Check a file and give its reader; transformers reads the file in the folder by the same.

    Else transformers parses the file for config, tokenizer and weights each, and makes the table of
    tensor names for each module.
    """
    link = folder / _LINK  # alone in its folder: transformers would read other files beside it too
    link.symlink_to(file.absolute())
    names: Any = gguf.get_tensor_name_map
    with (
        replaced(gguf, "GGUFReader", cache(_Reader)),
        replaced(gguf, "get_tensor_name_map", cache(names)),
        replaced(modeling_gguf_pytorch_utils, "tqdm", _log_progress),
    ):
        yield _checked(file, link)
    link.unlink()


def _log_progress(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
    """Yield tensors, and log the share of their bytes that is done."""
    whole, done, last = sum(tensor.n_bytes for tensor in tensors), 0, monotonic()
    for tensor in tensors:
        yield tensor
        done += int(tensor.n_bytes)
        if monotonic() - last >= PROGRESS_EVERY_S or done == whole:
            last = monotonic()
            log.info("%.0f %% of the weights are de-quantised", 100 * done / whole)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Hide transformers' progress bars and its advice on packed weights."""
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


@_in_silence()
def dequantise(file: Path, about: Path, dtype: str, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, in a dtype. about: the folder of `convert`."""
    with _opened(file, folder) as reader:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                gguf_file=_LINK,
                config=AutoConfig.from_pretrained(about),
                dtype=getattr(torch, dtype),
                output_loading_info=True,
            )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # each architecture's own
            raise UserError(f"{file} could not be loaded: {reason_of(error)}") from error
        model, info = loaded
        unread = _unread(reader, model)
    missing = info["missing_keys"]
    for what, names in (
        ("lacks {} of the model's weights", missing),
        ("has {} weights unread", unread),
    ):
        if names:
            count = what.format(len(names))
            raise UserError(f"{file} {count}, the first: {min(names)}: {_INSTEAD}")
    model.hf_quantizer = None  # the weights are plain numbers now, which may be saved
    model.save_pretrained(folder)
    for made in about.iterdir():  # the config as it was read, without the reader's settings
        shutil.copyfile(made, folder / made.name)


class _Reader(gguf.GGUFReader):
    """The package's, but with plain arrays: slices of `numpy.memmap` take most of its time."""

    @property
    def data(self) -> np.ndarray:
        return self._bytes

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._bytes = np.asarray(mapped)


def _checked(file: Path, link: Path) -> Any:
    """Make the file's reader, by the path that transformers gives, after the checks of the file."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
    try:
        reader: Any = gguf.GGUFReader(str(link))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"{file} is damaged or cut off ({reason_of(error)}): download it again, and compare "
            "its size"
        ) from error
    parts = _value(reader, "split.count")
    if parts is not None and parts > 1:
        raise UserError(
            f"{file} is one of {parts} parts: join them with llama.cpp's `llama-gguf-split --merge`"
        )
    for tensor in reader.tensors:
        if tensor.tensor_type not in _readable():
            known = ", ".join(kind.name for kind in sorted(_readable()))
            raise UserError(
                f"{file}: the package gguf cannot de-quantise {tensor.tensor_type.name}, but "
                f"{known}"
            )
    return reader


@cache
def _readable() -> frozenset[Kind]:
    """Find the kinds of tensors that the package gguf de-quantises."""
    readable = {Kind.F32, Kind.F16}
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        readable.add(kind)
    return frozenset(readable)


def _value(reader: Any, key: str) -> Any:
    """Read a key of the metadata; None if it is absent."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _quantisation(reader: Any) -> str:
    """Read the quantisation that the file names, such as Q4_K_M, else that of most weights."""
    named = {kind.value: kind.name for kind in gguf.LlamaFileType if kind.name != "GUESSED"}
    name = named.get(_value(reader, "general.file_type"))
    if name is not None:
        return name.removeprefix("MOSTLY_").removeprefix("ALL_")
    weights = Counter[str]()
    for tensor in reader.tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    return weights.most_common(1)[0][0]


def _set_rope(config: Any, reader: Any, file: Path) -> None:
    """Give the config Llama 3.1's RoPE, if the file has its factors; refuse other scalings."""
    kind = _value(reader, f"{_value(reader, 'general.architecture')}.rope.scaling.type")
    if kind not in (None, "none"):
        raise UserError(
            f"{file} scales RoPE ({kind}), which transformers does not read from GGUF files: "
            f"{_INSTEAD}"
        )
    by_name = {tensor.name: tensor.data for tensor in reader.tensors}
    factors = by_name.get("rope_freqs.weight")
    if factors is None:
        return
    scales, width = torch.tensor(factors), 2 * len(factors)
    plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2) / width)
    config.rope_parameters |= {"rope_type": "llama3", "factor": float(scales.max()), **_LLAMA3_ROPE}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if plain.shape != scales.shape or not torch.allclose(plain / scaled, scales, rtol=1e-4):
        raise UserError(
            f"{file}: its rope_freqs.weight are not Llama 3.1's scaling of RoPE: {_INSTEAD}"
        )


def _unread(reader: Any, model: Any) -> list[str]:
    """List the tensors that transformers leaves out silently, without those of experts."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    number = numbers[_value(reader, "general.architecture")]
    table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    known = {"rope_freqs.weight"}  # of `_set_rope`
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        known.add(f"{table.get_name(stem)}.{suffix}")
    names = [tensor.name for tensor in reader.tensors]
    return [name for name in names if name not in known and "_exps" not in name]
