"""The state of this process's random generators."""

import random
from typing import Any

import numpy as np
import torch


class RandomGenerators:
    """State of the default generators of Python, NumPy, PyTorch and the current CUDA device."""

    def state_dict(self) -> dict[str, Any]:
        """The state of all generators."""
        version, numbers, gauss = random.getstate()
        state = {
            # an array and not 625 integers: this state is captured at each step
            "python": (version, np.array(numbers, dtype=np.uint32), gauss),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators; one that was not saved or does not exist here is unchanged."""
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(map(int, numbers)), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
