"""The random generators of this process as one object with a `state_dict`."""

import random
from typing import Any

import numpy as np
import torch


class RandomGenerators:
    """Python's, NumPy's and PyTorch's default generators, CUDA's of the current device included."""

    def state_dict(self) -> dict[str, Any]:
        """Where they are."""
        version, numbers, gauss = random.getstate()
        state = {
            "python": (
                version,
                np.array(numbers, dtype=np.uint32),
                gauss,
            ),  # as one value: it is kept each step
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; a generator that was not saved, or is not here, stays as it is."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(map(int, numbers)), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
