"""Cross entropy without the full logits: the head of a causal LM returns the loss, computed a chunk of rows at a time.

With a vocabulary of 50,000, the logits of a batch take more memory than the model. The chunked loss is put where any
Hugging Face model calls its head, so that ZeRO-3, FSDP and DDP see the weight used by the module that owns it.

torch 2.13 has `torch.nn.functional.linear_cross_entropy`, which older releases lack. In half precision it rounds the
summed loss to half precision; of single losses it computes all logits a second time for the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.data.packing import IGNORED
from finetune.errors import RequestError
from finetune.models.probes import small_copy, tried
from finetune.run.facts import SCORED_PARTS, loss_chunk_tokens

PROBE_VOCABULARY = 16
SHRUNK = 64  # how much smaller fp16's products are made that sum over many rows, or they might overflow


def choose_chunk_tokens(asked: int | None, model: Any, device: str, changes: Mapping[str, Any] | None = None) -> int:
    """Rows of logits per chunk; 0 for all at once. If the model, with `changes` to its config, does not support chunks,
    raises RequestError when they were `asked` for, and else returns 0."""
    chunk = loss_chunk_tokens(asked, model.config.get_text_config().vocab_size, device)
    reason = tried(model, refusal, changes) if chunk else None
    if reason and asked:
        raise RequestError(f"--loss_chunk_tokens {asked}: {reason}. Set it to 0.")
    return 0 if reason else chunk


class LossHead(nn.Linear):
    """A head that returns logits as before or, while `targets` is set, the loss over them and no logits."""

    chunk_tokens: int
    targets: torch.Tensor | None = None  # (B, T): the token that follows each position
    items: Any = None  # divides the summed loss; None for the number of targets
    keeps_losses = False  # put the loss of each token (B x T,) in `losses` in each forward pass of training
    losses: torch.Tensor | None = None
    by_token = False  # always return the figures of each token; gradients flow through them
    lesson: Any = None  # a distillation loss: a function of rows, weight, bias, targets, items and chunk_tokens
    score: Any = None  # `_score`, compiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.targets is None else self._given_targets(x)

    def compile_scores(self, backend: str | None, mode: str | None) -> None:
        """For a model that is compiled, with what its flags say of that; None: torch's default."""
        self.score = torch.compile(_score, backend=backend or "inductor", mode=mode)

    # A graph of the whole model would hold each chunk's operators anew, and take minutes to compile.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _given_targets(self, x: torch.Tensor) -> torch.Tensor:
        assert self.targets is not None
        rows, targets = x.reshape(-1, x.shape[-1]), self.targets.reshape(-1).to(x.device)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            rows = rows.to(torch.get_autocast_dtype(x.device.type))
        if not self.by_token and self.lesson is None and torch.is_grad_enabled():
            total, losses = _SumAndLosses.apply(rows, weight, bias, targets, self.chunk_tokens, self.score or _score)
            if self.keeps_losses:
                self.losses = losses
            items = (targets != IGNORED).sum() if self.items is None else self.items
            return total / (items.clamp(min=1) if isinstance(items, torch.Tensor) else max(items, 1))
        weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
        if self.by_token:
            return self._figures_of_tokens(rows, weight, bias, targets)
        if not torch.is_grad_enabled():
            return self._row_sums(rows, weight, bias, targets)
        given: torch.Tensor = self.lesson(rows, weight, bias, targets, self.items, self.chunk_tokens)
        return given

    def _row_sums(self, rows: Any, weight: Any, bias: Any, targets: Any) -> torch.Tensor:
        """For evaluation: the loss, correct predictions and targets of each row of the batch, (B, 3)."""
        assert self.targets is not None
        parts = []
        for some, wanted in zip(rows.split(self.chunk_tokens), targets.split(self.chunk_tokens), strict=True):
            parts.append(token_figures(nn.functional.linear(some, weight, bias), wanted))
        return torch.cat(parts).reshape(*self.targets.shape, 3).sum(dim=1)

    def _figures_of_tokens(self, rows: Any, weight: Any, bias: Any, targets: Any) -> torch.Tensor:
        """The same for each token, (B, T, 3). Logits are computed only where there is a target, a chunk at a time, and
        recomputed in the backward pass."""
        assert self.targets is not None
        learnt = (targets != IGNORED).nonzero()[:, 0]
        parts = [rows.new_zeros(0, 3, dtype=torch.float32) + 0 * rows.float().sum()]  # a graph even without targets
        for some in learnt.split(self.chunk_tokens):
            parts.append(checkpoint(_figures, rows[some], weight, bias, targets[some], use_reentrant=False))
        figures = rows.new_zeros(len(targets), 3, dtype=torch.float32)
        return figures.index_copy(0, learnt, torch.cat(parts)).reshape(*self.targets.shape, 3)


