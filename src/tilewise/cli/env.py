"""``tilewise env``: versions, devices, and which backend takes what."""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import torch

from .._version import __version__
from ..api import explain
from ..bench.results import cpu_model, package_version
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


def facts() -> dict[str, Any]:
    """Everything that the command prints."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return {
        "versions": {
            "tilewise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "cuda": torch.version.cuda,
        },
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "devices": {
            d: cpu_model() if d == "cpu" else torch.cuda.get_device_name(d) for d in devices
        },
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
        print(f"{'device':<10} {device}: {name}")
    for backend, algorithms in found["backends"].items():
        print(f"{'backend':<10} {backend}: {', '.join(algorithms)}")
    print("\nWhich backend takes a call, and why the others do not:")
    for call in found["calls"]:
        taken = f"{call['backend']} ({call['algorithm']})" if call["backend"] else "none"
        print(f"  {call['device']}, {call['call']}: {taken}")
        for backend, reasons in call["reasons"].items():
            print(f"      not {backend}: {'; '.join(reasons)}")
    return 0
