"""Does a model divide its loss by the number of items that the Trainer counted? Found by a probe, not a list of names.

transformers 5.23 multiplies the loss by the number of processes, and does not divide it by the accumulation steps, for
every model whose forward takes `**kwargs`, on the assumption that such a model divides by `num_items_in_batch`
(trainer.py, Trainer.__init__, compute_loss, training_step). Many do not, DistilBERT's classification head among them:
their loss and gradients grow with the number of GPUs, and gradient clipping acts more and more. Setting
`accepts_loss_kwargs` on the model is the Trainer's public switch. Remove this once transformers checks by itself.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.modeling_utils import set_zero3_state

from finetune.data.columns import IGNORED, MULTI_LABEL, TOKENS
from finetune.errors import RequestError
from finetune.models.probes import shorten

PROBE_ROWS, PROBE_TOKENS = 2, 4
PROBE_PIXELS = 64  # the side of an image, for vision models whose config names none


def honours_num_items_in_batch(model: Any, label_is_float: bool = False, label_per_token: bool = False) -> bool | None:
    """True if the loss that `model` returns depends on `num_items_in_batch`; None if the probe cannot run.

    The count goes to a copy of the model as a tensor that requires a gradient: if the loss depends on it, autograd
    finds a path back. The copy is built from the config on the meta device, where tensors have shapes and a graph but
    no values, so it takes no memory and works with weights sharded by ZeRO-3. It must not be sharded itself, as
    transformers does with the parts of a composite model (modeling_utils.py, _from_config). A model whose forward reads
    values (GPT-2 checks for padding) is probed again on the CPU with one layer. `label_per_token` uses labels of shape
    (B, T) instead of (B,).
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if "num_items_in_batch" not in parameters and not takes_any:
        return False
    shape = (PROBE_ROWS, PROBE_TOKENS) if label_per_token else (PROBE_ROWS,)
    for device in ("meta", "cpu"):
        config = copy.deepcopy(model.config)
        try:
            if device == "cpu":
                shorten(config)  # a Funnel's depth is that of its blocks, and cannot be set
            with torch.random.fork_rng(devices=[]), torch.device(device), torch.enable_grad(), set_zero3_state():
                twin = type(model)(config)
                count = torch.ones((), requires_grad=True)
                labels = torch.ones(shape, dtype=torch.float if label_is_float else torch.long)
                loss = twin(**_probe_inputs(twin), labels=labels, num_items_in_batch=count).loss
                (found,) = torch.autograd.grad(loss, count, allow_unused=True)
        except TypeError as error:
            if "num_items_in_batch" in str(error):
                return False
        except (RuntimeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, ImportError):
            continue
        else:
            return found is not None
    return None


def _probe_inputs(model: Any) -> dict[str, torch.Tensor]:
    """A minimal input: tokens (B, T), or pixels (B, channels, H, W) for a vision model."""
    if model.main_input_name != "pixel_values":
        return {"input_ids": torch.ones(PROBE_ROWS, PROBE_TOKENS, dtype=torch.long)}
    side = getattr(model.config, "image_size", None) or PROBE_PIXELS
    height, width = side if isinstance(side, list | tuple) else (side, side)
    return {"pixel_values": torch.ones(PROBE_ROWS, getattr(model.config, "num_channels", 3), height, width)}


def settle_loss_scaling(model: Any, label_is_float: bool = False, label_per_token: bool = False) -> bool:
    """Tell the Trainer what `honours_num_items_in_batch` found; call it before the Trainer is built.

    If the probe cannot run, False is the safe answer: the loss is then a mean over each micro-batch, which equals the
    mean over the global batch if all micro-batches have the same number of items.
    """
    honours = honours_num_items_in_batch(model, label_is_float, label_per_token) or False
    model.accepts_loss_kwargs = honours
    return honours


def settle_trainer(trainer: Any) -> None:
    """The same after a Trainer is built, for a model on which `settle_loss_scaling` was not called."""
    model = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    is_settled = hasattr(model, "accepts_loss_kwargs") or trainer.compute_loss_func is not None
    if not is_settled and hasattr(model, "config") and trainer.model_accepts_loss_kwargs:
        found = (honours_num_items_in_batch(model, label_per_token=per_token) for per_token in (True, False))
        trainer.model_accepts_loss_kwargs = any(found)


