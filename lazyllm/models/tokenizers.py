"""Tokenizers with the token ids of the checkpoints' training, without running a repository's code.

From a folder with only Llama 2's sentencepiece `tokenizer.model`, transformers 5 orders the merges
by vocabulary id instead of by score ("is.  See" gets "▁▁", "See" instead of "▁", "▁See"), and adds
no BOS token. So `load_tokenizer` builds such a tokenizer itself. XGen 7B's tokenizer exists only as
the repository's code; `xgen_tokenizer.py` replaces it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError, reason_of
from lazyllm.models.checkpoint import gguf_of, hub_folder, read_json
from lazyllm.models.gguf_file import converted
from lazyllm.models.xgen_tokenizer import load_xgen_tokenizer
from lazyllm.spec import GGUF, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_CONFIG = "tokenizer_config.json"
# Files of a hub repository that determine ids, texts or chat prompts
FILES = (
    "tokenizer.json", "tokenizer.model", _CONFIG, "special_tokens_map.json", "added_tokens.json",
    "config.json", "chat_template.*", "additional_chat_templates/*",
)  # fmt: skip
LEAST_SHARE = 0.9  # of a model's tokens that its tokenizer has: models round their numbers up
_SPACE = "▁"  # how sentencepiece writes a space
_BPE = 2  # sentencepiece's TrainerSpec.ModelType
_SPECIAL = ("unk", "bos", "eos")

# Keys of a tokenizer_config.json beside a tokenizer.model that change ids, texts or chat prompts
_CONFIG_KEYS = (
    "add_bos_token", "add_eos_token", "chat_template", "model_max_length",
    "clean_up_tokenization_spaces",
)  # fmt: skip

_INSTEAD = (
    "Give a local tokenizer with model.tokenizer=FOLDER (tokenizer.json, or sentencepiece's "
    "tokenizer.model; for XGen 7B its tokenizer_config.json and GPT-2's merges.txt)"
)


def load_tokenizer(source: str | Path, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, a sentencepiece file or the hub. No remote code is run.

    source: a folder or the hub id of a repository with `tokenizer.json`, else sentencepiece's
        `tokenizer.model` (BPE), else a `tokenizer_config.json` that names XGen 7B's tokenizer; or a
        sentencepiece file, or a GGUF file.
    revision: branch, tag or commit of a hub id.
    Raises UserError if no such file exists, if it is damaged or of another kind, or if the hub does
    not answer.
    """
    from transformers import AutoTokenizer

    # `AutoTokenizer` alone makes wrong ones of the other kinds (see above)
    file = tokenizer_file(source, revision)
    if file.name == _CONFIG:
        tokenizer = load_xgen_tokenizer(file)
    elif file.name != "tokenizer.json":
        tokenizer = sentencepiece_tokenizer(file)
    else:
        local: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **local)
        except Exception as error:  # of transformers or tokenizers
            reason = reason_of(error)
            raise UserError(
                f"{source}: its tokenizer could not be loaded ({reason}). {_INSTEAD}"
            ) from error
    tokenizer.name_or_path = str(source)
    return tokenizer


def _local_path(source: str | Path, revision: str | None) -> Path:
    path = Path(source).expanduser()
    if path.suffix == GGUF and path.is_file():
        return converted(path)
    if path.exists():
        return path
    if len(path.parts) > 2 or str(source).startswith((".", "/", "~")):
        raise UserError(f"{source}: no such file or folder, and not a hub id (owner/name) either")
    return hub_folder(str(source), FILES, revision, _INSTEAD)


def tokenizer_of(spec: ModelSpec) -> tuple[str | Path, str | None]:
    """Find the tokenizer of a model: the arguments of `load_tokenizer`. Raises UserError."""
    if spec.tokenizer is not None:
        return spec.tokenizer, None
    return gguf_of(spec) or spec.source, spec.revision


