"""A teacher's predictions for the training tokens, computed once before training by all ranks and cached: for each
learnt token, the log-probabilities of the k likeliest tokens and of all others together, at the run's temperature.
The teacher is not in memory during training.

The other tokens form one bucket. The loss is

    KL_k = sum over the k of p log(p / q) + p' log(p' / q')

where p' and q' are the probabilities that teacher and student give to the bucket. This is the divergence of the two
distributions after merging these tokens, hence a lower bound (Cover & Thomas, Elements of Information Theory, 2.7.1,
the log sum inequality): KL - KL_k = p' KL(the teacher's others || the student's others), each scaled to 1. With
k = vocabulary they are equal.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.data.cache import kept_in
from finetune.data.packing import IGNORED
from finetune.training.checkpoints.writing import every, leads, rank, ranks, together
from finetune.training.distilling import Say, Teacher
from finetune.training.run_folder import write_whole

PIECE_TOKENS = 2**16  # tokens per cached file; a killed run continues after the last whole file
OPEN_PIECES = 64  # a process may commonly open 1024 files
LEAST = -1e4  # stands for the logarithm of 0
Records: TypeAlias = npt.NDArray[Any]  # of `record_type`, one for each learnt token


@dataclass(frozen=True)
class Asked:
    """A request for the `k` likeliest of the first `classes` tokens, at this `temperature`, for all `rows`, which
    `collator` batches: `piece_rows` rows per file in `folder`, `batch` rows per forward pass."""

    rows: Any
    collator: Any
    k: int
    classes: int
    temperature: float
    folder: Path
    piece_rows: int
    batch: int
    leads_its_node: bool

    @property
    def pieces(self) -> list[range]:
        count = len(self.rows)
        return [range(at, min(at + self.piece_rows, count)) for at in range(0, count, self.piece_rows)]

    def file(self, piece: range, of: str) -> Path:
        """The file of a piece's "records", or of their "counts" per row. Its name holds the row numbers, as another
        --block_size makes other pieces."""
        return self.folder / f"{piece.start}-{piece.stop}.{of}.npy"

    def make_folder(self) -> None:
        with kept_in(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)


class TopK:
    """The cached predictions, memory-mapped: only what is read uses memory. Each map holds a file descriptor, so only
    a few stay open."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self._files = asked, [asked.file(piece, "records") for piece in asked.pieces]
        self.ends = [np.cumsum(np.load(asked.file(piece, "counts"))) for piece in asked.pieces]
        self._records = lru_cache(OPEN_PIECES)(self._mapped)
        self.bytes = sum(self._records(number).nbytes for number in range(len(self.ends)))  # opens every file once

    def of_row(self, row: int) -> Records:
        """The records of a row's learnt tokens, copied into memory."""
        number, place = divmod(row, self.asked.piece_rows)
        ends = self.ends[number]
        return np.array(self._records(number)[int(ends[place - 1]) if place else 0 : int(ends[place])])

    def _mapped(self, number: int) -> Records:
        found: Records = np.load(self._files[number], mmap_mode="r")
        return found

    def say(self, rows: Tensor, device: Any) -> Say:
        """The divergence from the teacher on the learnt tokens of these rows (B,), in their order."""
        found = np.concatenate([self.of_row(row) for row in rows.tolist()])
        logs, rest = (torch.from_numpy(np.ascontiguousarray(found[name])).to(device) for name in ("logs", "rest"))
        tokens = torch.from_numpy(found["tokens"].astype(np.int64)).to(device)
        classes, temperature = self.asked.classes, self.asked.temperature
        return lambda logits, some: divergence_of_top(
            logits[:, :classes], logs[some], tokens[some], rest[some], temperature
        )


def divergence_of_top(student: Tensor, logs: Tensor, tokens: Tensor, rest: Tensor, temperature: float) -> Tensor:
    """KL_k (see above) summed over N rows, in nats: from the student's logits (N, V) and the teacher's
    log-probabilities at this temperature: `logs` (N, k) of its likeliest `tokens` (N, k), `rest` (N,) of the others."""
    own = torch.nn.functional.log_softmax(student.float() / temperature, -1)
    total = (logs.exp() * (logs - own.gather(1, tokens))).sum()
    if tokens.shape[1] < own.shape[1]:
        others = own.scatter(1, tokens, -torch.inf).logsumexp(1)
        total = total + (rest.exp() * (rest - others)).sum()
    return total