def token_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None, label_smoothing: float = 0.0
) -> torch.Tensor:
    """A `compute_loss_func` for models with one label per token, whose own loss is a mean over each micro-batch: logits
    (B, T, V), labels (B, T) with -100 for no label. A sequence-to-sequence collator must make `decoder_input_ids`. With
    label smoothing s, a token's loss is (1 - s) times its own plus s times the mean over the vocabulary (arXiv
    1512.00567, section 7)."""
    logits = outputs["logits"].float().flatten(0, 1)
    entropy = torch.nn.functional.cross_entropy
    total = entropy(logits, labels.flatten(), reduction="sum", label_smoothing=label_smoothing)
    return total / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def loss_for(kind: str, label_smoothing: float, task: str, counts: Sequence[int], rows: int = 0) -> Any:
    """The Trainer's `compute_loss_func`; None if the model's own loss is right.

    `counts` are the numbers of training rows of each class, out of `rows`. Raises RequestError for options that do not
    apply to regression or to rows with several labels.
    """
    if task == TOKENS and kind == "none":
        return weighted_loss([1.0] * len(counts), label_smoothing) if label_smoothing else token_loss
    if task == MULTI_LABEL:
        if label_smoothing:
            raise RequestError("--label_smoothing_factor is for rows with one label, but these have several. Drop it.")
        return many_labels_loss(None if kind == "none" else positive_weights(counts, rows))
    if task == "regression" and (kind != "none" or label_smoothing):
        flag = "class_weights" if kind != "none" else "label_smoothing_factor"
        raise RequestError(f"--{flag} is for classes, but the labels are numbers to predict. Drop it.")
    if task == "regression":
        return regression_loss
    return None if kind == "none" else weighted_loss(class_weights(counts), label_smoothing)


def regression_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Mean squared error in fp32 whatever the model's precision: predictions (B, 1), labels (B,)."""
    errors = (outputs["logits"].float().reshape(-1) - labels.float().reshape(-1)) ** 2
    return errors.sum() / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


def many_labels_loss(weights: list[float] | None) -> Any:
    """A `compute_loss_func`: binary cross entropy in fp32 over logits and labels of 0 and 1 (B, labels), its positives
    weighted by label, averaged over all cells of the global batch, as the Trainer counts each cell as an item."""

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = outputs["logits"].float()
        positive = None if weights is None else torch.tensor(weights, device=logits.device)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        losses = entropy(logits, labels.float(), pos_weight=positive, reduction="sum")
        return losses / (labels.numel() if num_items_in_batch is None else num_items_in_batch)

    return compute


def weighted_loss(class_weights: list[float], label_smoothing: float) -> Any:
    """A `compute_loss_func`: cross entropy with class weights, averaged over rows, or over labelled tokens.

    The divisor is the number of rows of the global batch, not the sum of their weights: a mean of weighted means would
    depend on how rows are spread over processes. scikit-learn's `class_weight` does the same.
    """

    def compute(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, labels = outputs["logits"].float().flatten(0, -2), labels.flatten()  # (rows or tokens, classes)
        weights = torch.tensor(class_weights, device=logits.device)
        # Not `weight=`: with smoothing it would weight the smoothed part by all classes and inflate the loss.
        rows = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
        losses = (rows * weights[labels.clamp_min(0)]).sum()  # `rows` is 0 where there is no label
        return losses / ((labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)

    return compute


def class_weights(counts: Sequence[int]) -> list[float]:
    """Weights that make all classes count equally: rows / (classes x rows of the class), as scikit-learn's
    "balanced"."""
    return [sum(counts) / (len(counts) * count) if count else 0.0 for count in counts]


def positive_weights(counts: Sequence[int], rows: int) -> list[float]:
    """For each label, a weight that makes rows with it count as much as rows without it: absent / present."""
    return [(rows - count) / count if count else 1.0 for count in counts]


def mean_loss(outputs: dict[str, torch.Tensor], labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A `compute_loss_func` for a model that returns each row's loss in its first column: averaged over the rows of the
    global batch, so that it does not depend on how they are spread over ranks."""
    return outputs["logits"][:, 0].sum() / (len(labels) if num_items_in_batch is None else num_items_in_batch)