def chat_templates(source: str | Path, revision: str | None = None) -> str:
    """Read the chat templates of `load_tokenizer`'s tokenizer, without transformers; "" for none.

    Raises UserError for what is no tokenizer.
    """
    found = _local_path(source, revision)
    folder = found.parent if found.is_file() else found
    file = folder / _CONFIG
    in_config = file.is_file() and read_json(file, str(source)).get("chat_template")
    texts = [str(in_config)] if in_config else []
    for template in folder.glob("chat_template.*"):
        texts.append(template.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def tokenizer_file(source: str | Path, revision: str | None = None) -> Path:
    """Find the file that `load_tokenizer` would read. Raises UserError if there is none."""
    folder = _local_path(source, revision)
    if folder.is_file():
        return folder
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    file = folder / _CONFIG
    config = read_json(file, str(source)) if file.is_file() else {}
    if config.get("tokenizer_class") == "XgenTokenizer":
        return file
    raise UserError(
        f"{source} holds neither tokenizer.json nor tokenizer.model; a repository's own tokenizer "
        f"code is not run. {_INSTEAD}"
    )


def sentencepiece_tokenizer(model_file: Path) -> PreTrainedTokenizerBase:
    """Make a tokenizer from a sentencepiece BPE model of Llama's kind, with the library's ids.

    It uses the `chat_template.jinja` and the settings of a `tokenizer_config.json` in the same
    folder; without settings it adds BOS and not EOS, as for Llama 2. Raises UserError for other
    files, and for models of another kind.
    """
    from tokenizers import normalizers
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import generate_merges

    proto = _sentencepiece_proto(model_file)
    pieces, trainer = proto.pieces, proto.trainer_spec
    score = {piece.piece: piece.score for piece in pieces if piece.type == type(piece).NORMAL}
    special = {f"{name}_token": pieces[getattr(trainer, f"{name}_id")].piece for name in _SPECIAL}
    settings: dict[str, Any] = {"add_bos_token": True, "add_eos_token": False}
    if (config_file := model_file.parent / _CONFIG).is_file():
        config = read_json(config_file, str(config_file.parent))
        settings |= {key: config[key] for key in _CONFIG_KEYS if config.get(key) is not None}
    if (template := model_file.parent / "chat_template.jinja").is_file():
        try:
            settings["chat_template"] = template.read_text(encoding="utf-8")
        except ValueError as error:
            raise UserError(f"{template}: not UTF-8 text ({error})") from error
    tokenizer = LlamaTokenizer(
        vocab={piece.piece: number for number, piece in enumerate(pieces)},
        # sentencepiece merges the pair with the best score first and, among equal ones, the
        # leftmost. Only runs of spaces have equal scores; for them "leftmost first" means the
        # longest left part first, as here
        merges=generate_merges(score, score),
        legacy=True,
        **special,
        **settings,
    )
    # sentencepiece always puts a space before the text; transformers only if it begins with none
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    return tokenizer


def _sentencepiece_proto(model_file: Path) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made at run time
    try:
        proto.ParseFromString(model_file.read_bytes())
    except DecodeError as error:
        raise UserError(
            f"{model_file}: not a sentencepiece model; give a folder with tokenizer.json"
        ) from error
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    is_llamas_kind = (
        len(proto.pieces) > 0
        and trainer.model_type == _BPE
        and trainer.byte_fallback
        and min(getattr(trainer, f"{name}_id") for name in _SPECIAL) >= 0
        and not normalizer.precompiled_charsmap
        and normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
        # no pieces that are matched before merging: Llama's has none
        and not any(piece.type == type(piece).USER_DEFINED for piece in proto.pieces)
    )
    if not is_llamas_kind:
        raise UserError(
            f"{model_file}: a sentencepiece model of another kind than Llama's (BPE with byte "
            "fallback and no normalisation); give a folder with tokenizer.json"
        )
    return proto


def load_tokenizer_of(spec: ModelSpec) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that `load_model` gives, without the model."""
    if spec.is_dummy and spec.tokenizer is None and not spec.is_local:
        return None  # "dummy" downloads nothing
    return load_tokenizer(*tokenizer_of(spec))


def check_fits(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    """Refuse a tokenizer with more tokens than the model; log one that may be another's."""
    from lazyllm.models.config import load_end_ids, shape_of  # not at the top: it imports torch

    known = shape_of(spec).get_text_config().vocab_size
    tokens = tokenizer.vocab_size  # without tokens that were added later
    source = spec.tokenizer or f"of {spec.name}"
    held = f"tokenizer {source}: it has {tokens:,} tokens, the model {known:,}"
    if tokens > known:
        raise UserError(f"{held}: give the model's own (in a run model.tokenizer=FOLDER)")
    if tokens < LEAST_SHARE * known:
        log.warning("%s: is it the model's own?", held)
    ends = () if spec.tokenizer is None else load_end_ids(spec)
    if ends and tokenizer.eos_token_id not in ends:
        end = tokenizer.eos_token_id
        log.warning("%s; it ends a text by token %s, the model by %s", held, end, [*ends])