class _SumAndLosses(torch.autograd.Function):
    """The summed loss of `rows` (N, hidden size), and each loss (N,), 0 where there is no target; both in fp32. `rows`
    have the precision of the products. Gradients are computed in the forward pass, a chunk at a time, so that logits
    are computed only once. Those of a weight in fp32 or fp16 are summed in fp32, those of one in bf16 are rounded after
    each chunk, as by torch's operator."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        score: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_rows, of_weight, of_bias = ctx.made = [
            _zeros_for_sums(x) if x is not None and needed else None
            for x, needed in zip((rows, weight, bias), ctx.needs_input_grad, strict=False)
        ]
        losses = rows.new_zeros(len(rows), dtype=torch.float32)
        weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
        shrunk = SHRUNK if rows.dtype == torch.float16 else 1
        for start in range(0, len(rows), chunk):
            some, wanted, into = (x[start : start + chunk] for x in (rows, targets, losses))
            logits = nn.functional.linear(some, weight, bias)
            _score_in_parts(score, logits, wanted, into, -(-chunk // SCORED_PARTS))
            keep = (wanted != IGNORED).to(rows.dtype)[:, None]
            if of_rows is not None:
                of_rows[start : start + chunk] = (logits @ weight) * keep
            if of_weight is not None and of_weight.dtype == rows.dtype:
                of_weight.addmm_(logits.T, some * keep)
            elif of_weight is not None:
                of_weight.add_(logits.T @ (some * (keep / shrunk)), alpha=shrunk)
            if of_bias is not None:
                of_bias += (keep.T @ logits)[0]
            del logits  # before the next chunk's exist
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        if ctx.made is None:
            raise RuntimeError("a chunked loss has no second backward pass. Compute the loss again.")
        made, ctx.made = ctx.made, None  # an engine may keep the loss, and with it what it saved
        return (*(None if one is None else one.mul_(upstream[0]) for one in made), None, None, None)


def _score_in_parts(score: Any, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, rows: int) -> None:
    """`score` them, so many rows at a time."""
    for part in zip(*(x.split(rows) for x in (logits, targets, losses)), strict=True):
        score(*part)


def _score(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
    """Put the losses of `logits` (N, V) into `losses` (N,), and their gradients in place of `logits`; those of rows
    without a target are meaningless. All is computed in fp32."""
    place = targets.masked_fill(targets == IGNORED, 0)[:, None]
    scores = logits.log_softmax(-1, dtype=torch.float32)
    of_target = scores.gather(1, place)
    losses.copy_(-of_target[:, 0].masked_fill(targets == IGNORED, 0.0))
    torch.exp(scores, out=logits).scatter_(1, place, of_target.expm1().to(logits.dtype))


def _zeros_for_sums(x: torch.Tensor) -> torch.Tensor:
    """In fp16 a sum over many rows might overflow; autograd turns gradients into the precision of `x`."""
    return torch.zeros_like(x, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype)


def _figures(rows: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor) -> torch.Tensor:
    return token_figures(nn.functional.linear(rows, weight, bias), targets)


def token_figures(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(N, V) and (N,) to (N, 3): the loss in nats, whether the top token is correct, and whether the target counts."""
    loss = nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
    counts = targets != IGNORED
    return torch.stack([loss, (logits.argmax(-1) == targets) & counts, counts], dim=-1)


def row_figures(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The Trainer's `preprocess_logits_for_metrics`: (B, T, V) logits and (B, T) targets to the (B, 3) that a
    `LossHead` returns; what already comes from a `LossHead` is passed through."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    if logits.dim() == 2:
        return logits
    flat = token_figures(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    return flat.reshape(*labels.shape, 3).sum(dim=1)


def refusal(model: Any, changes: Mapping[str, Any] | None = None) -> str | None:
    """Why the loss of `model`, with `changes` to its config, cannot be computed in chunks; None if it can.

    Some models scale or cap their logits after the head (Granite, Cohere, Gemma 2), or add to the loss (the routers of
    mixtures of experts), which a head that returns the loss would silently skip. So a small copy is tried: its chunked
    loss must equal the loss over all logits.
    """
    name = type(model).__name__
    if type(model.get_output_embeddings()) is not nn.Linear:
        return f"{name} has no linear head"
    ids = torch.arange(PROBE_VOCABULARY)[None]
    targets = ids.roll(-1, 1)
    batch = {
        "input_ids": ids,
        "labels": targets,
        "shift_labels": targets,
        "num_items_in_batch": torch.tensor(ids.numel()),
    }
    with torch.enable_grad():
        twin = small_copy(model, PROBE_VOCABULARY, changes)
        plain = twin(**batch).loss.item()
        use_chunked_loss(twin, PROBE_VOCABULARY)
        chunked = twin(**batch).loss.item()
    if not math.isclose(plain, chunked, rel_tol=1e-4):
        return f"{name} does more for its loss than a linear head does ({plain:.4g} against {chunked:.4g} in chunks)"
    return None


def loss_head(model: Any) -> LossHead | None:
    """The head that `use_chunked_loss` gave the model, if it did."""
    return next((module for module in model.modules() if isinstance(module, LossHead)), None)


def use_chunked_loss(model: Any, chunk_tokens: int, by_token: bool = False) -> LossHead:
    """Replace the head of `model` with a `LossHead` of the same weight, and make `model` return its loss or, with
    `by_token`, the (B, T, 3) of `token_figures` as `logits`. Returns the head. Call `refusal` first. `model` is what
    the Trainer gets, including any adapter wrapper."""
    old = model.get_output_embeddings()
    head = LossHead(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    head.weight, head.bias = old.weight, old.bias
    head.chunk_tokens, head.by_token = chunk_tokens, by_token
    model.set_output_embeddings(head)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs.get("labels") is None:
            return args, kwargs
        kwargs = dict(kwargs)
        labels, shifted = kwargs.pop("labels"), kwargs.pop("shift_labels", None)
        head.items = kwargs.pop("num_items_in_batch", None)
        head.targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted is None else shifted
        return args, kwargs

    def after(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if head.targets is None:
            return None
        given = output.logits if output is not None else None
        head.targets = head.items = None
        if given is None:
            return None
        output.logits = None
        if given.dim() == 0:
            output.loss = given
        else:
            output.loss = given[..., 0].sum() / given[..., 2].sum().clamp(min=1)
            output.logits = given
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)
    return head