def likeliest(logits: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """From logits (N, V): the greatest log-probabilities (N, k), their tokens (N, k), and that of all others (N,)."""
    own = torch.nn.functional.log_softmax(logits.float() / temperature, -1)
    logs, tokens = own.topk(k, dim=-1)
    return logs, tokens, own.scatter(1, tokens, -torch.inf).logsumexp(1).clamp(min=LEAST)


def record_type(k: int, classes: int) -> np.dtype[Any]:
    return np.dtype([("logs", "f4", (k,)), ("tokens", "u2" if classes <= 2**16 else "u4", (k,)), ("rest", "f4")])


def asked_before(asked: Asked, opened: Callable[[], Teacher], device: Any, chunk: int) -> TopK:
    """The cached predictions. Missing ones are computed by the teacher, which is `opened` only if needed and freed
    afterwards. Logits are made for `chunk` learnt tokens at a time. All ranks must call it."""
    together(asked.make_folder)
    lacks = {piece.start for piece in asked.pieces if not asked.file(piece, "records").is_file()}
    wanted = set().union(*every(lacks))  # each host may have its own cache
    if wanted:
        teacher = opened()
        for piece in asked.pieces:
            if piece.start in wanted:
                _keep(asked, piece, _answered(asked, teacher, piece, device, chunk))
        if hasattr(teacher.model, "destroy"):  # DeepSpeed's engine; hooks on its weights would keep it alive
            teacher.model.destroy()
        del teacher
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return together(lambda: TopK(asked))


def _answered(asked: Asked, teacher: Teacher, piece: range, device: Any, chunk: int) -> list[Records]:
    """The records of each row. Each rank takes a share of the rows, in equally many forward passes, as ZeRO-3 needs."""
    share = -(-len(piece) // ranks())
    first = rank() * share
    found: list[Records] = []
    for begin in range(first, first + share, asked.batch):
        places = range(begin, min(begin + asked.batch, first + share))
        batch = asked.collator([asked.rows[piece[min(place, len(piece) - 1)]] for place in places])
        inputs = {name: value.to(device) for name, value in batch.items()}
        counts = (inputs["shift_labels"] != IGNORED).sum(1).tolist()
        found += np.split(np.concatenate(list(_of_batch(asked, teacher, inputs, chunk))), np.cumsum(counts)[:-1])
    return [records for own in every(found) for records in own][: len(piece)]


def _of_batch(asked: Asked, teacher: Teacher, inputs: dict[str, Tensor], chunk: int) -> Iterator[Records]:
    """The records of a batch's learnt tokens, in chunks."""
    kind, count = record_type(asked.k, asked.classes), int((inputs["shift_labels"] != IGNORED).sum())
    answers = teacher.answers(inputs)
    yield np.empty(0, kind)
    with torch.no_grad(), teacher.head_weights():  # not around the forward pass, which would release them
        for begin in range(0, count, chunk):
            logits = answers(slice(begin, begin + chunk))[:, : asked.classes]
            some = np.empty(len(logits), kind)
            said = likeliest(logits, asked.k, asked.temperature)
            some["logs"], some["tokens"], some["rest"] = (value.cpu().numpy() for value in said)
            yield some


def _keep(asked: Asked, piece: range, records: Sequence[Records]) -> None:
    """Rank 0 writes; if hosts share no folder, so does one rank per host."""
    for writes in (leads(), asked.leads_its_node):
        together(partial(_write, asked, piece, records if writes else None))


def _write(asked: Asked, piece: range, records: Sequence[Records] | None) -> None:
    """Raises RunError if the disk is full, RequestError if the cache is not writable."""
    if records is None or asked.file(piece, "records").is_file():
        return
    counts = np.array([len(some) for some in records], dtype=np.int64)
    arrays = {"counts": counts, "records": np.concatenate(records)}  # written last, so it proves that both exist
    with kept_in(asked.folder):
        for of, array in arrays.items():
            write_whole(asked.file(piece, of), partial(np.save, arr=array))
