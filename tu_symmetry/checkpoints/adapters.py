"""Files and folders of LoRA adapters merged into one: what they add to a network is averaged, not their factors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tu_symmetry.alignment.adapters import MergedAdapters, factor_names, is_adapter, merge_adapters
from tu_symmetry.checkpoints.files import AlignFilesError, clear_left, read_state, refuse_foreign, write_owned
from tu_symmetry.checkpoints.merge import Progress
from tu_symmetry.files import FileError, digest_of, read_header, read_json, write_json
from tu_symmetry.reporting.grid import Grid
from tu_symmetry.sources import INDEX
from tu_symmetry.states import State, SymmetryError

CONFIG = "adapter_config.json"
_MERGED = "merged_by"
_MARK = "tu-symmetry"


@dataclass(frozen=True)
class MergedFiles:
    """A merged adapter and the files that it is of."""

    merged: MergedAdapters
    files: Sequence[Path]
    weights: Sequence[float]

    def grid(self) -> Grid:
        """Layers with the largest errors; beside them what averaging the factors would have given."""
        merged = self.merged
        layers = sorted(merged.ranks, key=lambda layer: -merged.errors[layer])
        rows = [
            [layer, str(merged.ranks[layer]), f"{merged.errors[layer]:.2e}", _text(merged.factor_errors[layer])]
            for layer in layers[:10]
        ]
        shares = ", ".join(f"{w:.3g} {f}" for w, f in zip(self.weights, self.files, strict=True))
        more = f"; {len(layers) - 10} more layers are no worse" if len(layers) > 10 else ""
        return Grid(
            "Merged adapter",
            ["layer", "rank", "relative error", "of averaged factors"],
            rows,
            f"of the mean of what the adapters add: {shares}{more}",
        )


def _text(value: float) -> str:
    return "ranks differ" if math.isnan(value) else f"{value:.2e}"


def are_adapters(paths: Sequence[Path]) -> bool:
    """Whether all of the files hold adapters; only their heads are read where they are safetensors.

    Raises:
        AlignFilesError: adapters and whole networks together.
    """
    found = [is_adapter(_names(path)) for path in paths]
    if any(found) and not all(found):
        whole, adapter = paths[found.index(False)], paths[found.index(True)]
        raise AlignFilesError(f"{adapter} is an adapter and {whole} a whole network: merge one kind at a time")
    return bool(found) and all(found)


def _names(path: Path) -> list[str]:
    if path.name.endswith(INDEX):
        return []
    if path.suffix == ".safetensors":
        try:
            return list(read_header(path).layout)
        except (FileError, OSError) as error:
            raise AlignFilesError(str(error)) from error
    return list(read_state(path, ""))


def merge_adapter_files(
    files: Sequence[Path], out: Path, *, weights: Any = "equal", rank: int | None = None
) -> MergedFiles:
    """Merge adapters; ``out`` can be read as the files that were merged.

    Beside adapters that PEFT wrote stands ``adapter_config.json``, which holds their scale. The merged one's, with the
    new rank and a scale of one, is written beside ``out``.

    Args:
        files: at least two.
        out: the ``.safetensors`` file to write.
        weights: ``equal``, or a share for each.
        rank: bound on the rank of each layer; exact if left out.

    Raises:
        AlignFilesError: files that are no adapters, or do not fit together; something else in the place of a result.
    """
    if out.suffix != ".safetensors":
        raise AlignFilesError(f"{out} is no name for the merged adapter: give a file NAME.safetensors")
    if len(files) < 2:
        raise AlignFilesError(f"merging needs at least two adapters, got {len(files)}")
    if isinstance(weights, Mapping) or weights == "greedy":
        raise AlignFilesError("adapters are merged with one number for each: --weights W W ..., or --alpha A for two")
    states = [read_state(path, "") for path in files]
    configs = [_config(path) for path in files]
    beside = out.with_name(CONFIG)
    texts = {beside: f'"{_MERGED}": "{_MARK}"'} if any(configs) else {}
    working = out.with_name(f"{out.stem}.merging")
    read = [path.with_name(CONFIG) for path, config in zip(files, configs, strict=True) if config]
    refuse_foreign([out], texts, [*files, *read], others=[working])
    shares = _shares(weights, len(files))
    try:
        scales = [_scales(state, config) for state, config in zip(states, configs, strict=True)]
        merged = merge_adapters(states, weights=shares, scales=scales, rank=rank)
    except (SymmetryError, ValueError) as error:
        raise AlignFilesError(str(error)) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"files": [str(f) for f in files], "weights": shares, "ranks": sorted(set(merged.ranks.values()))}
    with Progress.of(working, digest_of(about)):
        clear_left([out], texts)
        write_owned(out, merged.state, {"adapters": about})
        first = next((config for config in configs if config), None)
        if first is not None:
            usual = max(merged.ranks.values())
            other = {layer: r for layer, r in merged.ranks.items() if r != usual}
            names = {re.escape(layer.removeprefix("base_model.model.")): r for layer, r in other.items()}
            changed = {"r": usual, "lora_alpha": usual, "rank_pattern": names, "alpha_pattern": names}
            write_json(beside, {**first, **changed, "use_rslora": False, _MERGED: _MARK})
    return MergedFiles(merged, files, shares)


def _shares(weights: Any, count: int) -> list[float]:
    """Weights that sum to one; one may be negative.

    Raises:
        AlignFilesError: no finite numbers, or a sum of zero.
    """
    if weights == "equal":
        return [1 / count] * count
    numbers = [float(w) for w in weights]
    largest = max(map(abs, numbers), default=0.0)
    total = sum(w / largest for w in numbers) if largest else 0.0
    if not (math.isfinite(largest) and math.isfinite(total) and total):
        raise AlignFilesError(f"weights must be finite numbers whose sum is not 0, got {numbers}")
    return [w / largest / total for w in numbers] if math.isinf(sum(numbers)) else [w / sum(numbers) for w in numbers]


def _config(path: Path) -> dict[str, Any]:
    beside = path.with_name(CONFIG)
    if not beside.is_file():
        return {}
    try:
        content = read_json(beside)[0]
    except FileError as error:
        raise AlignFilesError(str(error)) from error
    for key in ("alpha_pattern", "rank_pattern"):
        if not isinstance(content.get(key) or {}, dict):
            raise AlignFilesError(f"{beside} is of no adapter: {key} is {content[key]!r}, not a mapping")
    for value in (content.get("lora_alpha", 8), *(content.get("alpha_pattern") or {}).values()):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise AlignFilesError(f"{beside} is of no adapter: an alpha in it is {value!r}, not a finite number")
    if content.get("use_dora") or content.get("peft_type", "LORA") != "LORA":
        raise AlignFilesError(
            f"{beside} is of {'DoRA' if content.get('use_dora') else content['peft_type']}, which is no product of two "
            "factors; fold each adapter into its network, and merge the networks"
        )
    return content


def _scales(state: State, config: Mapping[str, Any]) -> dict[str, float]:
    """PEFT's factor of each product: ``lora_alpha / r``, or ``lora_alpha / sqrt(r)`` (rank-stabilized)."""
    scales: dict[str, float] = {}
    for layer, (down, _) in factor_names(list(state)).items() if config else ():
        r, alpha = state[down].shape[0], config.get("lora_alpha", 8)
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            try:
                found = re.fullmatch(rf"(.*\.)?({pattern})", layer)
            except re.error as error:
                raise AlignFilesError(f"alpha_pattern of an adapter: {pattern!r} is no pattern ({error})") from error
            if found:
                alpha = value
                break
        scales[layer] = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    return scales
