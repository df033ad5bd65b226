"""``tilewise env``: versions, devices, and which backend takes what."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

from .._version import __version__
from ..api import explain
from ..bench.results import cpu_model, driver_version, package_version
from ..dispatch import BACKENDS
from ..errors import UnsupportedError

SAMPLES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "float32, causal": (torch.float32, {"causal": True}),
    "bfloat16, causal": (torch.bfloat16, {"causal": True}),
    "float32, dropout": (torch.float32, {"dropout_p": 0.1}),
    "bfloat16, causal, dropout": (torch.bfloat16, {"causal": True, "dropout_p": 0.1}),
}


def add_parser(commands: Any) -> None:
    """Adds the command."""
    own = commands.add_parser("env", help="versions, devices, which backend takes what")
    own.add_argument("--json", action="store_true", help="print JSON")
    own.set_defaults(run=run)


def gpus() -> dict[str, dict[str, Any]]:
    """Each GPU that torch sees: name, compute capability, multiprocessors, memory in GiB."""
    found = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        p = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = {
            "name": p.name,
            "capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "memory_gib": round(p.total_memory / 2**30, 1),
        }
    return found


def facts() -> dict[str, Any]:
    """Everything that the command prints."""
    on_gpus = gpus()
    devices = ["cpu", *on_gpus]
    return {
        "versions": {
            "tilewise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if on_gpus else None,
            "driver": driver_version() if on_gpus else None,
        },
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "devices": {d: on_gpus[d]["name"] if d in on_gpus else cpu_model() for d in devices},
        "gpus": on_gpus,
        "backends": {name: list(backend.algorithms) for name, backend in BACKENDS.items()},
        "calls": [
            {"device": device, "call": name, **_decision(device, *sample)}
            for device in devices
            for name, sample in SAMPLES.items()
        ],
    }


def _decision(device: str, dtype: torch.dtype, arguments: dict[str, Any]) -> dict[str, Any]:
    x = torch.empty(1, 16, 2, 64, dtype=dtype, device=device)
    try:
        choice = explain(x, x, x, **arguments)
    except UnsupportedError as error:
        return {"backend": None, "algorithm": None, "reasons": error.reasons}
    return {
        "backend": choice.backend,
        "algorithm": choice.algorithm,
        "reasons": dict(choice.reasons),
    }


def _gpu_text(gpu: dict[str, Any] | None) -> str:
    if gpu is None:
        return ""
    return (
        f", capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors,"
        f" {gpu['memory_gib']} GiB"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the facts."""
    found = facts()
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, version in found["versions"].items():
        print(f"{name:<10} {version or 'not there'}")
    print(f"{'system':<10} {found['platform']}")
    print(f"{'cpu':<10} {found['cpu']}, {found['threads']} threads")
    for device, name in found["devices"].items():
        print(f"{'device':<10} {device}: {name}{_gpu_text(found['gpus'].get(device))}")
    for backend, algorithms in found["backends"].items():
        print(f"{'backend':<10} {backend}: {', '.join(algorithms)}")
    print("\nWhich backend takes a call, and why the others do not:")
    for call in found["calls"]:
        taken = f"{call['backend']} ({call['algorithm']})" if call["backend"] else "none"
        print(f"  {call['device']}, {call['call']}: {taken}")
        for backend, reasons in call["reasons"].items():
            print(f"      not {backend}: {'; '.join(reasons)}")
    return 0
