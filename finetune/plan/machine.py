"""Machine profiles: the JSON files in machines/, or one that `finetune plan --calibrate` wrote.

Bytes, seconds and FLOP/s, never scaled. "Per GPU" means per rank; on `cpu` a rank has its share of cores and memory.
A shipped file says in `sources`, key by key, where its numbers come from: a URL, "measured", or "assumed: why".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from finetune.errors import RequestError, or_meant
from finetune.safe_read import read_json_object

SHIPPED = Path(__file__).resolve().parent / "machines"
DEVICES = ("cuda", "cpu", "rocm")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
# Parts of a name that do not change which machine it means: "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X".
DECORATION = re.compile(r"nvidia|tesla|geforce|rtx|amd|instinct|sxm\d?|hbm\d\w?|[^a-z0-9]")
# A bare name means the smaller memory: what fits there also fits the larger one.
ALIASES = {"h100": "H100-80GB", "a100": "A100-40GB", "v100": "V100-16GB", "a800": "A800-80GB", "h800": "H800-80GB"}
ALIASES |= {"a100pcie": "A100-PCIe-40GB", "v100pcie": "V100-PCIe-16GB"}
ALIASES |= {"4060ti": "RTX4060-Ti-8GB", "5060ti": "RTX5060-Ti-8GB"}  # drivers say the same of either size
# As drivers and vendors spell them.
ALIASES |= {"h10080gbpcie": "H100-PCIe", "a10080gbpcie": "A100-PCIe-80GB", "p100pcie16gb": "P100"}
ALIASES |= {"h200141gb": "H200", "gh200480gb": "GH200", "b200180gb": "B200", "b300ac": "B300"}
ALIASES |= {"mi250xmi250": "MI250X", "mi300x192gb": "MI300X", "mi325x256gb": "MI325X"}
ALIASES |= {"8000": "Quadro-RTX8000", "6000adageneration": "RTX6000-Ada"}
ALIASES |= dict.fromkeys(
    (f"pro6000blackwell{edition}" for edition in ("", "workstationedition", "serveredition")), "RTX-PRO-6000"
)
TOLD, LEAST_HOST_GIB = "--host_memory", 0.1  # the source of what the user tells, and the least that is taken


@dataclass(frozen=True)
class Rule:
    words: str
    holds: Callable[[Any], bool]


def _finite(found: Any) -> bool:
    """Also false for numbers beyond any machine's, with which sums and quotients might end as infinity or as 0."""
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return is_number and (found == 0 or 1e-30 < abs(found) < 1e30)


def _whole(found: Any) -> bool:
    return isinstance(found, int) and _finite(found)


TEXT = Rule("a text that is not empty", lambda found: isinstance(found, str) and bool(found.strip()))
DEVICE = Rule(f"one of {', '.join(DEVICES)}", lambda found: found in DEVICES)
COUNT = Rule("a whole number of 1 or more", lambda found: _whole(found) and found >= 1)
BYTES = Rule("a whole number of 0 or more", lambda found: _whole(found) and found >= 0)
POSITIVE = Rule("a number above 0", lambda found: _finite(found) and found > 0)
NOT_NEGATIVE = Rule("a number of 0 or more", lambda found: _finite(found) and found >= 0)
SHARE = Rule("a share, above 0 and at most 1", lambda found: _finite(found) and 0 < found <= 1)
SHARE_OR_0 = Rule("a share, 0 to 1", lambda found: _finite(found) and 0 <= found <= 1)
LOSS = Rule("a share, 0 or more and below 1", lambda found: _finite(found) and 0 <= found < 1)


@dataclass(frozen=True)
class Link:
    """Per GPU and direction, as achieved, not as advertised. `latency_seconds`: of each step of a ring."""

    bandwidth_bytes_per_second: Annotated[float, POSITIVE]
    latency_seconds: Annotated[float, NOT_NEGATIVE]


