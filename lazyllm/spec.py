"""Name a model and how it is loaded; this needs neither torch nor transformers."""

from dataclasses import dataclass
from pathlib import Path

from lazyllm.errors import UserError, nearest
from lazyllm.presets import PRESETS, fields_of, is_sizes

AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTION = ("sdpa", "eager", "flash_attention_2")
SDPA_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math")
_CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": (AUTO, *DTYPES),
    "attn_implementation": ATTENTION,
    "sdpa_backend": SDPA_BACKENDS,
}

GGUF = ".gguf"  # how the name of a GGUF file ends


@dataclass(frozen=True)
class ModelSpec:
    """A spec says which model is loaded, and how. Two equal specs load the same weights.

    name: a preset (`lazyllm.presets`), a folder, a GGUF file, or a hub id; of random weights also
        sizes (`lazyllm.presets.fields_of`).
    load_format: "auto" reads the checkpoint (tensors only, no remote code); "dummy" builds the
        architecture with random weights and downloads nothing, for timing: times depend on shapes,
        not on values.
    dtype: "bfloat16", "float16", "float32" or "float64"; "auto" takes the checkpoint's on an
        accelerator, and on a CPU float32, or bfloat16 where it is measured to be faster.
    device: "cuda", "cpu", ...; "auto" takes the accelerator if there is one.
    revision: branch, tag or commit of a hub id.
    tokenizer: folder or hub id of a tokenizer, if not the model's.
    attn_implementation: "sdpa", "eager" or "flash_attention_2".
    sdpa_backend: the first choice of SDPA on a GPU: "flash", "cudnn" (in prefill only), "efficient"
        or "math"; "auto" takes cuDNN on Hopper and flash elsewhere. A backend that cannot run an
        input leaves it to the next one.
    seed: seed of random weights.
    gguf: the name of a GGUF file in the folder or the hub's repository, whose checkpoint it is
        then. A folder with one GGUF file and no config.json needs no `gguf`.
    """

    name: str
    load_format: str = "auto"
    dtype: str = AUTO
    device: str = "auto"
    revision: str | None = None
    tokenizer: str | None = None
    attn_implementation: str = "sdpa"
    sdpa_backend: str = "auto"
    seed: int = 0
    gguf: str | None = None

    @property
    def source(self) -> str:
        """The folder, GGUF file or hub id of `name`. Raises UserError if there is none."""
        return source_of(self.name, self.gguf)

    @property
    def is_local(self) -> bool:
        """Whether the model is a folder or a file, not on the hub. Raises UserError as `source`."""
        return Path(self.source).exists()

    @property
    def is_dummy(self) -> bool:
        """Whether the weights are random."""
        return self.load_format == "dummy"

    def check(self) -> None:
        """Refuse unknown or contradictory settings (UserError); `check_loading` does the rest."""
        for key, choices in _CHOICES.items():
            if (value := getattr(self, key)) not in choices:
                raise UserError(f"unknown {key} {value!r}: give one of {', '.join(choices)}")
        if is_sizes(self.name):
            fields_of(self.name)
            if not self.is_dummy:
                raise UserError(
                    f"{self.name}: sizes have random weights only: give load_format=dummy"
                )
        if self.sdpa_backend != "auto" and self.attn_implementation != "sdpa":
            raise UserError(
                f"sdpa_backend={self.sdpa_backend} chooses among the backends of "
                f"attn_implementation=sdpa, but this is {self.attn_implementation}: leave one of "
                "them out"
            )


def source_of(name: str, gguf: str | None = None) -> str:
    """Find the folder, GGUF file or hub id of a model's name. Raises UserError if there is none."""
    if is_sizes(name):
        return name
    path = Path(name).expanduser()
    is_file = path.is_file() and path.suffix == GGUF
    if gguf is not None and (name in PRESETS or is_file or not gguf.endswith(GGUF)):
        raise UserError(
            f"gguf={gguf}: give the name of a file {GGUF} in the folder or hub id that the model's "
            "name is"
        )
    if name in PRESETS:
        return PRESETS[name].find()
    if is_file:
        return str(path)
    if path.is_dir():
        return _in_folder(path, gguf)
    if name.startswith((".", "/", "~")) or path.suffix == GGUF or len(path.parts) > 2:
        raise UserError(f"{name!r} is not a model: there is no such folder or GGUF file")
    if "/" not in name:
        raise UserError(
            f"{name!r} is not a model: no such folder or GGUF file, no hub id (owner/name), no "
            f"preset: {nearest(name, PRESETS)}"
        )
    return name


def _in_folder(folder: Path, gguf: str | None) -> str:
    """Find a folder's GGUF file, named or the only one without a config.json, or the folder."""
    if gguf is not None:
        if not (folder / gguf).is_file():
            raise UserError(f"{folder} holds no {gguf}")
        return str(folder / gguf)
    files = [] if (folder / "config.json").is_file() else sorted(folder.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(
            f"{folder} holds {len(files)} GGUF files, give one as gguf=NAME (in a run model.gguf): "
            f"{names}"
        )
    return str(files[0] if files else folder)
