"""A recipe that writes down the gradients of its first step, whole, whatever shards them:
`python keep_gradients.py RECIPE FILE FLAGS`."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from safetensors.torch import save_file
from transformers import TrainerCallback, trainer


class KeepGradients(TrainerCallback):  # type: ignore[misc]
    file = ""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from deepspeed.utils import safe_get_full_grad

        if state.global_step:
            return
        parameters = [(name, one) for name, one in kwargs["model"].named_parameters() if one.requires_grad]
        by_deepspeed = args.deepspeed is not None
        # Stages 1 and 2 have let go of them by now, for DeepSpeed's engine steps where the Trainer goes back.
        found = {name: safe_get_full_grad(one) if by_deepspeed else one.grad for name, one in parameters}
        if args.process_index == 0:
            save_file({name: grad.float().contiguous() for name, grad in found.items()}, self.file)


if __name__ == "__main__":
    trainer.DEFAULT_CALLBACKS.append(KeepGradients)
    recipe, file, *flags = sys.argv[1:]
    KeepGradients.file = file
    sys.argv = [recipe, *flags]
    runpy.run_path(recipe, run_name="__main__")