@dataclass(frozen=True)
class Nvme:
    """Bytes per second per node, shared by its ranks."""

    bandwidth_read: Annotated[float, POSITIVE]
    bandwidth_write: Annotated[float, POSITIVE]


@dataclass(frozen=True)
class Machine:
    name: Annotated[str, TEXT]
    device: Annotated[str, DEVICE]
    memory_bytes: Annotated[int, COUNT]  # per GPU, as torch reports total_memory: a little below the nominal size
    ranks_per_node: Annotated[int, COUNT]
    # By precision: dense FLOP/s (fp32 without tensor cores), absent if the chip has none; and the share of it that
    # large matrices reach.
    peak_flops: Annotated[dict[str, float], dict.fromkeys(PRECISIONS, POSITIVE)]
    gemm_efficiency: Annotated[dict[str, float], dict.fromkeys(PRECISIONS, SHARE)]
    memory_bandwidth: Annotated[float, POSITIVE]  # bytes per second, nominal
    memory_efficiency: Annotated[float, SHARE]  # share of it that streaming kernels reach
    launch_seconds: Annotated[float, NOT_NEGATIVE]  # the host's time for each kernel of an eager forward pass
    intra_node: Link  # ring collectives within a node
    inter_node: Link  # and between nodes
    host_link: Link  # pinned host memory; its latency is that of one copy
    nvme: Nvme
    cpu_adam_parameters_per_second: Annotated[float, POSITIVE]  # DeepSpeedCPUAdam, per node
    host_memory_bytes: Annotated[int, COUNT]  # per node
    context_bytes: Annotated[int, BYTES]  # the CUDA context, per rank, outside torch's allocator
    workspace_bytes: Annotated[int, BYTES]  # cuBLAS's, per thread and stream, inside torch's allocator
    fragmentation: Annotated[float, LOSS]  # share of the memory that the allocator loses
    sources: Annotated[dict[str, str], TEXT]  # by the names of the fields above
    # The fields below are optional.
    # Shares of the peak that the package flash-attn 2 reaches at long sequences, "forward" and "backward", on a chip
    # whose native instructions it does not use; absent for others.
    flash_attention_2: Annotated[dict[str, float], dict.fromkeys(("forward", "backward"), SHARE)] = field(
        default_factory=dict
    )
    board_power_watts: Annotated[float, NOT_NEGATIVE] = 0.0  # per GPU, the board's maximum; 0 if no source gives it
    # Share of `gemm_efficiency` that products reach within a training step; 0: as on an A100 (kernels.SUSTAINED).
    sustained: Annotated[float, SHARE_OR_0] = 0.0
    step_factor: Annotated[float, POSITIVE] = 1.0  # a real step's time / the sum of its operators'

    @property
    def usable_bytes(self) -> int:
        """What torch's allocator can give to tensors: the device's memory less the context and less the share lost
        between blocks."""
        return int((self.memory_bytes - self.context_bytes) * (1 - self.fragmentation))

    @property
    def torch_device(self) -> str:
        """The name that torch gives the device: it calls AMD's "cuda", too."""
        return "cpu" if self.device == "cpu" else "cuda"

    def __hash__(self) -> int:
        """Dicts are not hashable; equal machines agree in these fields."""
        return hash((self.name, self.device, self.memory_bytes, self.memory_bandwidth))


