"""The fresh process of ``memory.peak_extra``: one measurement, printed as JSON."""

from __future__ import annotations

import json
import sys

import torch

from .memory import measure_here
from .providers import Shape


def main(argument: str) -> None:
    """Measures what the JSON object ``argument`` asks for."""
    task = json.loads(argument)
    torch.set_num_threads(task.pop("threads"))
    provider, backward = task.pop("provider"), task.pop("backward")
    print(json.dumps({"peak": measure_here(provider, Shape(**task), backward)}))


if __name__ == "__main__":
    main(sys.argv[1])
