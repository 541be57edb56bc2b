"""What only the machine can tell of a request, before anything is built."""

from __future__ import annotations

import pytest

from finetune.errors import RequestError
from finetune.run.launch import Launch
from finetune.run.recipes.causal_lm import CAUSAL_LM
from finetune.run.resolve import resolve
from finetune.training.start import check_kernels


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--attn_implementation flex_attention", "on a CPU it has no backward pass. Give sdpa"),
        ("--use_liger_kernel True", "its Triton kernels need a GPU"),
        (
            '--activation_checkpointing True --activation_checkpointing_kwargs {"offload":true}',
            "activation_checkpointing_kwargs .*: offload needs a GPU",
        ),
    ],
)
def test_kernels_that_no_cpu_trains_with_are_refused_where_there_is_no_gpu(words: str, said: str) -> None:
    run = resolve(CAUSAL_LM, words.split(), Launch(), is_here=False)
    check_kernels(run, has_cuda=True)
    with pytest.raises(RequestError, match=said):
        check_kernels(run, has_cuda=False)


def test_a_model_that_is_only_evaluated_needs_no_backward_pass() -> None:
    words = "--model_name_or_path gpt2 --do_train False --attn_implementation flex_attention"
    check_kernels(resolve(CAUSAL_LM, words.split(), Launch(), is_here=False), has_cuda=False)