def _shape(kind: type) -> dict[str, Any]:
    """The required form of a file: per key a Rule or, for an object, its own shape."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {key: hint.__metadata__[0] if hasattr(hint, "__metadata__") else _shape(hint) for key, hint in hints}


SHAPE = _shape(Machine)
SHAPE["sources"] = dict.fromkeys(SHAPE, TEXT)
OPTIONAL = ("step_factor", "flash_attention_2", "board_power_watts", "sustained")
PARTIAL = ("peak_flops", "gemm_efficiency", "sources", "flash_attention_2")  # these need not have every key


def machine_names() -> tuple[str, ...]:
    return tuple(sorted((path.stem for path in SHIPPED.glob("*.json")), key=str.lower))


def find_machine(name: str) -> Machine:
    """A shipped machine by name, or a path to a .json file. Raises RequestError."""
    return read_machine(Path(name).expanduser()) if name.endswith(".json") else shipped_machine(name)


def shipped_machine(name: str) -> Machine:
    """A shipped machine by name, as people or drivers spell it. Raises RequestError."""
    names = {_plain(shipped): shipped for shipped in machine_names()} | ALIASES
    if _plain(name) in names:
        return read_machine(SHIPPED / f"{names[_plain(name)]}.json")
    near = difflib.get_close_matches(_plain(name), names, 1)
    hint = f" Did you mean {names[near[0]]}?" if near else ""
    raise RequestError(
        f"{name}: there is no such machine.{hint} Known machines: {', '.join(machine_names())}; or give the path of a "
        f".json file that `finetune plan --calibrate` wrote."
    )


def with_host_memory(machine: Machine, size: int) -> Machine:
    """With this many bytes of host memory on each node. On a CPU one rank can take all of it."""
    own = size if machine.device == "cpu" else machine.memory_bytes
    sources = machine.sources | {"host_memory_bytes": TOLD}
    return replace(machine, memory_bytes=own, host_memory_bytes=size, sources=sources)


MOST_BYTES = 2**20  # profiles are about 3 KiB


def read_machine(path: Path) -> Machine:
    """Raises RequestError naming the file, the key, what was found and what is expected."""
    found = read_json_object(path, MOST_BYTES, strict=True)
    _check(path, "the file", found, SHAPE)
    peaks, shares = found["peak_flops"], found["gemm_efficiency"]
    if "fp32" not in peaks:
        raise RequestError(f"{path}: peak_flops lacks fp32, which optimizers use. Add it.")
    if set(peaks) != set(shares):
        raise RequestError(
            f"{path}: gemm_efficiency has {', '.join(shares) or 'nothing'}, but peak_flops {', '.join(peaks)}. "
            f"Give both for the same precisions."
        )
    objects: dict[str, Any] = {name: Link(**found[name]) for name in ("intra_node", "inter_node", "host_link")}
    objects["nvme"] = Nvme(**found["nvme"])
    machine = Machine(**{**found, **objects})
    if machine.usable_bytes < 1:
        raise RequestError(
            f"{path}: context_bytes and fragmentation leave nothing of memory_bytes {machine.memory_bytes:,}. Fix them."
        )
    return machine


def write_machine(machine: Machine, path: Path) -> None:
    """In the form that `read_machine` reads. Raises RequestError if the file cannot be written."""
    write_json_or_refuse(path, dataclasses.asdict(machine))


def write_json_or_refuse(path: Path, content: dict[str, Any]) -> None:
    """Raises RequestError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written ({error}). Give another path.") from error


def _check(path: Path, key: str, found: Any, shape: dict[str, Any] | Rule) -> None:
    if isinstance(shape, Rule):
        if not shape.holds(found):
            raise RequestError(f"{path}: {key} is {found!r}, but it must be {shape.words}. Fix it, or calibrate again.")
        return
    if not isinstance(found, dict):
        raise RequestError(f"{path}: {key} is {found!r}, but it must be an object, like {{...}}. Fix it.")
    if missing := [name for name in shape if name not in found and name not in OPTIONAL and key not in PARTIAL]:
        raise RequestError(f"{path}: {key} lacks {', '.join(missing)}. Add it, or calibrate again.")
    for name, value in found.items():
        if name not in shape:
            mend = or_meant(name, shape, f" Remove it, or calibrate again. Known: {', '.join(shape)}.")
            raise RequestError(f"{path}: {key} has {name!r}, which is not one of its keys.{mend}")
        _check(path, name if shape is SHAPE else f"{key}.{name}", value, shape[name])


def _plain(name: str) -> str:
    return DECORATION.sub("", name.lower())
